"""This machine's processor and its vector instructions, found without loading PyTorch."""

import os
import platform
from pathlib import Path

STEERING = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
)
"""Environment variables by which PyTorch's libraries choose other instructions."""

_VECTOR_FLAGS = ("sse", "ssse", "avx", "fma", "f16c", "amx", "asimd", "sve", "bf16", "i8mm", "neon")


def describe_processor() -> str:
    """Return model, vector instructions and steering variables, by which kernels are chosen."""
    parts = [platform.machine()]
    fields = _cpuinfo()
    if model := fields.get("model name") or fields.get("CPU part"):
        parts.append(model)
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    parts += sorted(flag for flag in flags if flag.startswith(_VECTOR_FLAGS))
    parts += [f"{name}={os.environ[name]}" for name in STEERING if name in os.environ]
    return " ".join(parts)


def prefers_transforms(processor: str) -> bool:
    """Whether NNPACK's convolutions are faster than oneDNN's on a described processor.

    They are code for AVX2 and need fewer multiplications, which oneDNN makes up for with AVX-512.
    """
    words = processor.split()
    return "avx2" in words and ("avx512bw" not in words or "ATEN_CPU_CAPABILITY=avx2" in words)


def _cpuinfo() -> dict[str, str]:
    """The fields of the first processor; empty where the system has no such file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    pairs = (line.partition(":") for line in path.read_text().split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
