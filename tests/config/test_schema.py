"""Settings: their defaults, what is accepted, what is refused and in which words, what is saved."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from tandem.cli import sections
from tandem.config.command_line import load_config
from tandem.config.fields import flag
from tandem.config.schema import Config, dump_config, make_config, save_config
from tandem.errors import InputError
from tests.support.refusals import file_refusal, refusal

ROOT = Path(__file__).parents[2]


# What config.yaml and --help say


def test_config_yaml_lists_every_key_with_its_default() -> None:
    values = yaml.safe_load((ROOT / "config.yaml").read_text())
    assert list(values) == [key for keys in sections(Config.model_fields).values() for key in keys]
    assert make_config(values) == Config()
    # The resolved configuration leaves these out at their defaults.
    dumped = Config().model_dump(mode="json")
    assert {"network_options", "optimizer", "decay_kinds"} <= values.keys() - dumped.keys()
    assert {key: values[key] for key in dumped} == dumped
    assert load_config(["--config", str(ROOT / "config.yaml")]) == Config()


def test_config_yaml_says_unit_and_meaning_beside_each_key() -> None:
    lines = (ROOT / "config.yaml").read_text().splitlines()
    comments = {
        line.partition(":")[0]: line.partition("#")[2].strip()
        for line in lines
        if line and not line.startswith("#")
    }
    assert comments == {key: field.description for key, field in Config.model_fields.items()}
    assert all(len(comment) > 10 for comment in comments.values())
    assert [line[2:] for line in lines if line[2:] in sections(Config.model_fields)] == list(
        sections(Config.model_fields)
    )


def test_the_demo_can_be_read() -> None:
    config = load_config(["--config", str(ROOT / "demo" / "config.yaml")])
    assert (config.devices, config.crop_size, config.rand_mirror) == (("cpu", "cpu"), 67, False)
    assert config.weights_dir == "runs/demo"


def test_reading_a_configuration_imports_nothing_heavy() -> None:
    heavy = ["torch", "pytensor", "matplotlib", "h5py", "numba", "scipy"]
    code = (
        "import sys, tandem.config.schema, tandem.optim.schedules, tandem.artifacts.metrics_log, "
        f"tandem.artifacts.checkpoint, tandem.plot; print([m for m in {heavy} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.strip() == "[]", result.stderr


def test_a_scalar_in_a_file_becomes_a_list_of_one() -> None:
    config = make_config({"lr_step": 30, "devices": "cuda:1"})
    assert (config.lr_step, config.devices) == ((30,), ("cuda:1",))


def test_data_paths_are_below_the_data_folder_unless_absolute(tmp_path: Path) -> None:
    config = make_config({"data_folder": "d", "label_folder": str(tmp_path / "labels")})
    assert config.manifest_path == Path("d/manifest.json")
    assert config.train_path == Path("d/train_hkl")
    assert config.val_path == Path("d/val_hkl")
    assert config.mean_path == Path("d/misc/img_mean.npy")
    assert config.label_path == tmp_path / "labels"
    assert config.weights_path == Path("runs/alexnet")
    assert config.init_weights_path is None
    assert make_config({"init_weights": "w"}).init_weights_path == Path("w")


def test_a_home_folder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert make_config({"data_folder": "~/pictures"}).data_folder == "/somewhere/pictures"
    with pytest.raises(InputError, match="home folder"):
        make_config({"data_folder": "~nobody-of-that-name/x"})


# What is refused


@pytest.mark.parametrize("form", ["file", "command line"])
@pytest.mark.parametrize(
    ("key", "text", "shown", "allowed"),
    [
        ("batch_size", "'3'", '"3"', "a whole number of images from 1"),
        ("batch_size", "3.5", "3.5", "a whole number"),
        ("batch_size", "true", "true", "a whole number"),
        ("batch_size", "0", "0", "from 1 to "),
        ("batch_size", "[3]", "[3]", "a whole number"),
        ("batch_size", "null", "null", "a whole number"),
        ("callbacks", "[Log]", '["Log"]: it needs a module and a class', "[my_callbacks:Log]"),
        ("callbacks", "[{my: Log}]", '[{"my": "Log"}]', "a list of modules and classes such as"),
        ("batch_size", "2024-01-01", '"2024-01-01"', "a whole number"),
        ("check_every", "-1", "-1", "from 0 to "),
        ("seed", "-1", "-1", "2**63"),
        ("seed", str(2**63), str(2**63), "2**63"),
        ("learning_rate", "0", "0", "a number above 0"),
        ("learning_rate", "true", "true", "a number above 0"),
        ("learning_rate", ".nan", "NaN", "a number above 0"),
        ("learning_rate", ".inf", "Infinity", "a number above 0"),
        ("learning_rate", "1e999", '"1e999"', "a number above 0"),
        ("learning_rate", "fast", '"fast"', "a number above 0"),
        ("lr_power", "0", "0", "a number above 0"),
        ("momentum", "1", "1", "below 1"),
        ("weight_decay", "-0.5", "-0.5", "at least 0"),
        ("resume_train", "1", "1", "true or false"),
        ("resume_train", "'yes'", '"yes"', "true or false"),
        ("use_data_layer", "0", "0", "true, false or auto"),
        ("data_on_gpu", "always", '"always"', "true, false or auto"),
        ("compile", "always", '"always"', "true, false or auto"),
        ("load_epoch", "-1", "-1", "from 0 to "),
        ("load_epoch", "1.5", "1.5", "from 0 to "),
        ("threads", "0", "0", "from 1 to "),
        ("loader_threads", "0", "0", "from 1 to "),
        ("precision", "float16", '"float16"', "float32, tf32, bfloat16 or float64"),
        ("exchange", "gossip", '"gossip"', "average, gradients or shared"),
        ("lr_policy", "stairs", '"stairs"', "constant, onecycle or table"),
        ("lr_step", "[40, 20]", "[40, 20]", "must increase"),
        ("lr_step", "[0, 20]", "[0, 20]", "each at least 1"),
        ("lr_step", "[20.5]", "[20.5]", "whole numbers"),
        ("lr_step", "soon", '"soon"', "whole numbers"),
        ("lr_step", "{a: 1}", '{"a": 1}', "whole numbers"),
        ("lr_step", "null", "null", "whole numbers"),
        ("devices", "[]", "[]", "a device for each trainer"),
        ("devices", "[cpu, 'cuda:0']", '["cpu", "cuda:0"]', "all on cpu or all on cuda"),
        ("devices", "[tpu]", '["tpu"]', "'tpu' is not a device's name"),
        ("devices", "[cpu, 3]", '["cpu", 3]', "auto, or a list such as [cpu, cpu]"),
        ("devices", "'cpu,cpu'", '"cpu,cpu"', "'cpu,cpu' is not a device's name"),
        ("devices", "[cuda]", '["cuda"]', "did you mean cuda:0?"),
        ("devices", "[gpu1]", '["gpu1"]', "did you mean cuda:1?"),
        ("devices", "[cuda0]", '["cuda0"]', "did you mean cuda:0?"),
        ("devices", "[CPU]", '["CPU"]', "did you mean cpu?"),
        ("devices", "['cuda:01']", '["cuda:01"]', "did you mean cuda:1?"),
        ("devices", "['cpu:0']", '["cpu:0"]', "did you mean cpu?"),
        ("shuffle", "true", "true", "for true write files"),
        ("shuffle", "false", "false", "for false write none"),
        ("norm_rows", "all", '"all"', "divides batch_size, auto or global"),
        ("fully_connected", "split", '"split"', "replicated, sharded or single"),
        ("norm_rows", "0", "0", "a whole number of images from 1 that divides batch_size"),
        ("shuffle", "all", '"all"', "none, files or images"),
        ("freeze", "[conv1, conv1]", '["conv1", "conv1"]', "conv1 is listed twice"),
        ("freeze", "{conv1: 2}", '{"conv1": 2}', "a list of layers"),
        ("trace", "true", "true", "off, steps or ops"),
        ("trace", "op", '"op"', "did you mean ops?"),
        ("trace_steps", "[40, 20]", "[40, 20]", "two whole numbers such as [20, 40]"),
        ("trace_steps", "[20, 20]", "[20, 20]", "it needs a first step of at least 0"),
        ("trace_steps", "[-1, 20]", "[-1, 20]", "it needs a first step of at least 0"),
        ("trace_steps", "20", "20", "two whole numbers"),
        ("trace_steps", "[0, 1, 2]", "[0, 1, 2]", "two whole numbers"),
        ("trace_steps", "[0, 1.5]", "[0, 1.5]", "two whole numbers"),
        ("lr_multipliers", "[fc8]", '["fc8"]', "such as {fc8: 10}"),
        ("lr_multipliers", "{fc8: 0}", '{"fc8": 0}', "numbers above 0"),
        ("lr_multipliers", "{fc8:10}", '{"fc8:10": null}', "such as {fc8: 10}"),
    ],
)
def test_a_value_is_refused_with_key_value_and_what_is_allowed(
    form: str, key: str, text: str, shown: str, allowed: str
) -> None:
    if form == "file":
        message = file_refusal(f"{key}: {text}\n")
        assert message.startswith(f"mine.yaml: {key} is {shown}")
    else:
        message = refusal([f"--{key}", text])
        assert message.startswith(f"--{key} is {shown}")
    assert allowed in message
    assert "\n" not in message


def test_off_is_a_word_also_where_yaml_reads_false() -> None:
    for word in ("off", "false", "'off'"):
        assert make_config(yaml.safe_load(f"trace: {word}")) == Config()
    assert "trace" not in dump_config(Config())
    traced = make_config({"trace": "steps", "trace_steps": [0, 5]})
    assert yaml.safe_load(dump_config(traced))["trace_steps"] == [0, 5]


WHOLE = [
    key
    for key, field in Config.model_fields.items()
    if "int" in str(field.annotation) and not isinstance(field.default, str | tuple | dict)
]


@pytest.mark.parametrize("key", [*WHOLE, "threads", "loader_threads", "norm_rows", "load_epoch"])
def test_whole_numbers_have_an_upper_bound(key: str) -> None:
    assert f"mine.yaml: {key} is {2**70}; it must be a whole" in file_refusal(f"{key}: {2**70}")


@pytest.mark.parametrize("key", ["weights_dir", "data_folder", "csv_file"])
def test_a_path_has_no_null_character(key: str) -> None:
    assert f"mine.yaml: {key} is " in file_refusal(f'{key}: "a\\0b"')


def test_lists_of_whole_numbers_have_an_upper_bound() -> None:
    for key, value in (("lr_step", [2**70]), ("lr_table", {2**70: 1}), ("trace_steps", [0, 2**70])):
        assert f"mine.yaml: {key}" in file_refusal(f"{key}: {value}")


def test_each_number_has_its_bound() -> None:
    for keys, value, allowed in (
        ("n_epochs snapshot_freq print_freq crop_size", 0, "from 1 to "),
        ("momentum lr_adapt_threshold warmup_epochs", -1, "at least 0"),
        ("width", 0, "a number above 0"),
    ):
        for key in keys.split():
            assert allowed in file_refusal(f"{key}: {value}")


def test_paths_must_be_text() -> None:
    message = file_refusal("weights_dir: 2024\n")
    assert message == "mine.yaml: weights_dir is 2024; it must be a path; put it in quotes"
    assert "weights_dir is null; it must be a path" in file_refusal("weights_dir: null\n")
    assert 'data_folder is ""; it must be a path' in refusal(["--data_folder", ""])


def test_a_long_value_is_cut() -> None:
    assert len(refusal(["--batch_size", "x" * 10_000])) < 250


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(ValidationError):
        Config().seed = 2  # type: ignore[misc]


# What is saved


NESTED = {"layers": [{"name": "no", "axes": [[1, 2], []], "rate": 1e-5}, {"a": None, "b": True}]}


def test_the_resolved_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = make_config(
        {
            "devices": ["cpu", "cpu"],
            "lr_step": [],
            "learning_rate": 1e-7,
            "weights_dir": "läufe/1: #x",
            "load_epoch": 3,
            "compile": True,
            "data_folder": "5e-4",
            "warmup_epochs": 2,
            "network_options": {"depth": 28, "graph": NESTED},
        }
    )
    path = save_config(config, tmp_path)
    assert path == tmp_path / "config.yaml"
    assert path.read_text(encoding="utf-8") == dump_config(config)
    assert load_config(["--config", str(path)]) == config
    dumped = yaml.safe_load(dump_config(config))
    assert list(dumped) == [key for key in Config.model_fields if key in dumped]
    omitted = {key for key, field in Config.model_fields.items() if flag(field, "omit_default")}
    assert Config.model_fields.keys() - dumped.keys() == omitted - {"network_options"}
    assert "devices: [cpu, cpu]" in dump_config(config)
    assert Config(**yaml.safe_load(dump_config(config))) == config


def test_a_configuration_that_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        save_config(Config(), tmp_path / "missing")


def test_network_options_include_their_older_alias() -> None:
    assert make_config({"norm_before_pool": True}).options == {"norm_before_pool": True}
    config = make_config({"network_options": {"depth": 28}})
    assert config.options == {"depth": 28}
    assert config.model_dump(mode="json")["network_options"] == {"depth": 28}
    assert "network_options" not in Config().model_dump(mode="json")


def test_network_options_may_be_nested() -> None:
    shape = (3, 3)
    config = make_config({"network_options": {"graph": {"a": shape, "b": shape}}})
    assert config.network_options == {"graph": {"a": [3, 3], "b": [3, 3]}}
    text = yaml.safe_dump(NESTED, default_flow_style=True, width=1000).strip()
    for words in ([f"{{graph: {text}}}"], f"{{graph: {text}}}".split()):
        assert load_config(["--network_options", *words]).options == {"graph": NESTED}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("{1: 2}", "it must be names and values"),
        ("{graph: {1: 2}}", "found the key 1, expected text in quotes"),
        ("{graph: [.nan]}", "nan is not a finite number"),
        ("{graph: 2020-01-01}", "found a date, expected text, a number, true, false, null, a list"),
        (f"{{graph: {'[' * 70}{']' * 70}}}", "nested more than 64 deep"),
    ],
)
def test_what_network_options_may_not_hold(options: str, reason: str) -> None:
    with pytest.raises(InputError, match=f"network_options .*({reason})"):
        load_config(["--network_options", options])


def test_callbacks_may_be_classes_of_the_users_own_program() -> None:
    """Which runs them, as it does not run a network."""
    assert make_config({"callbacks": "__main__:Log"}).callbacks == ("__main__:Log",)
    with pytest.raises(InputError, match="the processes of a run do not run your program"):
        make_config({"network": "__main__:Net"})


@pytest.mark.parametrize(
    ("given", "batch", "rows"), [("auto", 128, 32), ("auto", 32, 32), ("auto", 20, 20), (8, 128, 8)]
)
def test_a_group_has_32_rows_or_the_whole_minibatch(given: object, batch: int, rows: int) -> None:
    config = make_config({"norm_rows": given, "batch_size": batch})
    assert config.group_rows == rows
    assert ("norm_rows" in config.model_dump(mode="json")) == (given != "auto")
