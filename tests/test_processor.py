"""What is found about a processor, and the convolutions chosen for it."""

import os
import subprocess
import sys

import pytest

from tandem import processor
from tandem.processor import describe_processor, prefers_transforms


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ("x86_64 AMD EPYC avx avx2 fma", True),
        ("x86_64 AMD EPYC avx avx2 avx512bw avx512f fma", False),
        ("x86_64 AMD EPYC avx2 avx512bw ATEN_CPU_CAPABILITY=avx2", True),
        ("x86_64 Old avx sse4_2", False),
        ("aarch64 0xd40 asimd sve", False),
    ],
)
def test_transforms_are_for_avx2(description: str, expected: bool) -> None:
    assert prefers_transforms(description) == expected


@pytest.mark.parametrize("steering", [{}, {"ATEN_CPU_CAPABILITY": "avx2"}])
def test_pytorch_sees_the_same_instructions(steering: dict[str, str]) -> None:
    program = (
        "import torch; from tandem.processor import *; d = describe_processor().split(); "
        "print(torch.backends.cpu.get_cpu_capability(), 'avx2' in d, 'avx512bw' in d, "
        "'ATEN_CPU_CAPABILITY=avx2' in d)"
    )
    plain = {key: value for key, value in os.environ.items() if key not in processor.STEERING}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=plain | steering
    )
    found = result.stdout.split()
    if found[0] not in ("AVX2", "AVX512"):
        pytest.skip(f"PyTorch's kernels here are {found[0]}")
    assert found[1] == "True"
    assert (found[0] == "AVX512") == (found[2] == "True" and not steering)
    assert (found[3] == "True") == bool(steering)


def test_steering_of_the_instruction_set_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    before = describe_processor()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert set(describe_processor().split()) - set(before.split()) == {
        "ATEN_CPU_CAPABILITY=default"
    }


def test_flags_that_no_kernel_needs_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"model name": "M", "flags": "avx2 fma rdrand sse4_2"}
    monkeypatch.setattr(processor, "_cpuinfo", lambda: fields)
    before = describe_processor()
    fields["flags"] += " hypervisor"
    assert describe_processor() == before
    fields["flags"] += " avx512f"
    assert describe_processor() != before
