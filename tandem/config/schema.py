"""The configuration of a run: every setting with its type, unit, meaning and default.

`Config` is the one description of every setting. From it come the check of a file, the options of
the programs (``--key value ...``), their ``--help``, and ``config.yaml`` in the project's root,
which lists every key beside its default (a test holds the two together).
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field

from tandem.config.fields import (
    Float,
    PathText,
    Section,
    flag,
    key,
    listed,
    with_choices,
)
from tandem.config.learning import (
    EarlyEnd,
    FineTuning,
    LearningRate,
    Metrics,
    TrainedLoss,
    UpdateRule,
    WarmUp,
)
from tandem.data.colour import COVARIANCE_NAME
from tandem.distributed import ALL_REDUCES, EXCHANGES, RULES
from tandem.errors import explained
from tandem.files import write_text
from tandem.layers.choices import LOSSES
from tandem.layers.network import ALEXNET, FullyConnected
from tandem.nested import PlainMapping
from tandem.optim import OPTIMIZERS, SCHEDULES
from tandem.optim.parameter_groups import ParameterGroups
from tandem.processor import Convolutions
from tandem.registry import Registry
from tandem.validation import MOST, validated

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


def _class_name(value: str) -> str:
    if not _CLASS.fullmatch(value):
        raise ValueError("it needs a module and a class with a colon between them")
    return value


KERAS_SUFFIX, KERAS_APPLICATIONS = ".keras", "keras.applications:"
"""Ends, or begins, the name of a network that is a model of Keras."""


def is_keras_model(network: str) -> bool:
    """Test if a network is named as a model of Keras."""
    return network.endswith(KERAS_SUFFIX) or network.startswith(KERAS_APPLICATIONS)


def _network_name(value: str) -> str:
    if value.endswith(KERAS_SUFFIX):
        return value
    if value.startswith("__main__:"):
        raise ValueError(
            "the processes of a run do not run your program; put the class into a module of its own"
        )
    return _class_name(value)


def _shuffle_word(value: Any) -> Any:
    if isinstance(value, bool):
        word, text = ("files", "true") if value else ("none", "false")
        raise ValueError(
            f"the original's switch has become three words: for {text} write {word}, "
            "or write images for a true shuffle of single images"
        )
    return value


def _convolutions_word(value: Any) -> Any:
    """Take the word for fewer products that versions before 0.4 had."""
    return "winograd" if value == "fft" else value


def _trace_word(value: Any) -> Any:
    return "off" if value is False else value  # as YAML 1.1 reads the word


def _window(steps: tuple[int, ...]) -> tuple[int, ...]:
    if len(steps) != 2 or not 0 <= steps[0] < steps[1] <= MOST:
        raise ValueError(f"it needs a first step of at least 0 and a larger one, at most {MOST}")
    return steps


_Devices = Annotated[
    Literal["auto"] | Annotated[tuple[str, ...], AfterValidator(_usable_devices)],
    BeforeValidator(_devices_listed),
]


CHOICES: tuple[Registry[Any], ...] = (SCHEDULES, OPTIMIZERS, LOSSES, EXCHANGES, RULES, ALL_REDUCES)
"""Choices of the configuration; `tandem.config.resolve` checks each choice."""


class Run(Section):
    heading = "The run"

    n_epochs: int = key(60, "epochs to train in all, those before a resume included", ge=1, le=MOST)
    resume_train: bool = key(False, "continue from a checkpoint in weights_dir")
    load_epoch: Annotated[int, Field(ge=0, le=MOST)] | Literal["latest"] = key(
        "latest",
        "which checkpoint to resume from: whole epochs done, or latest",
        f"a whole number of epochs from 0 to {MOST}, or latest",
    )
    exact: bool = key(True, "resume only if the same bits can follow; false: continue anyway")
    restarts: int = key(
        0, "times to restart from the newest checkpoint after a failure", ge=0, le=MOST
    )
    min_trainers: Annotated[int, Field(ge=1, le=4096)] | None = key(
        None,
        "fewest trainers to go on with when some are lost; null: the run ends",
        "a whole number from 1 to 4096, or null",
        omit_default=True,
    )
    on_nan: Literal["stop", "skip", "rollback"] = key(
        "stop", "when the loss or a gradient is not finite: stop, skip or rollback"
    )
    seed: int = key(1, "random seed", "a whole number from 0 to 2**63 - 1", ge=0, lt=2**63)


class Data(Section):
    heading = "Data"

    data_folder: PathText = key("data/imagenet", "where preprocessing wrote manifest.json")
    train_folder: PathText = key("train_hkl", "training batches, below data_folder")
    val_folder: PathText = key("val_hkl", "validation batches, below data_folder")
    label_folder: PathText = key("labels", "label files, below data_folder")
    mean_file: PathText | None = key(
        "misc/img_mean.npy", "mean image, below data_folder; null: none is subtracted"
    )

    @property
    def data_path(self) -> Path:
        return Path(self.data_folder)

    @property
    def manifest_path(self) -> Path:
        return self.data_path / "manifest.json"

    @property
    def train_path(self) -> Path:
        return self.data_path / self.train_folder

    @property
    def val_path(self) -> Path:
        return self.data_path / self.val_folder

    @property
    def label_path(self) -> Path:
        return self.data_path / self.label_folder

    @property
    def mean_path(self) -> Path | None:
        return None if self.mean_file is None else self.data_path / self.mean_file

    @property
    def covariance_path(self) -> Path:
        """The covariance of colours, which preprocessing writes beside the mean image."""
        if self.mean_path is None:
            return self.data_path / "misc" / COVARIANCE_NAME
        return self.mean_path.with_name(COVARIANCE_NAME)


class Augmentation(Section):
    heading = "Order and augmentation of the training images"

    shuffle: Annotated[Literal["none", "files", "images"], BeforeValidator(_shuffle_word)] = key(
        "files", "what gets a new order each epoch: none, files or images"
    )
    rand_crop: bool = key(True, "random crops; false: the centre")
    rand_mirror: bool = key(True, "mirror each image with probability 0.5")
    batch_crop_mirror: bool = key(False, "one crop and mirror for a whole global batch")
    rand_colour: Float = key(
        0.0,
        "PCA colour noise: standard deviation of the paper's alpha, there 0.1; 0: none",
        ge=0,
        affects_bits=True,
        omit_default=True,
    )


class Network(Section):
    heading = "Network"

    network: Annotated[str, AfterValidator(_network_name)] = key(
        ALEXNET,
        "class of the network, as module:class, or a model of Keras, as model.keras",
        "a module and a class that Python can import, such as alex_net:AlexNet, or a .keras file",
    )
    crop_size: int = key(
        227, "pixels on each side of the network's input", unit="pixels", ge=1, le=65_500
    )
    width: Float = key(1.0, "factor on all filter and unit counts", gt=0)
    norm_before_pool: bool = key(
        False, "normalise before max pooling, as Caffe's bvlc_alexnet does"
    )
    network_options: PlainMapping = key(
        {},
        "further arguments of the network's class",
        "names and values, such as {norm_before_pool: true}",
        omit_default=True,
    )
    precision: Literal["auto", "float32", "tf32", "bfloat16", "float64"] = key(
        "auto",
        "of products: float32, tf32 (GPUs), bfloat16; float64: all; auto: bfloat16 on GPUs",
        affects_bits=True,
    )

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the network's class: ``network_options``, and its older alias."""
        alias = {"norm_before_pool": True} if self.norm_before_pool else {}
        return alias | self.network_options

    @property
    def dtype(self) -> Literal["float32", "float64"]:
        """The dtype of weights, states and sums: tf32 and bfloat16 are only multiplied in."""
        return "float64" if self.precision == "float64" else "float32"


