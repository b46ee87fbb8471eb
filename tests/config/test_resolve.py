"""Settings in relation to each other and to how the trainers are started."""

import logging
from dataclasses import replace
from typing import Any

import pytest

from tandem.config.hardware import RankInfo
from tandem.config.resolve import check_settings, resolve, resolve_norm_rows
from tandem.config.schema import affecting_bits, make_config
from tandem.errors import InputError

RANK = RankInfo(0, (0, 1), (), (), "a processor", (), "mpirun")


def resolved(values: dict[str, Any], ranks: int = 0) -> Any:
    """As resolved for a launcher's own trainers, or for ranks started by mpirun."""
    return resolve(make_config({"devices": ["cpu"], **values}), [RANK] * ranks)


AVX2 = "x86_64 AMD EPYC avx2 fma"
AVX_512, OLD = "x86_64 Intel Xeon avx2 avx512f fma", "x86_64 Old avx sse4_2"
FREEZE = {"init_weights": "w.safetensors", "freeze": ["fc8"]}
INNER = {"init_weights": "w.safetensors", "freeze": ["layer1.0"]}
BUCKETS = {"bucket_mb": 25.0, "exchange": "gradients"}
FED_BACK = {"collective": "asa16", "error_feedback": True, "on_nan": "skip"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"freeze": ["conv1"]}, "freeze is set, but init_weights names no checkpoint"),
        ({"init_weights_skip": ["fc8"]}, "init_weights_skip is set, but init_weights"),
        ({**FREEZE, "lr_multipliers": {"fc8": 2.0}}, "both name fc8"),
        ({**FREEZE, "init_weights_skip": ["fc8"]}, "both name fc8"),
        # A name stands for all below it.
        ({**FREEZE, "init_weights_skip": ["fc8.inner"]}, "freeze names fc8 and .* fc8.inner"),
        ({**INNER, "init_weights_skip": ["layer1"]}, "freeze names layer1.0 and .* layer1, "),
        ({**FREEZE, "lr_multipliers": {"fc8.inner": 2.0}}, "freeze names fc8 and .* fc8.inner"),
        ({"lr_policy": "table"}, r"lr_table: found \{\}, expected"),
        # The rounding error of a skipped minibatch must not be fed back.
        ({**BUCKETS, **FED_BACK}, "change one of the three"),
    ],
)
def test_settings_that_contradict_each_other_wherever_trainers_run(
    values: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        check_settings(make_config(values))


def test_settings_that_go_together() -> None:
    check_settings(make_config({"freeze": ["conv1"], "resume_train": True}))
    check_settings(make_config({**BUCKETS, **FED_BACK, "bucket_mb": 0.0}))
    check_settings(make_config({**BUCKETS, "compile": True}))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"use_nesterov_momentum": True, "use_momentum": False}, "use_momentum"),
        ({"error_feedback": True, "collective": "asa"}, "rounds nothing"),
        ({"collective": "asa16", "precision": "float64"}, "choose another of both"),
        ({"rule": "easgd", "exchange": "gradients"}, "leave exchange at average"),
        (
            {"rule": "gosgd", "collective": "ar"},
            "rule: found gosgd, by which",
        ),
        ({"rule": "gosgd", "collective": "ar"}, "leave collective at auto"),
        ({"rule": "gosgd", "check_every": 5}, "leave check_every at 0"),
        ({"rule": "easgd", "on_nan": "rollback"}, "use stop or skip"),
        ({"bucket_mb": 25.0, "exchange": "average"}, "set exchange to gradients"),
        ({"rule": "gosgd", "exchange": "shared"}, "leave exchange at average"),
        ({"fully_connected": "sharded", "exchange": "average"}, "so set exchange to gradients"),
        ({"fully_connected": "single", "exchange": "shared"}, "is shared: trainers add up"),
        ({"norm_rows": "global", "exchange": "average"}, "norm_rows is global and exchange is"),
        ({"fully_connected": "sharded", "bucket_mb": 25.0}, "so set bucket_mb to 0"),
        ({"fully_connected": "single", "rule": "easgd"}, "so leave rule at bsp"),
        ({"norm_rows": "global", "rule": "gosgd"}, "so leave rule at bsp"),
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


