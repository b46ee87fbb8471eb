"""The configuration of a run: every setting with its type, unit, meaning and default.

`Config` is the one description of every setting. From it come the check of a file, the options of
the programs (``--key value ...``), their ``--help``, and ``config.yaml`` in the project's root,
which lists every key beside its default (a test holds the two together).
"""

import argparse
import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from tandem.config.fields import (
    Epochs,
    Float,
    Layers,
    PathText,
    Section,
    key,
    listed,
    role,
    with_choices,
)
from tandem.distributed.choices import ALL_REDUCES, EXCHANGES, RULES
from tandem.errors import InputError
from tandem.files import write_text
from tandem.registry import Registry
from tandem.validation import parse_yaml

DEFAULT_FILE = Path("config.yaml")
ALEXNET = "alex_net:AlexNet"
_USE_DEVICES = "use devices, a list with one entry for each trainer, such as devices: [cpu, cpu]"

RETIRED: Mapping[str, str] = {
    "lib_conv": "the convolution library follows from devices (oneDNN on cpu, cuDNN on cuda:N)",
    "gpu": _USE_DEVICES,
    "gpu0": _USE_DEVICES,
    "gpu1": _USE_DEVICES,
    "sock_data": "trainers and loaders meet through inherited pipes and need no port",
    "sock_data0": "trainers and loaders meet through inherited pipes and need no port",
    "sock_data1": "trainers and loaders meet through inherited pipes and need no port",
    "sock_para": "trainers meet through shared memory and need no port",
    "sock_gpu": "trainers meet through shared memory and need no port",
    "dir_head": "use data_folder; the other data folders are relative to it",
    "finetune": "use init_weights, a checkpoint to start from, and freeze or lr_multipliers",
    "name": "network names the network, as module:class; use weights_dir to tell runs apart",
    "file_batch_size": "the manifest records the pictures per file, and batch_size may differ",
}
"""Keys of the original program that have no meaning any more, and what replaces each."""


_DEVICE = re.compile(r"cpu|cuda:(0|[1-9]\d{0,3})")
_DEVICE_GUESS = re.compile(r"(?:gpu|cuda):?(\d+)?", re.IGNORECASE)
_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def _devices_listed(value: Any) -> Any:
    return value if value == "auto" else listed(value)


def _usable_devices(devices: tuple[str, ...]) -> tuple[str, ...]:
    if not devices:
        raise ValueError("the list is empty: it needs a device for each trainer, or auto")
    for device in devices:
        if not _DEVICE.fullmatch(device):
            raise ValueError(f"{device!r} is not a device's name{_meant_device(device)}")
    if len({device.partition(":")[0] for device in devices}) > 1:
        raise ValueError("the trainers of a run must be all on cpu or all on cuda")
    return devices


def _meant_device(device: str) -> str:
    if guess := _DEVICE_GUESS.fullmatch(device):
        return f"; did you mean cuda:{int(guess[1] or 0)}?"
    return "; did you mean cpu?" if device.lower() == "cpu" or "cpu:" in device.lower() else ""


def _network_name(value: str) -> str:
    if not _CLASS.fullmatch(value):
        raise ValueError("it needs a module and a class with a colon between them")
    return value


def _shuffle_word(value: Any) -> Any:
    if isinstance(value, bool):
        word, text = ("files", "true") if value else ("none", "false")
        raise ValueError(
            f"the original's switch has become three words: for {text} write {word}, "
            "or write images for a true shuffle of single images"
        )
    return value


_Devices = Annotated[
    Literal["auto"] | Annotated[tuple[str, ...], AfterValidator(_usable_devices)],
    BeforeValidator(_devices_listed),
]
_LAYERS = "a list of layers such as [conv1, conv2], each once"
_PATH = "a path"


CHOICES: tuple[Registry[Any], ...] = (EXCHANGES, RULES, ALL_REDUCES)
"""Of what the configuration chooses; `tandem.registry.check` has to pass each."""