_NORM_ROWS = 32


@with_choices(RULES, words_only=[EXCHANGES])
class Trainers(Section):
    heading = "Trainers and loaders"

    devices: _Devices = key(
        "auto",
        "one trainer on each: a list; auto: all GPUs, or the CPU",
        "auto, or a list such as [cpu, cpu] or [cuda:0, cuda:1]",
    )
    batch_size: int = key(
        128, "images per trainer and step, not global", unit="images", ge=1, le=1 << 24
    )
    global_batch: Annotated[int, Field(ge=1, le=1 << 24)] | None = key(
        None,
        "images per step over all trainers, whose shares may differ; null: by batch_size",
        f"a whole number of images from 1 to {1 << 24}, or null",
        omit_default=True,
    )
    sum_rows: Annotated[int, Field(ge=1, le=1 << 24)] | Literal["auto"] = key(
        "auto",
        "images of a pass; results then do not depend on the number of trainers; auto: off",
        "a whole number of images from 1 that divides global_batch, or auto",
        affects_bits=True,
        omit_default=True,
    )
    norm_rows: Annotated[int, Field(ge=1, le=1 << 24)] | Literal["auto", "global"] = key(
        "auto",
        "images batch norm normalises together; auto: 32, or batch_size; global: all trainers'",
        "a whole number of images from 1 that divides batch_size, auto or global",
        omit_default=True,
    )
    threads: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = key(
        "auto",
        "CPU threads per trainer; auto: cores divided by trainers",
        "a whole number from 1 to 4096, or auto",
        affects_bits=True,
    )
    compile: bool | Literal["auto"] = key(
        "auto",
        "torch.compile the graph, about a minute; auto: on GPUs where Triton can compile",
        affects_bits=True,
    )
    convolutions: Annotated[Convolutions, BeforeValidator(_convolutions_word)] = key(
        "auto",
        "on CPUs: direct, or winograd, with fewer products; auto: by the processor",
        affects_bits=True,
    )
    exchange: str = key(
        "auto",
        "average weights after a step or gradients before; shared: one copy; auto: by optimizer",
        affects_bits=True,
    )
    rule: str = key("bsp", "over MPI: bsp, synchronous; easgd, a parameter server; gosgd, gossip")
    fully_connected: FullyConnected = key(
        "replicated",
        "weights of these layers: replicated, sharded over trainers, or on a single one",
        affects_bits=True,
        omit_default=True,
    )

    @property
    def summed_rows(self) -> int | None:
        """Rows of each pass by `sum_rows`; None: a trainer makes one pass over all of its rows."""
        return None if self.sum_rows == "auto" else self.sum_rows

    @property
    def pass_rows(self) -> int:
        """Rows of one forward and backward pass."""
        return self.summed_rows or self.batch_size

    @property
    def group_rows(self) -> int | None:
        """Rows of a minibatch that are normalised together, with ``auto`` resolved; None: all."""
        if self.norm_rows == "global":
            return None
        return min(_NORM_ROWS, self.pass_rows) if self.norm_rows == "auto" else self.norm_rows


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
        0,
        "steps between checks that trainers' parameters agree; 0: none",
        unit="steps",
        ge=0,
        le=MOST,
    )
    para_load: bool = key(True, "a loader process beside each trainer; false: trainers load")
    loader_threads: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = key(
        "auto",
        "threads that read for a trainer; auto: 1 on the CPU, on GPUs up to 8",
        "a whole number from 1 to 4096, or auto",
    )
    use_data_layer: bool | Literal["auto"] = key(
        "auto", "crop on the device, not in the loader; auto: true on GPUs"
    )
    data_on_gpu: bool | Literal["auto"] = key(
        "auto", "keep all pictures on the GPU; auto: if they fit into a third of its free memory"
    )
    peer_timeout_seconds: Float = key(
        60.0, "seconds without a heartbeat after which a process is dead", unit="seconds", ge=1
    )


