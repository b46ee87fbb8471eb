"""Files of weights that people have and that fit nothing here, told from damaged ones."""

import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

# Names of parameters in torchvision's AlexNet, and in whatever is built like it.
_FEATURES, _CLASSIFIER = "features.0.weight", "classifier.6.weight"
_MOST_BYTES = 1 << 20  # names and shapes; numbers lie elsewhere in such a file
_LEGACY = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)  # how torch.save began until 2020

TORCHVISION = (
    "a state dict in the manner of torchvision's AlexNet, which is another network (Krizhevsky "
    "2014, arXiv 1404.5997: 64, 192, 384, 256 and 256 filters, no groups, no normalisation), so "
    "its weights fit nothing here; pretrained/README.md says which do"
)
PYTORCH = (
    "a file of PyTorch, to read which is to execute what stands in it; this program does not. "
    "pretrained/README.md says which weights can be had"
)


def describe_foreign(path: Path) -> str | None:
    """Say what kind of file this is, where it is a known one that can't be used.

    Nothing in it is executed.

    Parameters
    ----------
    path : Path
        A file.

    Returns
    -------
    str or None
        "a state dict ...", to follow on the name of the file; None where it is of no such kind.
    """
    try:
        if zipfile.is_zipfile(path):
            return _describe_archive(path)
        with path.open("rb") as file:
            beginning = file.read(_MOST_BYTES)
        if beginning.startswith(_LEGACY):
            names = (_FEATURES, _CLASSIFIER)
            return TORCHVISION if all(n.encode() in beginning for n in names) else PYTORCH
        with safe_open(path, framework="numpy") as tensors:
            return TORCHVISION if _is_torchvision(tensors.keys()) else None
    except (OSError, SafetensorError, ValueError):
        return None


def _describe_archive(path: Path) -> str | None:
    """What is in a zip file, which ``torch.save`` writes: a pickle, and the numbers beside it."""
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
            if not pickles:
                return None
            with archive.open(pickles[0]) as file:
                content = file.read(_MOST_BYTES)
    except Exception:
        # zipfile raises BadZipFile, zlib.error, NotImplementedError, RuntimeError, and others.
        return None
    names = (_FEATURES, _CLASSIFIER)
    return TORCHVISION if all(name.encode() in content for name in names) else PYTORCH


def _is_torchvision(names: Iterable[str]) -> bool:
    return {_FEATURES, _CLASSIFIER} <= set(names)
