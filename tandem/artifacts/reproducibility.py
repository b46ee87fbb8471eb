"""Conditions under which a resumed run computes the same bits."""

import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import tandem
from tandem.compilers import triton_version
from tandem.config.fields import flag
from tandem.config.hardware import RankInfo, device_names
from tandem.config.resolve import run_facts
from tandem.config.schema import Config, affecting_bits
from tandem.distributed import ALL_REDUCES, RULES
from tandem.errors import InputError
from tandem.processor import describe_processor

PACKAGES = ("llvmlite", "numba", "numpy", "pytensor", "torch")
"""Packages whose code computes, or decides what is computed."""

SAME_BITS = ("0.4.0.dev0",)
"""Versions of Tandem that compute the same bits, this one last; a change of bits begins anew."""

Conditions = dict[str, str]

NORM_ROWS = "norm_rows"  # a condition of networks with averages

_IN_WORDS = {"data": "data (the checksum of manifest and mean image)"}


def conditions(config: Config, ranks: Sequence[RankInfo] = ()) -> Conditions:
    """Collect what the bits of a run depend on: marked settings, data, hardware and software.

    `config` has every ``auto`` resolved, and its manifest and mean image, if any, exist.
    """
    settings = dict(config)
    found = {} if config.summed_rows else {"trainers": str(len(config.devices))}
    omitted = _omitted()
    found |= {key: _text(settings[key]) for key in affecting_bits(config)}
    found = {key: value for key, value in found.items() if omitted.get(key) != value}
    if config.rand_colour:
        found["rand_colour"] += f" by the covariance of checksum {_digest(config.covariance_path)}"
    if config.compile is True and settings["bucket_mb"]:  # each segment is compiled by itself
        found["compile"] += f" in buckets of {settings['bucket_mb']:g} MB"
    found |= {
        "devices": ", ".join(dict.fromkeys(_devices(config.devices, ranks))),
        "data": _digest(config.manifest_path, config.mean_path),
        "processor": ", ".join(dict.fromkeys(rank.processor for rank in ranks))
        or describe_processor(),
        "python": platform.python_version(),
    }
    if config.devices[0] != "cpu":  # with Triton, layers have other kernels
        found["triton"] = ", ".join(dict.fromkeys(r.triton for r in ranks)) or triton_version()
    if collective := _collective(config, ranks):
        found["collective"] = collective
    return found | versions()


def with_norm_rows(conditions: Conditions, config: Config) -> Conditions:
    """The conditions of a network with averages, which alone depends on `norm_rows`."""
    return {**conditions, NORM_ROWS: str(config.group_rows or "global")}


def recorded_norm_rows(path: Path, conditions: Mapping[str, str]) -> int | Literal["global"] | None:
    """`norm_rows` of the run of a checkpoint; None for a network without averages.

    Raises InputError if it is neither a whole number nor "global".
    """
    text = conditions.get(NORM_ROWS)
    if text is None:
        return None
    if text == "global":
        return "global"
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise InputError(
            f"{path} ({NORM_ROWS}): found {text[:20]!r}, expected a whole number of at least 1"
            " or 'global'"
        )
    return int(text)


def versions() -> dict[str, str]:
    """Return the versions of the packages that compute."""
    found = {"tandem": tandem.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_exact(path: Path, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Refuse to continue a checkpoint where the same bits cannot be expected.

    `theirs` are its `conditions`, `ours` those of the run that continues.
    """
    theirs, ours = _omitted() | {**theirs}, _omitted() | {**ours}
    differing = [
        name for name in {**theirs, **ours} if not _same(name, theirs.get(name), ours.get(name))
    ]
    if not differing:
        return
    listed = "; ".join(
        f"{_IN_WORDS.get(name, name)} {_shown(theirs.get(name), ours.get(name))} "
        f"in the checkpoint, now {_shown(ours.get(name), theirs.get(name))}"
        for name in differing
    )
    raise InputError(
        f"{path}: this run would not continue with the same bits: {listed}. "
        "Restore what differs, or set exact: false (--exact false) to continue anyway"
    )


def _omitted() -> Conditions:
    """Settings that are no condition at their defaults: older checkpoints do not have them."""
    return {
        name: _text(field.default)
        for name, field in Config.model_fields.items()
        if flag(field, "affects_bits") and flag(field, "omit_default")
    }


def _same(name: str, theirs: str | None, ours: str | None) -> bool:
    return theirs == ours or (name == "tandem" and {theirs, ours} <= {*SAME_BITS})


def _devices(devices: Sequence[str], ranks: Sequence[RankInfo]) -> list[str]:
    """The name of each trainer's device, as its maker gives it."""
    if not ranks or devices[0] == "cpu":
        return device_names(devices)
    pairs = zip(devices, ranks, strict=True)
    return [rank.gpus[int(device.partition(":")[2])] for device, rank in pairs]


def _collective(config: Config, ranks: Sequence[RankInfo]) -> str:
    """Return how ranks average; empty where the bits are those of one machine's trainers."""
    settings = dict(config)
    rule = RULES.chosen(settings)
    if not rule.is_synchronous:
        return rule.name
    return ALL_REDUCES.chosen(settings).condition(run_facts(config, ranks))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _digest(*paths: Path | None) -> str:
    """A short checksum of the content of files."""
    contents = (path.read_bytes() for path in paths if path is not None)
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


def _shown(value: str | None, other: str | None) -> str:
    """A condition; of a long one, only the words that differ."""
    if value is None:
        return "unknown"
    if len(value) <= 60 or other is None:
        return value
    return " ".join(word for word in value.split() if word not in other.split()) or "less"