class Output(Section):
    heading = "What a run writes"

    weights_dir: PathText = key("runs/alexnet", "checkpoints, record.jsonl and config.yaml")
    snapshot_freq: int = key(1, "epochs between checkpoints", unit="epochs", ge=1, le=MOST)
    snapshot_minutes: Float = key(
        10.0, "minutes between checkpoints within an epoch; 0: none", unit="minutes", ge=0
    )
    keep_snapshots: Annotated[int, Field(ge=1, le=MOST)] | Literal["all"] = key(
        3,
        "newest checkpoints to keep, beside the best; or all",
        f"a whole number from 1 to {MOST}, or all",
    )
    keep_monitor: str = key(
        "top1_error",
        "value by which the best checkpoint is chosen: as lr_monitor",
        "validation_loss, top1_error, top5_error or one of metrics",
        omit_default=True,
    )
    print_freq: int = key(20, "steps between reports", unit="steps", ge=1, le=MOST)
    print_epochs: bool = key(
        False, "report at the end of each epoch too, so that its means are exact", omit_default=True
    )
    print_train_error: bool = key(True, "report the training error beside the loss")
    csv_file: PathText | None = key(
        None, "CSV file to write, a line for each epoch; null: none", omit_default=True
    )
    tensorboard: bool = key(True, "write event files for TensorBoard")
    tensorboard_dir: PathText | None = key(
        None, "folder of the event files; null: weights_dir", omit_default=True
    )
    live_view: bool = key(True, "live view, on a terminal; false: lines, as into a file")
    callbacks: Annotated[
        tuple[Annotated[str, AfterValidator(_class_name)], ...], BeforeValidator(listed)
    ] = key(
        (),
        "classes to call at the start and end of training and of epochs, as module:class",
        "a list of modules and classes such as [my_callbacks:Log]",
        omit_default=True,
    )
    trace: Annotated[Literal["off", "steps", "ops"], BeforeValidator(_trace_word)] = key(
        "off",
        "record where the time goes: parts of steps, or each Op as well; off: nothing",
        "off, steps or ops",
        omit_default=True,
    )
    trace_steps: Annotated[tuple[int, ...], AfterValidator(_window), BeforeValidator(listed)] = key(
        (20, 40),
        "steps to record, from the start of the processes: the first, and the first not recorded",
        "two whole numbers such as [20, 40]",
        omit_default=True,
    )

    @property
    def weights_path(self) -> Path:
        return Path(self.weights_dir)

    @property
    def reports_epochs(self) -> bool:
        """Return whether there is a report at the end of each epoch."""
        return self.print_epochs or self.csv_file is not None


