"""What is found about a processor, and the convolutions chosen for it."""

import pytest

from tandem import processor
from tandem.processor import describe_processor, prefers_fft


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ("x86_64 AMD EPYC avx avx2 fma", True),
        ("x86_64 AMD EPYC avx avx2 avx512bw avx512f fma", False),
        ("x86_64 AMD EPYC family 25 avx2 avx512bw", True),
        ("x86_64 AMD EPYC family 26 avx2 avx512bw", False),
        ("x86_64 Intel Xeon family 25 avx2 avx512bw", False),
        ("x86_64 AMD EPYC family 25 avx2 avx512bw ATEN_CPU_CAPABILITY=default", False),
        ("x86_64 AMD EPYC avx2 avx512bw ATEN_CPU_CAPABILITY=avx2", True),
        ("x86_64 AMD EPYC avx2 ATEN_CPU_CAPABILITY=default", False),
        ("x86_64 Old avx sse4_2", False),
        ("aarch64 0xd40 asimd sve", False),
    ],
)
def test_fft_is_for_multipliers_of_256_bits(description: str, expected: bool) -> None:
    assert prefers_fft(description) == expected


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
