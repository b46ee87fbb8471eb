"""This machine's processor and its vector instructions, found without loading PyTorch."""

import os
import platform
from pathlib import Path
from typing import Literal

Convolutions = Literal["auto", "direct", "winograd"]
"""Ways to compute convolutions on a CPU: oneDNN's, Winograd's, or what its processor prefers."""

STEERING = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NUMBA_CPU_NAME",
    "NUMBA_CPU_FEATURES",
    "NUMBA_ENABLE_AVX",
    "NUMBA_OPT",
)
"""Environment variables by which PyTorch's libraries and numba choose other instructions."""

_VECTOR_FLAGS = ("sse", "ssse", "avx", "fma", "f16c", "amx", "asimd", "sve", "bf16", "i8mm", "neon")


def set_openmp(threads: int) -> None:
    """Set what PyTorch's OpenMP library reads when it is loaded: threads, and how they wait."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    limit_spinning()


def limit_spinning() -> None:
    """Let OpenMP's threads, unless the environment has other wishes, sleep soon after a loop.

    Read when an OpenMP library is loaded. By default threads keep their cores busy for some
    milliseconds, which those of another library, as numba's beside PyTorch's, or process then lack:
    beside two busy processes a step of AlexNet took 19 s, and takes 4. A tenth of the number saves
    half a second more there, but threads that sleep between short loops take long to wake: a single
    picture then takes 43 ms, now 30.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def describe_processor() -> str:
    """Return model, vector instructions and steering variables, by which kernels are chosen."""
    parts = [platform.machine()]
    if model := processor_model():
        parts.append(model)
    fields = _cpuinfo()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    parts += sorted(flag for flag in flags if flag.startswith(_VECTOR_FLAGS))
    parts += [f"{name}={os.environ[name]}" for name in STEERING if name in os.environ]
    return " ".join(parts)


def processor_model() -> str:
    """Return the model's name, or its number; "" where the system does not report it."""
    fields = _cpuinfo()
    return fields.get("model name") or fields.get("CPU part") or ""


def prefers_winograd(processor: str) -> bool:
    """Return whether Winograd's convolutions are faster than oneDNN's on a described processor.

    They multiply less, in loops of our own whose vectors are as long as the multipliers.
    """
    words = processor.split()
    steered = {word for word in words if word.startswith("ATEN_CPU_CAPABILITY=")}
    return "avx2" in words and steered <= {f"ATEN_CPU_CAPABILITY=avx{name}" for name in (2, 512)}


def has_short_vectors(processor: str) -> bool:
    """Return whether a described processor has AVX2, of 256 bits, and no AVX-512."""
    words = processor.split()
    return "avx2" in words and "avx512f" not in words


def _cpuinfo() -> dict[str, str]:
    """The fields of the first processor; empty where the system has no such file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    pairs = (line.partition(":") for line in path.read_text().split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