@pytest.mark.parametrize(
    ("values", "ranks", "expected"),
    [
        ({"precision": "tf32"}, 0, "tf32 is a format of GPUs"),
        ({"data_on_gpu": True}, 0, "data_on_gpu: true is for GPUs; on cpu use auto or false"),
        ({"collective": "ar"}, 0, "collective: ar is for trainers that are ranks"),
        ({"rule": "gosgd"}, 0, "rule: gosgd is for trainers that are joined by MPI"),
        ({"exchange": "shared"}, 2, "ranks have their own"),
        ({"trace": "ops", "compile": True}, 0, "which fuses Ops: set compile to false"),
        ({"exchange": "average", "optimizer": "nadam"}, 0, "nadam's results is not nadam"),
        ({"exchange": "average", "optimizer": "adam"}, 2, "adam's results is not adam"),
    ],
)
def test_choices_that_the_trainers_do_not_permit(
    values: dict[str, Any], ranks: int, expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        resolved(values, ranks)


@pytest.mark.parametrize("ranks", [0, 2])
def test_what_is_exchanged_follows_from_the_optimizer(ranks: int) -> None:
    assert resolved({}, ranks).exchange == "average"
    assert resolved({"optimizer": "adamw"}, ranks).exchange == "gradients"
    assert resolved({"exchange": "gradients"}, ranks).exchange == "gradients"
    for values in ({"fully_connected": "sharded"}, {"norm_rows": "global"}):
        assert resolved(values, ranks).exchange == "gradients"
    if ranks:
        found = resolved({"optimizer": "adam", "bucket_mb": 2.0}, ranks)
        assert found.exchange == "gradients"
        elastic = resolved({"optimizer": "adam", "rule": "easgd"}, ranks)
        assert elastic.exchange == "average"
        assert resolve(elastic, [RANK] * ranks) == elastic
    else:
        assert resolved({"optimizer": "adam", "exchange": "shared"}).exchange == "shared"


def test_any_number_of_trainers_takes_a_global_batch() -> None:
    for whole, group, own in [(128, 32, 64), (100, 25, 50), (37, 37, 37), (34, 17, 17)]:
        found = resolved({"global_batch": whole, "devices": ["cpu"] * 3})
        assert (found.norm_rows, found.batch_size) == (group, own)
    assert resolved({"global_batch": 100, "norm_rows": 1}, ranks=3).batch_size == 34
    cases: list[tuple[dict[str, Any], str]] = [
        ({"norm_rows": 3}, "norm_rows: found 3, expected a divisor of global_batch 8"),
        ({"norm_rows": "global"}, "global_batch is 8 and norm_rows is global"),
        ({"fully_connected": "sharded"}, "global_batch is 8 and fully_connected is sharded"),
        ({"clip_norm": 1.0, "exchange": "average"}, "clip_norm is set and exchange is average"),
        ({"clip_value": 1.0, "norm_rows": "global"}, "clip_value is set and norm_rows is global"),
        ({"load_epoch": 3}, "load_epoch is 3 and resume_train is false"),
        ({"average_overwrites": 3}, "average_overwrites is set and average_weights is not"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "clip_norm and clip_value are set, expected one"),
    ]
    for values, expected in cases:
        with pytest.raises(InputError, match=expected):
            resolved({"global_batch": 8, **values})
    assert resolved({"clip_global_norm": 1.0}).exchange == "gradients"


def test_sums_that_do_not_depend_on_the_trainers_take_groups_of_rows() -> None:
    for devices in (1, 3):
        found = resolved({"sum_rows": 24, "global_batch": 96, "devices": ["cpu"] * devices})
        assert (found.exchange, found.norm_rows, found.batch_size) == ("gradients", 24, 128)
    assert resolved({"sum_rows": 32, "batch_size": 64}, ranks=3).global_batch == 192
    cases: list[tuple[dict[str, Any], str]] = [
        ({"global_batch": 12}, "sum_rows: found 8, expected a divisor of global_batch, 12"),
        ({"norm_rows": 3}, "norm_rows: found 3, expected a divisor of sum_rows, 8"),
        ({"norm_rows": "global"}, "sum_rows is 8 and norm_rows is global"),
        ({"fully_connected": "single"}, "sum_rows is 8 and fully_connected is single"),
        ({"rule": "easgd"}, "sum_rows is 8 and rule is easgd.* set rule to bsp"),
        ({"exchange": "shared"}, "sum_rows is 8 and exchange is shared.* to gradients"),
        ({"collective": "hierarchical"}, "sum_rows is 8 and collective is hierarchical.* asa"),
        ({"bucket_mb": 4}, "sum_rows is 8 and bucket_mb is 4"),
    ]
    for values, expected in cases:
        with pytest.raises(InputError, match=expected):
            resolved({"sum_rows": 8, **values}, ranks=2)


def test_what_fewer_trainers_could_not_continue_is_refused() -> None:
    two = {"min_trainers": 2, "devices": ["cpu"] * 2}
    assert resolved(two).exchange == "gradients"
    scaled = {"lr_scaling": "linear", "sum_rows": 8}
    assert resolved({**two, **scaled}).min_trainers == 2
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"lr_scaling": "linear"}, 0, "min_trainers is 2 and lr_scaling is linear"),
        ({"rule": "easgd"}, 0, "min_trainers is 2 and rule is easgd"),
        ({"fully_connected": "single"}, 0, "min_trainers is 2 and fully_connected is single"),
        ({"devices": ["cpu"]}, 0, "min_trainers: found 2, expected at most 1"),
        ({}, 2, "min_trainers: found 2, expected null under mpirun.* set exchange: gradients"),
    ]
    for values, ranks, expected in cases:
        with pytest.raises(InputError, match=expected):
            resolved({**two, **values}, ranks)


