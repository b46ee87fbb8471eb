"""What has to be the same for a resumed run to compute the same bits."""

import hashlib
import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.config.hardware import RankInfo, device_names
from tandem.config.schema import Config
from tandem.errors import InputError

PACKAGES = ("tandem", "numpy", "pytensor", "torch")
"""Those whose code computes, or decides what is computed."""

STEERING = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
)
"""Environment variables by which PyTorch's libraries choose other instructions."""

Conditions = dict[str, str]


def conditions(config: Config, places: Sequence[RankInfo] = ()) -> Conditions:
    """What the bits of a run depend on, beside its settings of training.

    Parameters
    ----------
    config : Config
        With every ``auto`` resolved. Its manifest and mean image are there.
    places : sequence of RankInfo
        Of the ranks, by rank, where the trainers are ranks.

    Returns
    -------
    dict of str to str
        Each condition by its name.
    """
    found = {
        "trainers": str(len(config.devices)),
        "threads": str(config.threads),
        "compile": str(bool(config.compile)).lower(),
        "exchange": config.exchange,
        "precision": config.precision,
        "deterministic": str(config.deterministic).lower(),
        "devices": ", ".join(dict.fromkeys(_devices(config.devices, places))),
        "data": _digest(config.manifest_path, config.mean_path),
        "processor": ", ".join(dict.fromkeys(p.processor for p in places)) or processor(),
        "python": platform.python_version(),
    }
    if collective := _collective(config, places):
        found["collective"] = collective
    return found | versions()


def versions() -> dict[str, str]:
    """The versions of the packages that compute."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def processor() -> str:
    """The processor's model and vector instructions: kernels are chosen, and cut, by them."""
    parts = [platform.machine()]
    fields = _cpuinfo()
    if model := fields.get("model name") or fields.get("CPU part"):
        parts.append(model)
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    parts += sorted(flag for flag in flags if flag.startswith(_VECTOR_FLAGS))
    parts += [f"{name}={os.environ[name]}" for name in STEERING if name in os.environ]
    return " ".join(parts)


def check_exact(path: Path, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Refuse to continue where the same bits can't be expected.

    Parameters
    ----------
    path : Path
        The checkpoint.
    theirs, ours : mapping of str to str
        Its `conditions`, and those of the run that continues.

    Raises
    ------
    InputError
        Names every condition that differs, what it was and what it is.
    """
    differing = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    if not differing:
        return
    listed = "; ".join(
        f"{name} {_shown(theirs.get(name), ours.get(name))} in the checkpoint, "
        f"now {_shown(ours.get(name), theirs.get(name))}"
        for name in differing
    )
    raise InputError(
        f"{path}: this run would not continue with the same bits: {listed}. "
        "Restore what differs, or set exact: false (--exact false) to continue all the same"
    )


def _devices(devices: Sequence[str], places: Sequence[RankInfo]) -> list[str]:
    """What each trainer's device is, by its maker's name."""
    if not places or devices[0] == "cpu":
        return device_names(devices)
    pairs = zip(devices, places, strict=True)
    return [place.gpus[int(device.partition(":")[2])] for device, place in pairs]


def _collective(config: Config, places: Sequence[RankInfo]) -> str:
    """How ranks average; nothing where the bits are those of one machine's trainers."""
    machines = Counter(place.machine for place in places)
    if config.rule != "bsp":
        return config.rule
    if config.collective == "asa16":
        buckets = f" in buckets of {config.bucket_mb:g} MB" if config.bucket_mb else ""
        feedback = " with error feedback" * config.error_feedback
        return f"asa16 {config.wire}{feedback}{buckets}"
    if config.collective == "hierarchical" and len(machines) > 1:
        numbers = {machine: number for number, machine in enumerate(machines)}
        return "hierarchical " + "+".join(str(numbers[place.machine]) for place in places)
    if config.collective == "ar" and places[0].starter == "torchrun":
        return "ar by gloo"
    return config.collective if config.collective in ("ar", "nccl") else ""


_VECTOR_FLAGS = ("sse", "ssse", "avx", "fma", "f16c", "amx", "asimd", "sve", "bf16", "i8mm", "neon")


def _digest(*paths: Path) -> str:
    """A short checksum of files, the same wherever they lie."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def _cpuinfo() -> dict[str, str]:
    """The fields of the first processor; none where the system has no such file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    pairs = (line.partition(":") for line in path.read_text().split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _shown(value: str | None, other: str | None) -> str:
    """A condition; of a long one only the words in which it differs."""
    if value is None:
        return "unknown"
    if len(value) <= 60 or other is None:
        return value
    return " ".join(word for word in value.split() if word not in other.split()) or "less"
