"""Settings of a run from files and command lines: which wins, and what is refused."""

import logging
import sys
from pathlib import Path

import pytest

from tandem.config import command_line
from tandem.config.command_line import (
    ANSWERS,
    RETIRED,
    load_config,
    load_weights_and_config,
    read_run_settings,
)
from tandem.config.schema import Config, make_config, save_config
from tandem.errors import InputError
from tandem.layers.network import ALEXNET, KERAS_NETWORK
from tests.support.refusals import file_refusal, refusal


def test_help_lists_every_key_with_meaning_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(["--help"], "Two lines\nof launch commands")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "Two lines\nof launch commands" in shown
    words = " ".join(shown.split())
    for key, field in Config.model_fields.items():
        assert f"--{key} " in words
        assert str(field.description) in words
    assert words.count("default: ") == len(Config.model_fields) + 2  # and --config, --try
    assert "default: [20, 40]]" in words
    assert "--batch_size VALUE images" in words
    assert "--devices VALUE [VALUE ...] " in words


def test_the_defaults_hold_where_nothing_is_given() -> None:
    assert load_config([]) == Config()
    Path("mine.yaml").write_text("# nothing yet\n")
    assert load_config(["--config", "mine.yaml"]) == Config()


def test_config_yaml_of_the_current_folder_is_read() -> None:
    Path("config.yaml").write_text("seed: 7\n")
    assert load_config([]).seed == 7
    Path("other.yaml").write_text("n_epochs: 3\n")
    config = load_config(["--config", "other.yaml"])
    assert (config.seed, config.n_epochs) == (1, 3)


def test_the_command_line_wins_over_the_file_even_over_a_wrong_value() -> None:
    Path("mine.yaml").write_text("batch_size: many\nseed: 9\ndevices: [cpu]\n")
    config = load_config(["--batch_size", "4", "--config", "mine.yaml", "--devices", "cpu", "cpu"])
    assert (config.batch_size, config.seed, config.devices) == (4, 9, ("cpu", "cpu"))


@pytest.mark.parametrize(
    ("text", "value"),
    [("5e-4", 5e-4), ("5E-4", 5e-4), ("1e3", 1000.0), ("1", 1.0), (".5", 0.5), ("2.5e-3", 2.5e-3)],
)
def test_numbers_with_an_exponent_and_no_dot(text: str, value: float) -> None:
    # YAML 1.1 reads 5e-4 as text.
    Path("mine.yaml").write_text(f"learning_rate: {text}\n")
    for argv in (["--config", "mine.yaml"], ["--learning_rate", text]):
        rate = load_config(argv).learning_rate
        assert rate == value
        assert type(rate) is float


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--devices", "cpu", "cpu"], "devices", ("cpu", "cpu")),
        (["--devices", "[cpu,cpu]"], "devices", ("cpu", "cpu")),
        (["--devices", "[cpu, cpu]"], "devices", ("cpu", "cpu")),
        (["--devices", "[cpu,", "cpu]"], "devices", ("cpu", "cpu")),
        (["--devices", "cpu"], "devices", ("cpu",)),
        (["--devices", "cuda:0", "cuda:11"], "devices", ("cuda:0", "cuda:11")),
        (["--devices", "auto"], "devices", "auto"),
        (["--lr_step", "20", "40"], "lr_step", (20, 40)),
        (["--lr_step", "[5,6,7]"], "lr_step", (5, 6, 7)),
        (["--lr_step", "30"], "lr_step", (30,)),
        (["--lr_step", "[]"], "lr_step", ()),
        (["--resume_train", "true"], "resume_train", True),
        (["--resume_train"], "resume_train", True),
        (["--resume-train", "--batch-size=3"], "batch_size", 3),
        (["--compile"], "compile", True),
        (["--load_epoch", "12"], "load_epoch", 12),
        (["--load_epoch", "latest"], "load_epoch", "latest"),
        (["--threads", "auto"], "threads", "auto"),
        (["--threads", "3"], "threads", 3),
        (["--use_data_layer", "false"], "use_data_layer", False),
        (["--compile", "auto"], "compile", "auto"),
        (["--shuffle", "none"], "shuffle", "none"),
        (["--init_weights", "null"], "init_weights", None),
        (["--init_weights", "a b.safetensors"], "init_weights", "a b.safetensors"),
        (["--weights_dir", "2024-01-01"], "weights_dir", "2024-01-01"),
        (["--weights_dir", "[x]: y"], "weights_dir", "[x]: y"),
        (["--seed", str(2**63 - 1)], "seed", 2**63 - 1),
        (
            ["--lr_multipliers", "{fc8: 10, conv1: 5e-1}"],
            "lr_multipliers",
            {"fc8": 10, "conv1": 0.5},
        ),
        (["--lr_multipliers", "{fc8:", "10}"], "lr_multipliers", {"fc8": 10}),
    ],
)
def test_values_of_every_kind(argv: list[str], key: str, value: object) -> None:
    found = getattr(load_config(argv), key)
    assert found == value
    assert type(found) is type(value)