@pytest.mark.usefixtures("gpus")
def test_partial_sums_lie_in_the_hosts_memory() -> None:
    with pytest.raises(InputError, match="sum_rows is 8 and devices are cuda:0"):
        resolved({"sum_rows": 8, "devices": ["cuda:0"]})


def test_what_auto_stands_for() -> None:
    assert resolved({}).collective == "auto"
    found = resolved({}, ranks=2)
    assert found.devices == ("cpu", "cpu")
    assert (found.threads, found.collective, found.compile) == (1, "asa", False)
    assert found.use_data_layer is False
    assert resolved({"rule": "gosgd"}, ranks=2).collective == "auto"
    assert resolved({"threads": 7}, ranks=2).threads == 7
    assert (found.precision, found.loader_threads) == ("float32", 1)
    assert resolved({"precision": "bfloat16"}).precision == "bfloat16"
    assert found.data_on_gpu is False
    assert resolved({"loader_threads": 3}).loader_threads == 3


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 12 cores with GPUs, of which number 1 is too old for bfloat16."""
    monkeypatch.setattr("tandem.config.hardware.missing_for_gpus", lambda: None)
    monkeypatch.setattr("tandem.config.hardware.cuda_device_count", lambda: 3)
    monkeypatch.setattr("tandem.config.resolve.available_cores", lambda: tuple(range(12)))
    monkeypatch.setattr("tandem.config.resolve.has_bfloat16", lambda number: number != 1)


@pytest.mark.parametrize(
    ("devices", "threads", "precision"),
    [
        (["cuda:0"], 8, "bfloat16"),
        (["cuda:0", "cuda:2"], 6, "bfloat16"),
        (["cuda:0", "cuda:0"], 6, "bfloat16"),
        (["cuda:0", "cuda:1", "cuda:2"], 4, "float32"),
        (["cuda:0"] * 13, 1, "bfloat16"),
    ],
)
def test_what_auto_stands_for_on_gpus(
    gpus: None, devices: list[str], threads: int, precision: str
) -> None:
    """All trainers compute alike, also where one could do with fewer bits."""
    found = resolve(make_config({"devices": devices}))
    assert (found.loader_threads, found.precision) == (threads, precision)
    chosen = resolve(make_config({"devices": devices, "precision": "tf32", "loader_threads": 9}))
    assert (chosen.loader_threads, chosen.precision) == (9, "tf32")


@pytest.mark.parametrize(
    ("wish", "crops", "expected"),
    [
        ("auto", "auto", "auto"),
        ("auto", False, False),
        (True, "auto", True),
        (False, True, False),
        (True, False, "data_on_gpu is true and use_data_layer is false: a GPU keeps whole"),
    ],
)
def test_a_gpu_that_crops_can_keep_the_pictures(
    gpus: None, wish: Any, crops: Any, expected: Any
) -> None:
    values = {"devices": ["cuda:0"], "data_on_gpu": wish, "use_data_layer": crops}
    if isinstance(expected, str) and expected != "auto":
        with pytest.raises(InputError, match=expected):
            resolve(make_config(values))
    else:
        assert resolve(make_config(values)).data_on_gpu == expected


def test_ops_are_not_traced_where_steps_are_recorded(gpus: None) -> None:
    values = {"devices": ["cuda:0", "cuda:2"], "compile": False, "trace": "ops"}
    with pytest.raises(
        InputError, match=r"trace is ops and devices are cuda:0, cuda:2, which"
    ) as e:
        resolve(make_config(values))
    assert "\n" not in str(e.value)
    assert resolve(make_config({**values, "trace": "steps"})).trace == "steps"
    assert resolve(make_config({"devices": ["cpu"], "trace": "ops"})).compile is False


@pytest.mark.parametrize(("second", "precision"), [(True, "bfloat16"), (False, "float32")])
def test_what_auto_stands_for_on_gpus_of_ranks(gpus: None, second: bool, precision: str) -> None:
    ranks = [
        RankInfo(n, tuple(range(20)), ("A GPU",), (f"{n}",), AVX2, (), "mpirun", bfloat16=(able,))
        for n, able in enumerate((True, second))
    ]
    found = resolve(make_config({"devices": ["cuda:0"]}), ranks)
    assert (found.loader_threads, found.precision) == (8, precision)


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
        "convolutions",
        "exchange",
        "fully_connected",
        "sum_rows",
        "precision",
        "deterministic",
        "rand_colour",
    }


@pytest.mark.parametrize(
    ("processors", "expected"),
    [((AVX2, AVX_512), "winograd"), ((OLD, OLD), "direct"), ((AVX2, OLD), "direct")],
)
def test_all_trainers_compute_convolutions_alike(
    processors: tuple[str, ...], expected: str
) -> None:
    ranks = [
        RankInfo(number, (0,), (), (), name, (), "mpirun") for number, name in enumerate(processors)
    ]
    assert resolve(make_config({"devices": ["cpu"]}), ranks).convolutions == expected
    for word in ("winograd", "fft"):  # the word before 0.4
        given = resolve(make_config({"devices": ["cpu"], "convolutions": word}), ranks)
        assert given.convolutions == "winograd"


def test_on_gpus_convolutions_are_sums() -> None:
    here = RankInfo(0, (0,), ("A GPU",), ("id",), AVX2, (), "torchrun", bfloat16=(True,))
    assert resolve(make_config({"devices": ["cuda:0"]}), [here]).convolutions == "direct"
    with pytest.raises(InputError, match="convolutions: winograd is for CPUs"):
        resolve(make_config({"devices": ["cuda:0"], "convolutions": "winograd"}), [here])


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ([None], ""),
        (["a C compiler"], "this machine lacks a C compiler"),
        ([None, None], ""),
        ([None, "Triton"], "rank 1 lacks Triton"),
        (["Triton", None], "rank 0 lacks Triton"),
    ],
)
@pytest.mark.parametrize("changes", [{}, BUCKETS])
def test_on_gpus_functions_are_compiled_where_that_is_possible(
    gpus: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    missing: list[str | None],
    reason: str,
) -> None:
    """By all trainers or none; the reason is reported where it decides."""
    here = RankInfo(0, (0,), ("A GPU",), ("id",), AVX2, (), "torchrun", bfloat16=(True,))
    ranks = [replace(here, machine=n, missing_for_triton=what) for n, what in enumerate(missing)]
    ranks = ranks if len(ranks) > 1 else []
    first = missing[0] if not ranks else "more than ranks do"
    monkeypatch.setattr("tandem.config.resolve.missing_for_triton", lambda: first)
    changes = {"devices": ["cuda:0"], **(changes if ranks else {})}
    with caplog.at_level(logging.INFO, "tandem.config.resolve"):
        assert resolve(make_config(changes), ranks).compile is (not reason)
        said = [line for line in caplog.messages if line.startswith("compile: auto is false")]
        assert [line.rpartition(": ")[2] for line in said] == [reason] * bool(reason)
        caplog.clear()
        for wish in (True, False):
            assert resolve(make_config({**changes, "compile": wish}), ranks).compile is wish
        assert caplog.messages == []


@pytest.mark.parametrize(
    ("batch", "rows", "near", "batches"),
    [
        (48, "auto", "24 or 48", "32 or 64"),
        (128, 33, "32 or 64", "99 or 132"),
        (7, 3, "1 or 7", "6 or 9"),
        (4, 9, "4", "9"),
    ],
)
def test_groups_of_rows_that_trainers_would_share_are_refused(
    batch: int, rows: Any, near: str, batches: str
) -> None:
    config = make_config({"batch_size": batch, "norm_rows": rows})
    expected = f"expected a divisor of batch_size {batch}, such as {near} .or set batch_size to"
    with pytest.raises(InputError, match=f"{expected} {batches}.: a group of rows"):
        resolve_norm_rows(config)
    whole = make_config({"batch_size": 96, "norm_rows": "auto"})
    assert resolve_norm_rows(whole).norm_rows == 32
    everyone = make_config({"batch_size": 7, "norm_rows": "global"})
    assert resolve_norm_rows(everyone) == everyone
