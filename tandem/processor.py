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

# Processors with instructions for vectors of 512 bits of which they multiply 256 at a time: Zen 4.
_HALF_RATE = "AuthenticAMD family 25"


def describe_processor() -> str:
    """Return model, vector instructions and steering variables, by which kernels are chosen."""
    parts = [platform.machine()]
    fields = _cpuinfo()
    if model := fields.get("model name") or fields.get("CPU part"):
        parts.append(model)
    if "cpu family" in fields:
        parts.append(f"{fields.get('vendor_id')} family {fields['cpu family']}")
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    parts += sorted(flag for flag in flags if flag.startswith(_VECTOR_FLAGS))
    parts += [f"{name}={os.environ[name]}" for name in STEERING if name in os.environ]
    return " ".join(parts)


def prefers_transforms(processor: str, threads: int) -> bool:
    """Whether NNPACK's convolutions are faster than oneDNN's on a described processor.

    They are code for AVX2 and need fewer multiplications. oneDNN makes up for it where it can
    multiply twice as many numbers at a time. Where it has AVX-512 at half the rate, one thread
    gains by NNPACK; several do not, since NNPACK's threads and PyTorch's take turns.
    """
    words = processor.split()
    if "avx2" not in words:
        return False
    if "avx512bw" not in words or "ATEN_CPU_CAPABILITY=avx2" in words:
        return True
    return threads == 1 and _HALF_RATE in processor


def _cpuinfo() -> dict[str, str]:
    """The fields of the first processor; empty where the system has no such file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    pairs = (line.partition(":") for line in path.read_text().split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
