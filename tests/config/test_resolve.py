"""Settings in relation to each other and to how the trainers are started."""

from typing import Any

import pytest

from tandem.config.hardware import RankInfo
from tandem.config.resolve import check_settings, resolve
from tandem.config.schema import affecting_bits, make_config
from tandem.errors import InputError


def resolved(values: dict[str, Any], ranks: int = 0) -> Any:
    """As resolved for a launcher's own trainers, or for ranks started by mpirun."""
    rank = RankInfo(0, (0, 1), (), (), "a processor", (), "mpirun")
    return resolve(make_config({"devices": ["cpu"], **values}), [rank] * ranks)


def test_fine_tuning_that_contradicts_itself() -> None:
    begin = {"init_weights": "w.safetensors"}
    for values, expected in (
        ({"freeze": ["conv1"]}, "freeze is set, but init_weights names no checkpoint"),
        ({"init_weights_skip": ["fc8"]}, "init_weights_skip is set, but init_weights"),
        ({**begin, "freeze": ["fc8"], "lr_multipliers": {"fc8": 2.0}}, "both name fc8"),
        ({**begin, "freeze": ["fc8"], "init_weights_skip": ["fc8"]}, "both name fc8"),
    ):
        with pytest.raises(InputError, match=expected):
            check_settings(make_config(values))
    check_settings(make_config({"freeze": ["conv1"], "resume_train": True}))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"use_nesterov_momentum": True, "use_momentum": False}, "use_momentum"),
        ({"error_feedback": True, "collective": "asa"}, "rounds nothing"),
        ({"collective": "asa16", "precision": "float64"}, "choose another of both"),
        ({"rule": "easgd", "exchange": "gradients"}, "leave exchange at average"),
        ({"rule": "gosgd", "collective": "ar"}, "leave collective at auto"),
        ({"rule": "gosgd", "check_every": 5}, "leave check_every at 0"),
        ({"rule": "easgd", "on_nan": "rollback"}, "use stop or skip"),
        ({"bucket_mb": 25.0, "exchange": "average"}, "set exchange to gradients"),
        ({"rule": "gosgd", "exchange": "shared"}, "leave exchange at average"),
        (
            {"norm_before_pool": True, "network_options": {"norm_before_pool": False}},
            "norm_before_pool is true, and false in network_options",
        ),
    ],
)
def test_settings_that_contradict_each_other(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected) as caught:
        resolved(values, ranks=2)
    assert all(key in str(caught.value) for key in values)


def test_the_rounding_error_of_a_skipped_minibatch_must_not_be_fed_back() -> None:
    changes = {"bucket_mb": 25.0, "exchange": "gradients", "collective": "asa16"}
    changes |= {"error_feedback": True, "on_nan": "skip"}
    with pytest.raises(InputError, match="change one of the three"):
        check_settings(make_config(changes))
    check_settings(make_config({**changes, "bucket_mb": 0.0}))


def test_a_compiled_function_sends_no_single_gradient() -> None:
    config = make_config({"bucket_mb": 25.0, "exchange": "gradients", "compile": True})
    with pytest.raises(InputError, match=r"bucket_mb is 25 and compile is true: .* 0 or false"):
        check_settings(config)


@pytest.mark.parametrize(
    ("values", "ranks", "expected"),
    [
        ({"precision": "tf32"}, 0, "tf32 is a format of GPUs"),
        ({"collective": "ar"}, 0, "collective: ar is for trainers that are ranks"),
        ({"rule": "gosgd"}, 0, "rule: gosgd is for trainers that are joined by MPI"),
        ({"exchange": "shared"}, 2, "ranks have their own"),
    ],
)
def test_choices_that_the_trainers_do_not_permit(
    values: dict[str, Any], ranks: int, expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        resolved(values, ranks)


def test_what_auto_stands_for() -> None:
    assert resolved({}).collective == "auto"
    found = resolved({}, ranks=2)
    assert found.devices == ("cpu", "cpu")
    assert (found.threads, found.collective, found.compile) == (1, "asa", False)
    assert found.use_data_layer is False
    assert resolved({"rule": "gosgd"}, ranks=2).collective == "auto"
    assert resolved({"threads": 7}, ranks=2).threads == 7


def test_ranks_with_different_software_are_refused() -> None:
    here = RankInfo(0, (0,), (), (), "a processor", ("torch 2.13",), "mpirun")
    there = RankInfo(1, (0,), (), (), "a processor", ("torch 2.12",), "mpirun")
    with pytest.raises(InputError, match=r"rank 0 torch 2\.13; rank 2 torch 2\.12"):
        resolve(make_config({}), [here, here, there])


@pytest.mark.parametrize("collective", ["auto", "asa16"])
def test_bits_depend_on_the_marked_settings(collective: str) -> None:
    """An all-reduce states itself what its bits depend on."""
    assert set(affecting_bits(make_config({"collective": collective}))) == {
        "threads",
        "compile",
        "exchange",
        "precision",
        "deterministic",
    }