# The bases stand in reverse: fields of the last one come first.
class Config(
    Output,
    Workers,
    Ranks,
    Trainers,
    Network,
    Augmentation,
    Data,
    Metrics,
    TrainedLoss,
    UpdateRule,
    WarmUp,
    LearningRate,
    FineTuning,
    EarlyEnd,
    Run,
):
    """Every setting of a run, checked; see each field's description for unit and meaning.

    Paths are relative to the current folder, except `train_folder`, `val_folder`, `label_folder`
    and `mean_file`, which are relative to `data_folder`. Use the ``..._path`` properties.
    """

    @property
    def parameter_groups(self) -> ParameterGroups:
        """Return how parameters learn, by kind and by layer."""
        return ParameterGroups(self.freeze, self.lr_multipliers, self.bias_rate, self.decay_kinds)


def affecting_bits(config: Config) -> list[str]:
    """Return the keys whose values a resumed run needs unchanged to compute the same bits.

    These are the fields that are marked so, and the marked settings of what is chosen. A choice
    with a method ``condition`` states there what its bits depend on.
    """
    keys = [name for name, field in Config.model_fields.items() if flag(field, "affects_bits")]
    chosen = [registry.chosen(dict(config)) for registry in CHOICES]
    plain = [choice for choice in chosen if not hasattr(choice, "condition")]
    declared = [field for choice in plain for field in dataclasses.fields(choice)]
    return keys + [field.name for field in declared if field.metadata["affects_bits"]]


def make_config(values: Mapping[str, Any]) -> Config:
    """Check values, as YAML reads them, and complete them with the defaults.

    An `InputError` names every setting that cannot be used, its value, and what is allowed.
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
    """Write the resolved configuration to ``folder/config.yaml``, whole or not at all."""
    path = folder / "config.yaml"
    with explained(path, "cannot be written"):
        write_text(path, dump_config(config))
    return path