class Run(Section):
    heading = "The run"

    n_epochs: int = key(60, "epochs to train in all, those before a resume included", ge=1)
    resume_train: bool = key(False, "continue from a checkpoint in weights_dir")
    load_epoch: Annotated[int, Field(ge=0)] | Literal["latest"] = key(
        "latest",
        "which checkpoint to resume from: whole epochs done, or latest",
        "a whole number of epochs of at least 0, or latest",
    )
    exact: bool = key(True, "resume only if the same bits can follow; false: continue anyway")
    restarts: int = key(0, "times to restart from the newest checkpoint after a failure", ge=0)
    on_nan: Literal["stop", "skip", "rollback"] = key(
        "stop", "when the loss or a gradient is not finite: stop, skip or rollback"
    )
    seed: int = key(1, "random seed", "a whole number from 0 to 2**63 - 1", ge=0, lt=2**63)


class FineTuning(Section):
    heading = "Fine-tuning"

    init_weights: PathText | None = key(
        None, "checkpoint to take the initial weights from; null: random ones", "a path or null"
    )
    init_weights_skip: Layers = key(
        (), "layers that start at random anyway, such as [fc8]", _LAYERS
    )
    freeze: Layers = key((), "layers that keep the weights of init_weights, untrained", _LAYERS)
    lr_multipliers: dict[str, Annotated[Float, Field(gt=0)]] = key(
        {},
        "factors on the learning rate of single layers, such as {fc8: 10}",
        "layers and numbers above 0, such as {fc8: 10}",
    )

    @property
    def init_weights_path(self) -> Path | None:
        """The checkpoint to take the initial weights from."""
        return None if self.init_weights is None else Path(self.init_weights)


class LearningRate(Section):
    heading = "Learning rate"

    learning_rate: Float = key(
        0.01, "initial rate, for weights; biases learn at twice the rate", gt=0
    )
    lr_policy: Literal["step", "auto", "poly", "cosine", "constant"] = key(
        "step", "how the rate falls: step, auto, poly, cosine or constant"
    )
    lr_step: Epochs = key(
        (20, 40),
        "step: epochs done when the rate is divided by 10",
        "a list of increasing whole numbers of epochs, each at least 1",
    )
    lr_adapt_threshold: Float = key(
        0.01, "auto: least gain in top-1 error over two epochs, a fraction", ge=0
    )
    lr_power: Float = key(1.0, "poly: exponent of the fraction of training that is left", gt=0)


