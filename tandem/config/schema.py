"""The configuration of a run: what can be set, what each setting means, what contradicts.

`Config` is the one description of every setting. From it come the check of a file, the options of
the programs (``--key value ...``, see `tandem.config.command_line`), their ``--help``, and
``config.yaml`` in the project's root, which lists every key beside its default (a test holds the
two together).
"""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from tandem.cli import option
from tandem.errors import InputError
from tandem.files import write_text
from tandem.layers.network import ALEXNET
from tandem.validation import shown, validated

_SWITCH = "true or false"
_DEVICE = re.compile(r"cpu|cuda:(0|[1-9]\d{0,3})")
_DEVICE_GUESS = re.compile(r"(?:gpu|cuda):?(\d+)?", re.IGNORECASE)
_CLASS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def _number(value: Any) -> Any:
    """Read text such as ``5e-4`` as a number: YAML 1.1 takes it for text, as it has no dot."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _listed(value: Any) -> Any:
    """Make a list a tuple, and a bare number or text a tuple of one."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, int | float | str) else value


def _devices_listed(value: Any) -> Any:
    return value if value == "auto" else _listed(value)


def _home_expanded(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith("~"):
        return value
    try:
        return str(Path(value).expanduser())
    except RuntimeError as error:
        raise ValueError(f"whose home folder is {value!r}? ({error})") from error


def _increasing(epochs: tuple[int, ...]) -> tuple[int, ...]:
    if any(a >= b for a, b in itertools.pairwise(epochs)):
        raise ValueError("the epochs must increase from each to the next")
    return epochs


def _each_once(layers: tuple[str, ...]) -> tuple[str, ...]:
    twice = next((layer for layer in layers if layers.count(layer) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is listed twice")
    return layers


def _usable_devices(devices: tuple[str, ...]) -> tuple[str, ...]:
    if not devices:
        raise ValueError("the list is empty: it needs a device for each trainer, or say auto")
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
        word = "files" if value else "none"
        raise ValueError(
            f"the original's switch has become three words: for {shown(value)} write {word}, "
            "or write images for a true shuffle of single pictures"
        )
    return value


_Path = Annotated[str, Field(min_length=1), BeforeValidator(_home_expanded)]
_Float = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_number)]
_Epoch = Annotated[int, Field(ge=1)]
_Drops = Annotated[tuple[_Epoch, ...], AfterValidator(_increasing), BeforeValidator(_listed)]
_Layers = Annotated[tuple[str, ...], AfterValidator(_each_once), BeforeValidator(_listed)]
_Multiplier = Annotated[_Float, Field(gt=0)]
_Devices = Annotated[
    Literal["auto"] | Annotated[tuple[str, ...], AfterValidator(_usable_devices)],
    BeforeValidator(_devices_listed),
]


def _key(
    section: str, default: Any, meaning: str, allowed: str, form: str = "value", **bounds: Any
) -> Any:
    return option(default, meaning, allowed, form, section, **bounds)


def _path(section: str, default: str | None, meaning: str) -> Any:
    return _key(section, default, meaning, "a path" if default else "a path or null", "text")


_RUN = "The run"
_TUNING = "Fine-tuning"
_RATE = "Learning rate"
_RULE = "Momentum and weight decay"
_DATA = "Data"
_ORDER = "Order and augmentation of the training pictures"
_NETWORK = "Network"
_TRAINERS = "Trainers and loaders"
_OUTPUT = "What a run leaves"


class Config(BaseModel):
    """Every setting of a run, checked; see each field's description for unit and meaning.

    Paths are relative to the current folder, except `train_folder`, `val_folder`, `label_folder`
    and `mean_file`, which are relative to `data_folder`. Use the ``..._path`` properties.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    n_epochs: int = _key(
        _RUN,
        60,
        "epochs to train in all, those before a resume included",
        "a whole number of at least 1",
        ge=1,
    )
    resume_train: bool = _key(_RUN, False, "continue from a checkpoint in weights_dir", _SWITCH)
    load_epoch: Annotated[int, Field(ge=0)] | Literal["latest"] = _key(
        _RUN,
        "latest",
        "which checkpoint to resume from: whole epochs done, or latest",
        "a whole number of epochs of at least 0, or latest",
    )
    exact: bool = _key(
        _RUN,
        True,
        "resume only where the same bits can follow; false: continue anyway",
        _SWITCH,
    )
    restarts: int = _key(
        _RUN,
        0,
        "times to start again from the newest checkpoint after a fault",
        "a whole number of at least 0",
        ge=0,
    )
    on_nan: Literal["stop", "skip", "rollback"] = _key(
        _RUN,
        "stop",
        "when the loss or a gradient is not finite: stop, skip or rollback",
        "stop, skip or rollback",
    )
    seed: int = _key(
        _RUN,
        1,
        "key of all random choices",
        "a whole number from 0 to 2**63 - 1",
        ge=0,
        lt=2**63,
    )

    init_weights: _Path | None = _path(
        _TUNING, None, "checkpoint to take the first weights from; null: random ones"
    )
    init_weights_skip: _Layers = _key(
        _TUNING,
        (),
        "layers that begin at random all the same, such as [fc8]",
        "a list of layers such as [fc8], each once",
        "list",
    )
    freeze: _Layers = _key(
        _TUNING,
        (),
        "layers that keep the weights of init_weights and do not learn",
        "a list of layers such as [conv1, conv2], each once",
        "list",
    )
    lr_multipliers: dict[str, _Multiplier] = _key(
        _TUNING,
        {},
        "factors on the rate of single layers, such as {fc8: 10}",
        "layers and numbers above 0, such as {fc8: 10}",
        "mapping",
    )

    learning_rate: _Float = _key(
        _RATE,
        0.01,
        "rate at the start, for weights; biases learn at twice the rate",
        "a number above 0",
        gt=0,
    )
    lr_policy: Literal["step", "auto", "poly", "cosine", "constant"] = _key(
        _RATE,
        "step",
        "how the rate falls: step, auto, poly, cosine or constant",
        "step, auto, poly, cosine or constant",
    )
    lr_step: _Drops = _key(
        _RATE,
        (20, 40),
        "step: epochs done when the rate is divided by 10",
        "a list of increasing whole numbers of epochs, each at least 1",
        "list",
    )
    lr_adapt_threshold: _Float = _key(
        _RATE,
        0.01,
        "auto: least gain in top-1 error over two epochs, a fraction",
        "a number of at least 0",
        ge=0,
    )
    lr_power: _Float = _key(
        _RATE,
        1.0,
        "poly: exponent, of the fraction of training that is left",
        "a number above 0",
        gt=0,
    )
    warmup_epochs: _Float = _key(
        _RATE,
        0.0,
        "epochs over which the rate first rises, from 0, or to its scaling",
        "a number of epochs of at least 0",
        ge=0,
    )

    lr_scaling: Literal["none", "linear", "sqrt"] = _key(
        _RATE,
        "none",
        "rate times the trainers, or their root: none, linear or sqrt",
        "none, linear or sqrt",
    )

    use_momentum: bool = _key(_RULE, True, "momentum SGD; false: plain SGD", _SWITCH)
    momentum: _Float = _key(
        _RULE,
        0.9,
        "fraction of the velocity kept from step to step",
        "a number of at least 0 and below 1",
        ge=0,
        lt=1,
    )
    use_nesterov_momentum: bool = _key(_RULE, False, "Nesterov's form of momentum", _SWITCH)
    weight_decay: _Float = _key(
        _RULE,
        0.0005,
        "decay of weights per step and unit of rate; biases have none",
        "a number of at least 0",
        ge=0,
    )

    data_folder: _Path = _path(_DATA, "data/imagenet", "where preprocessing wrote manifest.json")
    train_folder: _Path = _path(_DATA, "train_hkl", "training batches, below data_folder")
    val_folder: _Path = _path(_DATA, "val_hkl", "validation batches, below data_folder")
    label_folder: _Path = _path(_DATA, "labels", "label files, below data_folder")
    mean_file: _Path = _path(_DATA, "misc/img_mean.npy", "mean image, below data_folder")

    shuffle: Annotated[Literal["none", "files", "images"], BeforeValidator(_shuffle_word)] = _key(
        _ORDER,
        "files",
        "what gets a new order each epoch: none, files or images",
        "none, files or images",
    )
    rand_crop: bool = _key(_ORDER, True, "crop at random; false: the centre", _SWITCH)
    rand_mirror: bool = _key(_ORDER, True, "mirror half of the pictures at random", _SWITCH)
    batch_crop_mirror: bool = _key(
        _ORDER, False, "one crop and mirror for a whole global batch, not each picture", _SWITCH
    )

    network: Annotated[str, AfterValidator(_network_name)] = _key(
        _NETWORK,
        ALEXNET,
        "class of the network, as module:class",
        "a module and a class that Python can import, such as alex_net:AlexNet",
        "text",
    )
    crop_size: int = _key(
        _NETWORK,
        227,
        "pixels on each side of the network's input",
        "a whole number of pixels of at least 1",
        ge=1,
    )
    width: _Float = _key(
        _NETWORK, 1.0, "factor on all filter and unit counts", "a number above 0", gt=0
    )
    norm_before_pool: bool = _key(
        _NETWORK, False, "normalise before max pooling, as Caffe's bvlc_alexnet does", _SWITCH
    )
    network_options: dict[str, bool | int | float | str] = _key(
        _NETWORK,
        {},
        "further arguments of the network's class",
        "names and values, such as {norm_before_pool: true}",
        "mapping",
    )
    precision: Literal["float32", "tf32", "bfloat16", "float64"] = _key(
        _NETWORK,
        "float32",
        "of products: float32, tf32 (GPUs), bfloat16; float64: all",
        "float32, tf32, bfloat16 or float64",
    )

    devices: _Devices = _key(
        _TRAINERS,
        "auto",
        "a trainer on each: a list; auto: all GPUs, or the CPU",
        "auto, or a list such as [cpu, cpu] or [cuda:0, cuda:1]",
        "list",
    )
    batch_size: int = _key(
        _TRAINERS,
        128,
        "images per trainer and step, not global",
        "a whole number of images of at least 1",
        ge=1,
    )
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = _key(
        _TRAINERS,
        "auto",
        "CPU threads per trainer; auto: cores divided by trainers",
        "a whole number of at least 1, or auto",
    )
    compile: bool | Literal["auto"] = _key(
        _TRAINERS,
        "auto",
        "torch.compile the graph, about a minute; auto: on GPUs only",
        "true, false or auto",
    )
    exchange: Literal["average", "gradients", "shared"] = _key(
        _TRAINERS,
        "average",
        "average weights after a step or gradients before; shared: one copy",
        "average, gradients or shared",
    )
    rule: Literal["bsp", "easgd", "gosgd"] = _key(
        _TRAINERS,
        "bsp",
        "over MPI: bsp, all in step; easgd, by a server; gosgd, gossip",
        "bsp, easgd or gosgd",
    )
    easgd_alpha: _Float = _key(
        _TRAINERS,
        0.5,
        "easgd: part of the difference by which weights and centre move",
        "a number above 0 and below 1",
        gt=0,
        lt=1,
    )
    easgd_tau: int = _key(
        _TRAINERS,
        1,
        "easgd: steps between visits to the server",
        "a whole number of steps of at least 1",
        ge=1,
    )
    gosgd_p: _Float = _key(
        _TRAINERS,
        0.1,
        "gosgd: probability of sending after a step",
        "a number above 0 and at most 1",
        gt=0,
        le=1,
    )
    collective: Literal["auto", "ar", "asa", "asa16", "hierarchical", "nccl"] = _key(
        _TRAINERS,
        "auto",
        "of ranks: ar, asa, asa16, hierarchical or nccl; auto: nccl if it can, else asa",
        "auto, ar, asa, asa16, hierarchical or nccl",
    )
    wire: Literal["float16", "bfloat16"] = _key(
        _TRAINERS,
        "float16",
        "asa16: in what vectors travel, float16 or bfloat16",
        "float16 or bfloat16",
    )
    error_feedback: bool = _key(
        _TRAINERS,
        False,
        "asa16: what rounding loses is sent with the next step",
        _SWITCH,
    )
    bucket_mb: _Float = _key(
        _TRAINERS,
        0.0,
        "of ranks: MB of gradients sent while others are computed; 0: none",
        "a number of megabytes of at least 0",
        ge=0,
    )
    deterministic: bool = _key(
        _TRAINERS,
        False,
        "on GPUs: the same bits every time, for exact resume; slower",
        _SWITCH,
    )
    check_every: int = _key(
        _TRAINERS,
        0,
        "steps between checks that trainers' parameters agree; 0: none",
        "a whole number of steps of at least 0",
        ge=0,
    )
    para_load: bool = _key(
        _TRAINERS, True, "a loader process beside each trainer; false: trainers load", _SWITCH
    )
    use_data_layer: bool | Literal["auto"] = _key(
        _TRAINERS,
        "auto",
        "crop on the device, not in the loader; auto: true on GPUs",
        "true, false or auto",
    )

    peer_timeout_seconds: _Float = _key(
        _TRAINERS,
        60.0,
        "seconds without a sign of life after which a process is dead",
        "a number of seconds of at least 1",
        ge=1,
    )

    weights_dir: _Path = _path(_OUTPUT, "runs/alexnet", "checkpoints, record.jsonl and config.yaml")
    snapshot_freq: int = _key(
        _OUTPUT,
        1,
        "epochs between checkpoints",
        "a whole number of epochs of at least 1",
        ge=1,
    )
    snapshot_minutes: _Float = _key(
        _OUTPUT,
        10.0,
        "minutes between checkpoints within an epoch; 0: none",
        "a number of minutes of at least 0",
        ge=0,
    )
    keep_snapshots: Annotated[int, Field(ge=1)] | Literal["all"] = _key(
        _OUTPUT,
        3,
        "last checkpoints that are kept, beside the best; or all",
        "a whole number of at least 1, or all",
    )
    print_freq: int = _key(
        _OUTPUT,
        20,
        "steps between reports",
        "a whole number of steps of at least 1",
        ge=1,
    )
    print_train_error: bool = _key(
        _OUTPUT, True, "report the training error beside the loss", _SWITCH
    )
    tensorboard: bool = _key(_OUTPUT, True, "write event files for TensorBoard", _SWITCH)
    live_view: bool = _key(
        _OUTPUT, True, "one live view, on a terminal; false: lines, as into a file", _SWITCH
    )

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.use_nesterov_momentum and not self.use_momentum:
            raise ValueError(
                "use_nesterov_momentum is true while use_momentum is false: Nesterov's is a form "
                "of momentum, so set use_momentum to true or both to false"
            )
        if self.error_feedback and self.collective != "asa16":
            raise ValueError(
                f"error_feedback is true while collective is {self.collective}, which rounds "
                "nothing: it is for collective: asa16"
            )
        if self.rule != "bsp":
            self._check_loose_rule()
        if self.collective == "asa16" and self.precision == "float64":
            raise ValueError(
                "collective: asa16 is for float32, and precision is float64: choose another of both"
            )
        if self.bucket_mb:
            self._check_buckets()
        if self.norm_before_pool and self.network_options.get("norm_before_pool") is False:
            raise ValueError("norm_before_pool is true, and false in network_options")
        self._check_tuning()
        return self

    @model_serializer(mode="wrap")
    def _without_empty_options(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A file of a run without options is the same as before there were any.
        values = dump(self)
        if not self.network_options:
            values.pop("network_options", None)
        return values

    def _check_buckets(self) -> None:
        if self.exchange != "gradients":
            raise ValueError(
                f"bucket_mb is {self.bucket_mb:g} and exchange is {self.exchange}: it is gradients "
                "that can be sent before all are there, so set exchange to gradients"
            )
        if self.error_feedback and self.on_nan == "skip":
            raise ValueError(
                f"bucket_mb is {self.bucket_mb:g}, error_feedback is true and on_nan is skip: a "
                "minibatch that is skipped would have been sent, and what rounding has lost of it "
                "be kept; change one of the three"
            )
        if self.compile is True:
            raise ValueError(
                f"bucket_mb is {self.bucket_mb:g} and compile is true: a compiled function tells "
                "of its gradients only when all are there, so set one of both to 0 or false"
            )

    def _check_loose_rule(self) -> None:
        """Refuse what has no meaning where trainers are not in step."""
        needed = {"exchange": "average", "collective": "auto", "check_every": 0}
        for key, value in needed.items():
            if getattr(self, key) != value:
                raise ValueError(
                    f"{key} is {getattr(self, key)} and rule is {self.rule}, by which trainers "
                    f"have weights of their own: leave {key} at {value}"
                )
        if self.on_nan == "rollback":
            raise ValueError(
                f"on_nan is rollback and rule is {self.rule}: trainers that are not in step can't "
                "go back together; use stop or skip"
            )

    def _check_tuning(self) -> None:
        if self.init_weights is None:
            if self.init_weights_skip:
                raise ValueError("init_weights_skip is set, but init_weights names no checkpoint")
            if self.freeze and not self.resume_train:
                raise ValueError(
                    "freeze is set, but init_weights names no checkpoint: the layers would keep "
                    "the random weights that they begin with"
                )
        for other in ("init_weights_skip", "lr_multipliers"):
            if both := [layer for layer in self.freeze if layer in getattr(self, other)]:
                raise ValueError(f"freeze and {other} both name {both[0]}, which contradicts")

    @property
    def dtype(self) -> Literal["float32", "float64"]:
        """Of weights, momenta and sums: tf32 and bfloat16 are only multiplied in."""
        return "float64" if self.precision == "float64" else "float32"

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the network's class: ``network_options``, and its older alias."""
        alias = {"norm_before_pool": True} if self.norm_before_pool else {}
        return alias | self.network_options

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

    @property
    def weights_path(self) -> Path:
        """The folder of everything that a run leaves."""
        return Path(self.weights_dir)

    @property
    def init_weights_path(self) -> Path | None:
        """The checkpoint to take the first weights from."""
        return None if self.init_weights is None else Path(self.init_weights)


def make_config(values: Mapping[str, Any]) -> Config:
    """Check values, as YAML reads them, and complete them with the defaults.

    Raises
    ------
    InputError
        Names every setting that cannot be used, its value, and what is allowed.
    """
    return validated(Config, values)


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
