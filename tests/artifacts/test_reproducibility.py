"""A resumed run that could not compute the same bits is refused, with the reason."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

import tandem
from tandem.artifacts import reproducibility
from tandem.artifacts.reproducibility import SAME_BITS, check_exact, conditions
from tandem.config.hardware import RankInfo
from tandem.config.resolve import resolve
from tandem.config.schema import Config
from tandem.errors import InputError
from tests.support.tiny import prepare

PATH = Path("runs/a/epoch-0001.safetensors")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = prepare(tmp_path_factory.mktemp("data"))
    resolved = {
        "devices": ("cpu", "cpu"),
        "threads": 1,
        "compile": False,
        "convolutions": "winograd",
        "exchange": "average",
        "precision": "float32",
        "use_data_layer": False,
    }
    return Config(data_folder=str(folder), **resolved)


def refusal(theirs: dict[str, str], ours: dict[str, str]) -> str:
    with pytest.raises(InputError) as caught:
        check_exact(PATH, theirs, ours)
    return str(caught.value)


def test_all_conditions_are_named(config: Config) -> None:
    found = conditions(config)
    assert found["trainers"] == "2"
    assert found["threads"] == "1"
    assert found["compile"] == "false"
    assert found["tandem"] == tandem.__version__
    assert found["numpy"] == numpy.__version__
    assert {"processor", "python", "torch", "pytensor", "exchange", "precision"} <= found.keys()


def test_sums_of_groups_of_rows_do_not_depend_on_the_number_of_trainers(config: Config) -> None:
    summed = config.model_copy(update={"sum_rows": 32})
    found, other = (conditions(summed.model_copy(update={"devices": ("cpu",) * n})) for n in (1, 3))
    assert found["sum_rows"] == "32"
    check_exact(PATH, found, other)
    message = refusal(found | {"sum_rows": "16", "threads": "2"}, other)
    assert "sum_rows 16 in the checkpoint, now 32; threads 2 in the checkpoint, now 1" in message


def test_a_run_of_an_earlier_version_continues_if_its_bits_are_the_same(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = conditions(config)
    assert ours["tandem"] == tandem.__version__ == SAME_BITS[-1]
    message = refusal(ours | {"tandem": "0.3.0"}, ours)
    assert f": tandem 0.3.0 in the checkpoint, now {tandem.__version__}. " in message
    monkeypatch.setattr(reproducibility, "SAME_BITS", ("0.3.0", *SAME_BITS))
    check_exact(PATH, ours | {"tandem": "0.3.0"}, ours)


def test_a_run_in_float32_continues_where_auto_stands_for_it(config: Config) -> None:
    before, now = (
        conditions(resolve(config.model_copy(update={"precision": precision})))
        for precision in ("float32", "auto")
    )
    check_exact(PATH, before, now)
    assert now["precision"] == "float32"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"devices": ("cpu",)}, "trainers 2 in the checkpoint, now 1"),
        ({"threads": 2}, "threads 1 in the checkpoint, now 2"),
        ({"compile": True}, "compile false in the checkpoint, now true"),
        ({"convolutions": "direct"}, "convolutions winograd in the checkpoint, now direct"),
        ({"exchange": "gradients"}, "exchange average in the checkpoint, now gradients"),
        ({"precision": "float64"}, "precision float32 in the checkpoint, now float64"),
        (
            {"rand_colour": 0.1},
            "rand_colour 0.0 in the checkpoint, now 0.1 by the covariance of checksum \\w{16}",
        ),
    ],
)
def test_a_setting_that_differs_is_named(
    config: Config, changes: dict[str, object], expected: str
) -> None:
    message = refusal(conditions(config), conditions(config.model_copy(update=changes)))
    assert message.startswith(f"{PATH}: ")
    assert re.search(f": {expected}. ", message)
    assert "--exact false" in message


def test_without_colour_noise_a_run_of_before_continues(config: Config) -> None:
    """Its checkpoints have no such condition, nor has a run of today that is without."""
    assert "rand_colour" not in conditions(config)
    coloured = conditions(config.model_copy(update={"rand_colour": 0.1}))
    other = conditions(config.model_copy(update={"rand_colour": 0.2}))
    assert "rand_colour 0.1 by the covariance of checksum " in refusal(coloured, other)
    check_exact(PATH, coloured, dict(coloured))


def test_compiled_buckets_decide_how_the_step_is_fused(config: Config) -> None:
    whole = config.model_copy(update={"compile": True})
    cut = whole.model_copy(update={"bucket_mb": 25.0})
    assert "compile true in buckets of 25 MB in the checkpoint, now true" in refusal(
        conditions(cut), conditions(whole)
    )
    # Without it the bits are the same.
    check_exact(PATH, conditions(config), conditions(config.model_copy(update={"bucket_mb": 1.0})))


@pytest.mark.parametrize("name", ["manifest.json", "misc/img_mean.npy"])
def test_other_data_are_noticed_wherever_they_lie(
    config: Config, tmp_path: Path, name: str
) -> None:
    folder = Path(shutil.copytree(config.data_folder, tmp_path / "moved"))
    moved = config.model_copy(update={"data_folder": str(folder)})
    check_exact(PATH, conditions(config), conditions(moved))
    with (folder / name).open("ab") as file:
        file.write(b" ")
    assert ": data " in refusal(conditions(config), conditions(moved))


def test_on_gpus_triton_decides_which_kernels_layers_have(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "triton" not in conditions(config)
    monkeypatch.setattr("tandem.artifacts.reproducibility.device_names", lambda devices: devices)
    gpus = config.model_copy(update={"devices": ("cuda:0", "cuda:0"), "exchange": "average"})
    found = []
    for version in ("3.7.1", "none"):
        monkeypatch.setattr("tandem.artifacts.reproducibility.triton_version", lambda v=version: v)
        found.append(conditions(gpus))
    assert ": triton 3.7.1 in the checkpoint, now none. " in refusal(*found)
    rank = RankInfo(0, (0,), ("A GPU",), ("id",), "a processor", (), "mpirun", triton="3.7.1")
    for other, expected in (("3.7.1", "3.7.1"), ("3.7.2", "3.7.1, 3.7.2")):
        assert conditions(gpus, [rank, replace(rank, triton=other)])["triton"] == expected


def test_every_difference_is_named_at_once(config: Config) -> None:
    ours = conditions(config)
    message = refusal({**ours, "torch": "2.0", "threads": "7"}, ours)
    assert "torch 2.0 in the checkpoint" in message
    assert "threads 7 in the checkpoint" in message


def test_a_condition_that_one_side_does_not_know(config: Config) -> None:
    theirs = conditions(config)
    del theirs["threads"]
    assert "threads unknown in the checkpoint, now 1" in refusal(theirs, conditions(config))


def test_of_a_processor_only_what_differs_is_shown() -> None:
    common = "x86_64 Some CompiledNetwork " + " ".join(f"avx512{i}" for i in range(30))
    message = refusal({"processor": f"{common} amx_tile"}, {"processor": common})
    assert "processor amx_tile in the checkpoint, now less" in message


def test_a_checksum_is_explained(config: Config) -> None:
    ours = conditions(config)
    expected = (
        f"data (the checksum of manifest and mean image) 5 in the checkpoint, now {ours['data']}"
    )
    assert expected in refusal(ours | {"data": "5"}, ours)