def test_several_wrong_values_are_all_named() -> None:
    message = refusal(["--batch_size", "0", "--lr_policy", "x", "--seed", "1.5"])
    assert [line.partition(" is ")[0] for line in message.splitlines()] == [
        "--seed",
        "--lr_policy",
        "--batch_size",
    ]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--lerning_rate", "1"], "unknown option --lerning_rate; did you mean --learning_rate?"),
        (["--batch-sice", "1"], "unknown option --batch-sice; did you mean --batch-size?"),
        (["--momentu", "1"], "unknown option --momentu; did you mean --momentum?"),
        (["--learning", "1"], "unknown option --learning"),  # no abbreviations
        (["--confg", "x"], "unknown option --confg; did you mean --config?"),
        (["--lerning_rate=1"], "did you mean --learning_rate?"),
        (["-seeds", "1"], "did you mean --seed?"),
        (["--lr_policy", "Cosin"], "did you mean cosine?"),
        (["--load_epoch", "last"], "did you mean latest?"),
        (["--shuffle", "image"], "did you mean images?"),
        (["--zzzzzz", "1"], "unknown option --zzzzzz; --help lists all of them"),
        (["mine.yaml"], "unexpected argument 'mine.yaml'"),
        (["--batch_size", "1", "2"], "--batch_size takes one value; 2 were given: 1 2"),
        (["--weights_dir", "a", "b"], "--weights_dir takes one value; 2 were given: a b"),
        (["--batch_size"], "--batch_size: a value is missing; it must be a whole number"),
        (["--config"], "--config: a value is missing; it must be a path"),
        (["--seed", "1", "--seed", "2"], "--seed is given twice"),
        (["--devices", "cpu", "--devices", "cpu"], "give all values at once"),
        (["--devices", "[cpu"], "--devices [cpu: not a YAML value; it must be auto, or a list"),
        (["--seed", "{"], "--seed {: not a YAML value; it must be a whole number"),
        (["--seed", "2024-99-99"], "--seed 2024-99-99: not a YAML value"),
    ],
)
def test_arguments_that_cannot_be_used(argv: list[str], expected: str) -> None:
    assert expected in refusal(argv)


def test_unknown_keys_in_a_file() -> None:
    message = file_refusal("seed: 1\nlerning_rate: 0.1\n")
    assert message == "mine.yaml: unknown key lerning_rate; did you mean learning_rate?"


@pytest.mark.parametrize("key", RETIRED)
def test_keys_of_the_original_that_are_gone(key: str) -> None:
    for message in (refusal([f"--{key}", "x"]), file_refusal(f"{key}: x\n")):
        assert f"{key}: {RETIRED[key]}" in message
    # What replaces a key is a key that there is.
    assert key not in Config.model_fields