class WarmUp(Section):
    heading = LearningRate.heading

    warmup_epochs: Float = key(
        0.0, "epochs over which the rate rises, from 0 or to its scaling", unit="epochs", ge=0
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = key(
        "none", "rate times the number of trainers, or its root: none, linear or sqrt"
    )


class UpdateRule(Section):
    heading = "Momentum and weight decay"

    use_momentum: bool = key(True, "momentum SGD; false: plain SGD")
    momentum: Float = key(0.9, "fraction of the velocity kept from step to step", ge=0, lt=1)
    use_nesterov_momentum: bool = key(False, "Nesterov momentum")
    weight_decay: Float = key(
        0.0005, "decay of weights per step and unit of rate; biases have none", ge=0
    )


class Data(Section):
    heading = "Data"

    data_folder: PathText = key(
        "data/imagenet", "where preprocessing wrote manifest.json", "a path"
    )
    train_folder: PathText = key("train_hkl", "training batches, below data_folder", _PATH)
    val_folder: PathText = key("val_hkl", "validation batches, below data_folder", _PATH)
    label_folder: PathText = key("labels", "label files, below data_folder", _PATH)
    mean_file: PathText = key("misc/img_mean.npy", "mean image, below data_folder", _PATH)

    @property
    def data_path(self) -> Path:
        """The folder of the manifest."""
        return Path(self.data_folder)

    @property
    def manifest_path(self) -> Path:
        """The manifest that preprocessing wrote."""
        return self.data_path / "manifest.json"

    @property
    def train_path(self) -> Path:
        """The folder of training batches."""
        return self.data_path / self.train_folder

    @property
    def val_path(self) -> Path:
        """The folder of validation batches."""
        return self.data_path / self.val_folder

    @property
    def label_path(self) -> Path:
        """The folder of label files."""
        return self.data_path / self.label_folder

    @property
    def mean_path(self) -> Path:
        """The mean image."""
        return self.data_path / self.mean_file


class Augmentation(Section):
    heading = "Order and augmentation of the training images"

    shuffle: Annotated[Literal["none", "files", "images"], BeforeValidator(_shuffle_word)] = key(
        "files", "what gets a new order each epoch: none, files or images"
    )
    rand_crop: bool = key(True, "random crops; false: the centre")
    rand_mirror: bool = key(True, "mirror each image with probability 0.5")
    batch_crop_mirror: bool = key(False, "one crop and mirror for a whole global batch")


class Network(Section):
    heading = "Network"

    network: Annotated[str, AfterValidator(_network_name)] = key(
        ALEXNET,
        "class of the network, as module:class",
        "a module and a class that Python can import, such as alex_net:AlexNet",
    )
    crop_size: int = key(227, "pixels on each side of the network's input", unit="pixels", ge=1)
    width: Float = key(1.0, "factor on all filter and unit counts", gt=0)
    norm_before_pool: bool = key(
        False, "normalise before max pooling, as Caffe's bvlc_alexnet does"
    )
    precision: Literal["float32", "tf32", "bfloat16", "float64"] = key(
        "float32", "of products: float32, tf32 (GPUs), bfloat16; float64: all", affects_bits=True
    )

    @property
    def dtype(self) -> Literal["float32", "float64"]:
        """Of weights, optimizer state and sums: tf32 and bfloat16 are only multiplied in."""
        return "float64" if self.precision == "float64" else "float32"


@with_choices(RULES, words_only=[EXCHANGES])
class Trainers(Section):
    heading = "Trainers and loaders"

    devices: _Devices = key(
        "auto",
        "one trainer on each: a list; auto: all GPUs, or the CPU",
        "auto, or a list such as [cpu, cpu] or [cuda:0, cuda:1]",
    )
    batch_size: int = key(128, "images per trainer and step, not global", unit="images", ge=1)
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = key(
        "auto",
        "CPU threads per trainer; auto: cores divided by trainers",
        "a whole number of at least 1, or auto",
        affects_bits=True,
    )
    compile: bool | Literal["auto"] = key(
        "auto", "torch.compile the graph, about a minute; auto: on GPUs only", affects_bits=True
    )
    exchange: str = key(
        "average",
        "average weights after a step or gradients before; shared: one copy",
        affects_bits=True,
    )
    rule: str = key("bsp", "over MPI: bsp, synchronous; easgd, a parameter server; gosgd, gossip")


@with_choices(ALL_REDUCES, EXCHANGES)
class Ranks(Section):
    heading = Trainers.heading

    collective: str = key("auto", "of ranks: {words}; auto: nccl if possible, else asa")


class Workers(Section):
    heading = Trainers.heading

    deterministic: bool = key(
        False, "on GPUs: the same bits every time, for exact resume; slower", affects_bits=True
    )
    check_every: int = key(
        0, "steps between checks that trainers' parameters agree; 0: none", unit="steps", ge=0
    )
    para_load: bool = key(True, "a loader process beside each trainer; false: trainers load")
    use_data_layer: bool | Literal["auto"] = key(
        "auto", "crop on the device, not in the loader; auto: true on GPUs"
    )
    peer_timeout_seconds: Float = key(
        60.0, "seconds without a heartbeat after which a process is dead", unit="seconds", ge=1
    )


class Output(Section):
    heading = "What a run writes"

    weights_dir: PathText = key(
        "runs/alexnet", "checkpoints, record.jsonl and config.yaml", "a path"
    )
    snapshot_freq: int = key(1, "epochs between checkpoints", unit="epochs", ge=1)
    snapshot_minutes: Float = key(
        10.0, "minutes between checkpoints within an epoch; 0: none", unit="minutes", ge=0
    )
    keep_snapshots: Annotated[int, Field(ge=1)] | Literal["all"] = key(
        3,
        "newest checkpoints to keep, beside the best; or all",
        "a whole number of at least 1, or all",
    )
    print_freq: int = key(20, "steps between reports", unit="steps", ge=1)
    print_train_error: bool = key(True, "report the training error beside the loss")
    tensorboard: bool = key(True, "write event files for TensorBoard")
    live_view: bool = key(True, "live view, on a terminal; false: lines, as into a file")

    @property
    def weights_path(self) -> Path:
        """The folder of everything that a run writes."""
        return Path(self.weights_dir)


# The bases stand in reverse: fields of the last one come first.
class Config(
    Output,
    Workers,
    Ranks,
    Trainers,
    Network,
    Augmentation,
    Data,
    UpdateRule,
    WarmUp,
    LearningRate,
    FineTuning,
    Run,
):
    """Every setting of a run, checked; see each field's description for unit and meaning.

    Paths are relative to the current folder, except `train_folder`, `val_folder`, `label_folder`
    and `mean_file`, which are relative to `data_folder`. Use the ``..._path`` properties.
    """


def sections() -> dict[str, list[str]]:
    """Return the keys under each heading, in the order of ``--help`` and ``config.yaml``."""
    grouped: dict[str, list[str]] = {}
    for name, field in Config.model_fields.items():
        grouped.setdefault(role(field).section, []).append(name)
    return grouped


def affecting_bits(config: Config) -> list[str]:
    """Return the keys whose values a resumed run needs unchanged to compute the same bits.

    These are the fields that are marked so, and the marked settings of what is chosen.
    """
    keys = [name for name, field in Config.model_fields.items() if role(field).affects_bits]
    chosen = [registry.chosen(dict(config)) for registry in CHOICES]
    declared = [field for choice in chosen for field in dataclasses.fields(choice)]
    return keys + [field.name for field in declared if field.metadata["affects_bits"]]


def load_config(argv: Sequence[str] | None = None, description: str | None = None) -> Config:
    """Read the configuration of a program that has no options of its own.

    Parameters
    ----------
    argv : sequence of str, optional
        The program's arguments; by default those of this process.
    description : str, optional
        What ``--help`` says above the options.

    Returns
    -------
    Config

    Raises
    ------
    InputError
        An argument, the file, a key or a value cannot be used.
    SystemExit
        With status 0, after ``--help``.
    """
    return parse_config(config_parser(description), argv)[0]


def config_parser(
    description: str | None = None, usage: str = "%(prog)s"
) -> argparse.ArgumentParser:
    """A parser with ``--config`` and an option for every key.

    A program may add options of its own before it gives the parser to `parse_config`. Faults that
    the parser finds are raised as `InputError`; it never ends the process but for ``--help``.
    """
    parser = _Parser(
        usage=f"{usage} [--config FILE] [--key VALUE ...]",
        description=description,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help=f"YAML file of settings (default: {DEFAULT_FILE}, where there is one)",
    )
    for section, keys in sections().items():
        group = parser.add_argument_group(section)
        for name in keys:
            _add_option(group, name)
    return parser


def weights_argument(
    argv: Sequence[str] | None = None, description: str | None = None
) -> tuple[str, list[str]]:
    """Take ``--weights FILE`` from the arguments of a program that reads one checkpoint.

    Returns
    -------
    weights : str
        The file.
    rest : list of str
        The other arguments, for `load_config`.

    Raises
    ------
    InputError
        There is no ``--weights``, or another argument cannot be used.
    SystemExit
        With status 0, after ``--help``, which lists ``--weights`` with every key.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    everything = config_parser(description, "%(prog)s --weights FILE")
    alone = _Parser(add_help=False, allow_abbrev=False)
    for parser in (everything, alone):
        parser.add_argument("--weights", metavar="FILE", help="checkpoint to read")
    _, options = parse_config(everything, arguments)
    if options.weights is None:
        raise InputError("--weights FILE is missing: which checkpoint is to be read?")
    return options.weights, alone.parse_known_args(arguments)[1]


def parse_config(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> tuple[Config, argparse.Namespace]:
    """Read arguments with a parser that `config_parser` made.

    Returns
    -------
    config : Config
    options : argparse.Namespace
        Holds the options that the program added.

    Raises
    ------
    InputError
        As `load_config`.
    """
    options, leftover = parser.parse_known_args(argv)
    if leftover:
        _refuse_argument(leftover, _option_names(parser))
    values: dict[str, Any] = {}
    labels: dict[str, str] = {}
    file = options.config or (DEFAULT_FILE if DEFAULT_FILE.is_file() else None)
    if file is not None:
        values = read_config_file(file)
        labels = {key: f"{file}: {key}" for key in values}
    for name in Config.model_fields:
        if (tokens := getattr(options, name)) is not None:
            values[name] = _value_of(name, tokens)
            labels[name] = f"--{name}"
    return make_config(values, labels), options


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings; its keys are checked here, its values by `make_config`.

    Raises
    ------
    InputError
        The file cannot be read, is not a YAML mapping, or has a key twice, an unknown key, or one
        that has no meaning any more.
    """
    try:
        values = parse_yaml(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read as a configuration ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds {_shown(values)}; expected lines of the form 'key: value'")
    for name in values:
        if name not in Config.model_fields:
            raise InputError(f"{path}: {_refusal(str(name))}")
    return values


def make_config(values: Mapping[str, Any], labels: Mapping[str, str] | None = None) -> Config:
    """Check values and complete them with the defaults.

    Parameters
    ----------
    values : mapping of str to Any
        Settings, as YAML reads them.
    labels : mapping of str to str, optional
        How a message calls a key: by default its name; better with the file it stands in.

    Raises
    ------
    InputError
        Names every setting that cannot be used, its value, and what is allowed.
    """
    try:
        return Config.model_validate(dict(values))
    except ValidationError as error:
        raise InputError("\n".join(_complaints(error, values, labels or {}))) from error


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML; read again, it gives an equal `Config`."""
    return yaml.safe_dump(
        config.model_dump(mode="json"),
        sort_keys=False,
        default_flow_style=None,
        allow_unicode=True,
        width=1000,
    )


def save_config(config: Config, folder: Path) -> Path:
    """Write the resolved configuration to ``folder/config.yaml``, whole or not at all.

    Raises
    ------
    InputError
        The folder is missing or cannot be written.
    """
    path = folder / "config.yaml"
    try:
        write_text(path, dump_config(config))
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    return path


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows ``--key VALUE`` where one value is allowed, though tokens are gathered as a list."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if isinstance(action, _GatherOnce) and action.single:
            return str(action.metavar)
        return super()._format_args(action, default_metavar)


class _GatherOnce(argparse.Action):
    """Keeps the tokens of an option, and refuses the option a second time.

    argparse would let the last one win, so that ``--devices cpu --devices cpu`` is one trainer.
    """

    single = False

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            several = "" if self.single else f"; give all values at once: {option_string} A B"
            raise InputError(f"{option_string} is given twice{several}")
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """Raises what the user can mend as `InputError`, so that programs report it in one way."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message.removeprefix("argument "))


def _add_option(group: Any, key: str) -> None:
    field = Config.model_fields[key]
    its = role(field)
    allowed = "" if its.allowed in str(field.description) else f"{its.allowed}; "
    text = f"{field.description} [{allowed}default: {_shown(field.default, quoted=False)}]"
    action = group.add_argument(
        f"--{key}",
        nargs="+",
        metavar="FILE" if its.form == "text" else "VALUE",
        action=_GatherOnce,
        help=text.replace("%", "%%"),
    )
    action.single = its.form not in ("list", "mapping")


def _value_of(key: str, tokens: list[str]) -> Any:
    """Turn the tokens after ``--key`` into what the same key would hold in a YAML file."""
    form = role(Config.model_fields[key]).form
    if form == "list":
        return _list_of(key, tokens)
    if form == "mapping":  # which a shell splits at the spaces, unless it is quoted
        return _yaml_of(key, " ".join(tokens))
    if len(tokens) > 1:
        raise InputError(f"--{key} takes one value; {len(tokens)} were given: {' '.join(tokens)}")
    if form == "text":
        return None if tokens[0] == "null" else tokens[0]
    return _yaml_of(key, tokens[0])


def _list_of(key: str, tokens: list[str]) -> Any:
    # A shell splits an unquoted [cpu, cpu] at the space, so the tokens are put together again.
    if tokens[0].startswith("[") or len(tokens) == 1:
        return _yaml_of(key, " ".join(tokens))
    return [_yaml_of(key, token) for token in tokens]


def _yaml_of(key: str, text: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise InputError(
            f"--{key} {text}: not a YAML value; expected {role(Config.model_fields[key]).allowed}"
        ) from error


def _option_names(parser: argparse.ArgumentParser) -> list[str]:
    return [action.dest for action in parser._actions if action.option_strings]


def _refuse_argument(leftover: Sequence[str], known: Sequence[str]) -> NoReturn:
    for argument in leftover:
        if argument.startswith("-") and argument.strip("-"):
            raise InputError(_refusal(argument.lstrip("-").partition("=")[0], "--", known))
    raise InputError(
        f"unexpected argument {leftover[0]!r}; settings are given as --key value, "
        "a file of settings as --config FILE"
    )


def _refusal(key: str, dashes: str = "", known: Sequence[str] = ()) -> str:
    name = key.replace("-", "_").lower()
    if name in RETIRED:
        return f"{dashes}{key} has no meaning any more: {RETIRED[name]}"
    kind = "option" if dashes else "key"
    nearest = difflib.get_close_matches(name, [*(known or Config.model_fields)], 1)
    hint = f"did you mean {dashes}{nearest[0]}?" if nearest else "--help lists every key"
    return f"unknown {kind} {dashes}{key}; {hint}"


def _complaints(
    error: ValidationError, values: Mapping[str, Any], labels: Mapping[str, str]
) -> Iterator[str]:
    """One sentence for each setting that pydantic refused, in the order of the fields."""
    reasons: dict[str, str | None] = {}
    for detail in error.errors():
        # The branches of a union each report; a reason in words says more than "not an int".
        key = str(detail["loc"][0]) if detail["loc"] else ""
        reason = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else None
        reasons[key] = reasons.get(key) or reason
    for key, reason in reasons.items():
        if not key:
            yield str(reason)
        elif key not in Config.model_fields:
            yield _refusal(key)
        else:
            yield _complaint(labels.get(key, key), key, values[key], reason)


def _complaint(label: str, key: str, value: Any, reason: str | None) -> str:
    field = Config.model_fields[key]
    allowed = role(field).allowed
    if reason:
        return f"{label} is {_shown(value)}: {reason} (allowed: {allowed})"
    words = difflib.get_close_matches(str(value).lower(), _words(field.annotation), 1)
    hint = f"; did you mean {words[0]}?" if words else ""
    if role(field).form == "text" and isinstance(value, int | float):
        hint = "; put it in quotes"
    return f"{label} is {_shown(value)}; it must be {allowed}{hint}"


def _words(annotation: Any) -> list[str]:
    """The words that a field of type ``Literal[...]``, or of a union with one, allows."""
    found: list[str] = []
    for part in get_args(annotation):
        found += [part] if isinstance(part, str) else _words(part)
    return found


def _shown(value: Any, quoted: bool = True) -> str:
    """A value as it stands in YAML, cut where it is long."""
    if isinstance(value, str) and not quoted:
        return value
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
