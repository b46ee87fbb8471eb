"""The choices of an exchange: their names, what they require, what their bits depend on."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from tandem.distributed import ALL_REDUCES, EXCHANGES, RULES, RunFacts
from tandem.errors import InputError
from tandem.registry import Registry, check

ALONE = RunFacts(None, ("cpu", "cpu"))
BY_ADAM = RunFacts(None, ("cpu", "cpu"), optimizer="adam", is_linear=False)
ELASTIC_ADAM = replace(BY_ADAM, starter="mpirun", is_synchronous=False)
BY_MPI = RunFacts("mpirun", ("cpu", "cpu"), ("a", "b"))
BY_TORCHRUN = RunFacts("torchrun", ("cuda:0", "cuda:0"), ("a", "a"))


def test_names_are_those_of_the_configuration() -> None:
    assert list(ALL_REDUCES) == ["auto", "ar", "asa", "asa16", "hierarchical", "nccl"]
    assert list(EXCHANGES) == ["auto", "average", "gradients", "shared"]
    assert list(RULES) == ["bsp", "easgd", "gosgd"]


@pytest.mark.parametrize(
    ("registry", "name", "settings", "facts", "message"),
    [
        (ALL_REDUCES, "asa", {}, ALONE, "collective: asa is for trainers that are ranks"),
        (ALL_REDUCES, "nccl", {}, BY_MPI, "collective: nccl is for trainers that torchrun"),
        (ALL_REDUCES, "nccl", {}, BY_TORCHRUN, "and devices are cuda:0, cuda:0: start as many"),
        (EXCHANGES, "gradients", {"bucket_mb": 2.5}, ALONE, "bucket_mb: 2.5 is for trainers that"),
        (EXCHANGES, "shared", {}, BY_MPI, "exchange: shared is one copy .* ranks have their own"),
        (EXCHANGES, "shared", {}, RunFacts(None, ("cuda:0",)), "on GPUs use average or gradients"),
        (RULES, "easgd", {}, BY_TORCHRUN, "rule: easgd is for trainers that are joined by MPI"),
        (EXCHANGES, "average", {}, BY_ADAM, "adam's results is not adam; use gradients"),
        (EXCHANGES, "average", {}, ELASTIC_ADAM, None),
        (EXCHANGES, "gradients", {}, BY_ADAM, None),
        (EXCHANGES, "shared", {}, BY_ADAM, None),
        (RULES, "easgd", {}, ELASTIC_ADAM, None),
        (ALL_REDUCES, "auto", {}, ALONE, None),
        (ALL_REDUCES, "asa16", {}, BY_MPI, None),
        (EXCHANGES, "gradients", {}, ALONE, None),
        (EXCHANGES, "shared", {}, ALONE, None),
        (RULES, "bsp", {}, ALONE, None),
        (RULES, "gosgd", {}, BY_MPI, None),
    ],
)
def test_what_a_choice_requires_is_named(
    registry: Registry[Any],
    name: str,
    settings: dict[str, Any],
    facts: RunFacts,
    message: str | None,
) -> None:
    with pytest.raises(InputError, match=message) if message else nullcontext():
        check(registry.setting, registry.make(name, settings), facts)


@pytest.mark.parametrize(
    ("name", "settings", "facts", "expected"),
    [
        ("auto", {}, ALONE, ""),
        ("asa", {}, BY_MPI, ""),
        ("ar", {}, BY_MPI, "ar"),
        ("ar", {}, BY_TORCHRUN, "ar by gloo"),
        ("nccl", {}, BY_TORCHRUN, "nccl"),
        ("asa16", {"wire": "bfloat16"}, BY_MPI, "asa16 bfloat16"),
        (
            "asa16",
            {"error_feedback": True},
            RunFacts("mpirun", ("cpu",), bucket_mb=2.5),
            "asa16 float16 with error feedback in buckets of 2.5 MB",
        ),
        ("hierarchical", {}, BY_TORCHRUN, ""),
        ("hierarchical", {}, BY_MPI, "hierarchical 0+1"),
    ],
)
def test_conditions_name_what_the_bits_depend_on(
    name: str, settings: dict[str, Any], facts: RunFacts, expected: str
) -> None:
    assert ALL_REDUCES.make(name, settings).condition(facts) == expected