def test_keys_of_the_original_that_are_still_there() -> None:
    original = """
        resume_train load_epoch n_epochs learning_rate lr_policy lr_step lr_adapt_threshold
        use_momentum momentum use_nesterov_momentum weight_decay para_load shuffle rand_crop
        batch_crop_mirror use_data_layer train_folder val_folder label_folder mean_file weights_dir
        snapshot_freq print_freq print_train_error batch_size
    """
    assert set(original.split()) <= Config.model_fields.keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nbatch_size: 2\nseed: 3\n", "'seed' stands twice"),
        ("just text", "expected lines of the form 'key: value'"),
        (b"seed: \xff\xfe\n", "not YAML: invalid start byte in line 1"),
        (
            "seed: 1\nlr_step: [1\nwidth: 1\n",
            "expected ',' or ']', but got ':' in line 3, column 6",
        ),
        ("seed: 1\nwidth: \x01\n", "not YAML: special characters are not allowed in line 2"),
        ("seed: 1\nwidth: 2001-99-99\n", "not YAML: month must be in 1..12 in line 2, column 8"),
    ],
)
def test_files_that_cannot_be_used(text: str | bytes, expected: str) -> None:
    message = file_refusal(text)
    assert message.startswith("mine.yaml: ")
    assert expected in message
    assert "\n" not in message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "nowhere.yaml: cannot be read" in refusal(["--config", "nowhere.yaml"])
    with pytest.raises(InputError, match="cannot be read"):
        load_config(["--config", str(tmp_path)])


def test_weights_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="--weights is missing; it must be a path"):
        load_weights_and_config(["--seed", "1"])
    with pytest.raises(InputError, match="did you mean --weights"):
        load_weights_and_config(["--weight", "w"])
    with pytest.raises(SystemExit):
        load_weights_and_config(["--help"])
    shown = capsys.readouterr().out
    assert "--weights FILE" in shown
    assert "--batch_size VALUE" in shown


def saved_run(folder: Path, **changes: object) -> Path:
    """A checkpoint, named only, beside the settings of its run."""
    folder.mkdir(exist_ok=True)
    save_config(make_config({"data_folder": "elsewhere", "crop_size": 67, **changes}), folder)
    return folder / "epoch-0001.safetensors"


