"""Recognise unsupported weight files."""

import pickle
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

# Parameter names of torchvision's AlexNet; VGG has the first and last, and not both of the others.
_NAMES = ("features.0.weight", "features.3.weight", "features.10.weight", "classifier.6.weight")
_MOST_BYTES = 1 << 20  # names and shapes; the numbers follow in a file of their own
_LEGACY = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)  # how torch.save began until 2020

TORCHVISION = (
    "a state dict in the manner of torchvision's AlexNet, which is another network (Krizhevsky "
    "2014, arXiv 1404.5997: 64, 192, 384, 256 and 256 filters, no groups, no normalisation), so "
    "its weights fit nothing here; pretrained/README.md lists weights that do"
)
_PYTORCH = (
    "a PyTorch file, and reading it would execute code that it holds, so this program does not; "
    "PyTorch makes a safetensors file of a state dict, for tandem convert: python -c "
    "'import torch, safetensors.torch as s; "
    's.save_file(torch.load("{path}", weights_only=True), "{target}")\''
)


def describe_unsupported(path: Path) -> str | None:
    """Describe a weight file of a known kind that cannot be used, without executing it.

    The text, "a state dict ...", is to follow the file's name; None for any other file.
    """
    try:
        if zipfile.is_zipfile(path):
            return _describe_archive(path)
        with path.open("rb") as file:
            beginning = file.read(_MOST_BYTES)
        if beginning.startswith(_LEGACY):
            return _describe_pickle(path, beginning)
        with safe_open(path, framework="numpy") as tensors:
            return TORCHVISION if {*_NAMES} <= {*tensors.keys()} else None
    except (OSError, SafetensorError, ValueError):
        return None


def _describe_archive(path: Path) -> str | None:
    """Look into a zip file such as ``torch.save`` writes: a pickle, and the numbers beside it."""
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
            if not pickles:
                return None
            with archive.open(pickles[0]) as file:
                return _describe_pickle(path, file.read(_MOST_BYTES))
    except Exception:
        # zipfile raises BadZipFile, zlib.error, NotImplementedError, RuntimeError, and others.
        return None


def _describe_pickle(path: Path, content: bytes) -> str:
    if all(name.encode() in content for name in _NAMES):
        return TORCHVISION
    return _PYTORCH.format(path=path, target=path.with_suffix(".safetensors"))
