"""What is found about a processor, and the convolutions chosen for it."""

import os
import subprocess
import sys

import pytest

from tandem import processor
from tandem.processor import describe_processor, has_short_vectors, prefers_winograd, set_openmp


def test_openmp_gets_threads_that_spin_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # to be restored
        monkeypatch.delenv(name)
    set_openmp(3)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["GOMP_SPINCOUNT"]) == ("3", "10000")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    set_openmp(1)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["GOMP_SPINCOUNT"]) == ("1", "7")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    set_openmp(1)
    assert "GOMP_SPINCOUNT" not in os.environ


def test_openmp_is_limited_where_the_mode_is_imported_first() -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    found = subprocess.run(
        [sys.executable, "-c", "import tandem.backend"],
        env={k: v for k, v in os.environ.items() if k not in names}
        | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    # Each OpenMP library shows what it has read; where PyTorch has none of GCC's, nothing does.
    assert found.stderr.count("GOMP_SPINCOUNT = '10000'") == found.stderr.count("GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ("x86_64 AMD EPYC avx avx2 fma", True),
        ("x86_64 Intel Xeon avx avx2 avx512bw avx512f fma", True),
        ("x86_64 AMD EPYC avx2 avx512bw ATEN_CPU_CAPABILITY=avx2", True),
        ("x86_64 AMD EPYC avx2 avx512bw ATEN_CPU_CAPABILITY=avx512", True),
        ("x86_64 AMD EPYC avx2 avx512bw ATEN_CPU_CAPABILITY=default", False),
        ("x86_64 Old avx sse4_2", False),
        ("aarch64 0xd40 asimd sve", False),
    ],
)
def test_winograd_is_for_long_vectors(description: str, expected: bool) -> None:
    assert prefers_winograd(description) == expected


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ("x86_64 AMD EPYC avx avx2 fma", True),
        ("x86_64 AMD EPYC avx avx2 avx512bw avx512f fma", False),
        ("x86_64 Old avx sse4_2", False),
        ("aarch64 asimd sve", False),
    ],
)
def test_vectors_are_short_without_avx512(description: str, expected: bool) -> None:
    assert has_short_vectors(description) == expected


def test_the_rule_is_pytorchs_capability() -> None:
    """PyTorch reads the environment once a process, at the first call that depends on it."""
    program = """
import os, torch
from tandem.processor import describe_processor, prefers_winograd
for steering in ({}, {"ATEN_CPU_CAPABILITY": "avx2"}, {"ATEN_CPU_CAPABILITY": "default"}):
    if os.fork() == 0:
        os.environ.update(steering)
        capability = torch.backends.cpu.get_cpu_capability()
        print(steering, capability, prefers_winograd(describe_processor()), flush=True)
        os._exit(0)
    os.wait()
"""
    env = {key: value for key, value in os.environ.items() if key not in processor.STEERING}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True
    )
    found = [line.rsplit(maxsplit=2)[1:] for line in result.stdout.splitlines()]
    long = "AVX2", "AVX512"
    assert [rule for _, rule in found] == [str(name in long) for name, _ in found]
    assert found[2][0] not in long


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