def test_the_settings_beside_a_checkpoint_come_before_those_of_the_current_folder(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weights = saved_run(Path("run"))
    Path("config.yaml").write_text("seed: 7\ncrop_size: 99\n")
    with caplog.at_level(logging.INFO):
        path, *_, config = load_weights_and_config(["--weights", str(weights), "--seed", "5"])
    assert path == weights
    assert (config.data_folder, config.crop_size, config.seed) == ("elsewhere", 67, 5)
    (line,) = caplog.messages
    assert line.startswith("settings are those of run/config.yaml; devices and threads are chosen")
    for arguments in (["--weights", "w"], ["--weights", str(weights), "--config", "config.yaml"]):
        assert load_weights_and_config(arguments)[-1].crop_size == 99


def test_a_validation_needs_no_device_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    there: dict[str, object] = {
        "devices": ["cuda:0", "cuda:1"],
        "batch_size": 3,
        "threads": 99,
        "precision": "bfloat16",
        "compile": True,
        "rule": "easgd",
        "collective": "asa16",
        "error_feedback": True,
        "data_on_gpu": "auto",
        "use_data_layer": True,
        "loader_threads": 8,
        "restarts": 4,
        "min_trainers": 2,
        "para_load": False,
    }
    arguments = ["--weights", str(saved_run(Path("run"), **there))]
    monkeypatch.setattr(command_line, "cuda_device_count", lambda: 0)
    found = load_weights_and_config(arguments)[-1]
    kept = {"data_folder": "elsewhere", "crop_size": 67, "batch_size": 3, "para_load": False}
    assert found == make_config(kept)
    monkeypatch.setattr(command_line, "cuda_device_count", lambda: 1)
    assert load_weights_and_config(arguments)[-1].precision == "bfloat16"
    assert load_weights_and_config([*arguments, "--devices", "cuda:3"])[-1].devices == ("cuda:3",)


def test_beside_weights_in_the_current_folder_are_its_own_settings() -> None:
    """Written by the user, such as beside converted weights: none is left out."""
    Path("config.yaml").write_text("devices: [cuda:1]\nthreads: 3\n")
    for weights in ("alexnet.safetensors", str(Path("alexnet.safetensors").absolute())):
        found = load_weights_and_config(["--weights", weights])[-1]
        assert (found.devices, found.threads) == (("cuda:1",), 3)


@pytest.mark.parametrize("weights", [".", "/", "w" * 300 + "/w", "~nobody-of-that-name/w"])
def test_weights_that_can_have_nothing_beside_them(weights: str) -> None:
    Path("config.yaml").write_text("seed: 7\n")
    if weights.startswith("~"):
        with pytest.raises(InputError, match=r"--weights is .*whose home folder is"):
            load_weights_and_config(["--weights", weights])
    else:
        assert load_weights_and_config(["--weights", weights])[-1].seed == 7


def test_a_file_that_is_found_does_not_decide_what_code_is_run() -> None:
    """As `check_network` does not import the network that a checkpoint names."""
    arguments = ["--weights", str(saved_run(Path("run"), network="mine:Network"))]
    assert load_weights_and_config(arguments)[-1].network == Config().network
    Path("config.yaml").write_text("network: mine:Network\n")
    assert load_weights_and_config(arguments)[-1].network == "mine:Network"


def test_a_graph_that_is_found_is_data_but_its_own_layers_are_code() -> None:
    graph = {"layers": [{"name": "dense", "units": 3}]}
    own = {"layers": ["mine:swish", "mine:gate"]}
    for network in (KERAS_NETWORK, "mine:Network"):
        for options in ({"model": graph}, {"model": graph, **own}):
            saved = saved_run(Path("run"), network=network, network_options=options)
            found = load_weights_and_config(["--weights", str(saved)])[-1]
            assert found.network == (KERAS_NETWORK if network == KERAS_NETWORK else ALEXNET)
            assert found.network_options == {"model": graph}
            named = ["--weights", str(saved), "--config", "run/config.yaml"]
            assert load_weights_and_config(named)[-1].network_options == options
    save_config(make_config({"network_options": {"model": graph, **own}}), Path())
    assert load_weights_and_config(["--weights", str(saved)])[-1].network_options["layers"]


def test_metrics_of_a_file_that_is_found_are_known_ones() -> None:
    saved_run(Path("run"))
    with Path("run/config.yaml").open("a") as file:
        file.write("metrics: [accuracy, 'mine:metric']\n")
    assert read_run_settings(Path("run/config.yaml"))["metrics"] == ["accuracy"]
    Path("config.yaml").write_text("metrics: [accuracy, 'mine:metric']\n")
    assert read_run_settings(Path("run/config.yaml"))["metrics"] == ["accuracy", "mine:metric"]


def test_a_validation_of_summed_rows_is_by_their_passes() -> None:
    for sum_rows, batch_size in ((2, 2), ("auto", 64)):
        saved_run(Path("run"), sum_rows=sum_rows, batch_size=64)
        assert read_run_settings(Path("run/config.yaml"))["batch_size"] == batch_size


def test_arguments_of_the_process_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["train.py", "--seed", "5", "--weights", "w", "--devices", "cpu", "cpu"]
    monkeypatch.setattr(sys, "argv", argv)
    expected = make_config({"seed": 5, "devices": ["cpu", "cpu"]})
    assert load_weights_and_config() == (Path("w"), False, None, expected)
    monkeypatch.setattr(sys, "argv", ["train.py", "--seed", "5"])
    assert load_config().seed == 5


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lr", "did you mean --learning_rate?"),
        ("epochs", "did you mean --n_epochs?"),
        ("wd", "did you mean --weight_decay?"),
        ("data", "did you mean --data_folder?"),
        ("gpus", "did you mean --devices?"),
        ("gpu", "use devices, a list"),
        ("workers", "a loader process of its own"),
        ("amp", "use precision"),
        ("resume", "use resume_train: true"),
        ("pretrained", "init_weights"),
        ("evaluate", "validate.py --weights FILE"),
        ("arch", "did you mean --network?"),
        ("solver", "use_momentum"),
        ("max_iter", "n_epochs"),
        ("local-rank", "mpirun or torchrun"),
    ],
)
def test_names_of_other_programs_are_answered(name: str, said: str) -> None:
    assert said in refusal([f"--{name}", "1"])
    in_a_file = file_refusal(f"{name}: 1\n")
    assert in_a_file.startswith("mine.yaml: ")
    assert said.removeprefix("did you mean --") in in_a_file


def test_no_answer_stands_for_a_key_that_there_is_nor_names_one_that_there_is_not() -> None:
    assert not ANSWERS.keys() & Config.model_fields.keys()
    assert {a for a in ANSWERS.values() if " " not in a} <= Config.model_fields.keys()
