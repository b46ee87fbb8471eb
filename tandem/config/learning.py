"""Sections of the configuration about what a network learns, and how."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from tandem.config.fields import (
    Float,
    Layers,
    PathText,
    Section,
    each_once,
    key,
    listed,
    with_choices,
)
from tandem.layers.choices import LOSSES, METRIC_NAMES, find_metric
from tandem.optim import OPTIMIZERS, SCHEDULES
from tandem.validation import MOST, suggestion

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_LAYERS = "a list of layers such as [conv1, conv2], each once"


def _metric_name(value: str) -> str:
    if value.startswith("__main__:"):
        raise ValueError(
            "the processes of a run do not run your program; put the function into a module"
        )
    if ":" in value and not _FUNCTION.fullmatch(value):
        raise ValueError("it needs a module and a function with a colon between them")
    if find_metric(value) is None:
        hint = suggestion(value, METRIC_NAMES) or "."
        raise ValueError(f"there is no metric {value!r}{hint} There are {', '.join(METRIC_NAMES)}")
    return value


class EarlyEnd(Section):
    heading = "The run"

    stop_patience: int = key(
        0,
        "epochs without improvement of stop_monitor after which training ends; 0: never",
        unit="epochs",
        omit_default=True,
        ge=0,
        le=MOST,
    )
    stop_monitor: str = key(
        "validation_loss",
        "what stop_patience and stop_at look at: as lr_monitor",
        "validation_loss, top1_error, top5_error or one of metrics",
        omit_default=True,
    )
    stop_at: Float | None = key(
        None,
        "value of stop_monitor at which training ends; null: none",
        "a number, or null",
        omit_default=True,
    )
    stop_delta: Float = key(
        0.0, "stop_patience: least improvement of stop_monitor", omit_default=True, ge=0
    )
    stop_baseline: Float | None = key(
        None,
        "stop_patience: what an epoch has to beat to be counted as better; null: nothing",
        "a number, or null",
        omit_default=True,
    )
    stop_from_epoch: int = key(
        0,
        "stop_patience: first epochs that do not count",
        unit="epochs",
        omit_default=True,
        ge=0,
        le=MOST,
    )


class FineTuning(Section):
    heading = "Fine-tuning"

    init_weights: PathText | None = key(
        None, "checkpoint to take the initial weights from; null: random ones"
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
        return None if self.init_weights is None else Path(self.init_weights)


@with_choices(SCHEDULES)
class LearningRate(Section):
    heading = "Learning rate"

    learning_rate: Float = key(0.01, "initial rate, for weights; biases see bias_rate", gt=0)
    lr_policy: str = key("step", "how the rate falls: {words}")


class WarmUp(Section):
    heading = LearningRate.heading

    warmup_epochs: Float = key(
        0.0, "epochs over which the rate rises, from 0 or to its scaling", unit="epochs", ge=0
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = key(
        "none", "rate times the number of trainers, or its root: none, linear or sqrt"
    )


@with_choices(OPTIMIZERS)
class UpdateRule(Section):
    heading = "Optimizer"

    optimizer: str = key("sgd", "update rule of the weights: {words}", omit_default=True)
    bias_rate: Float = key(
        2.0, "learning rate of biases, as a multiple of learning_rate", gt=0, omit_default=True
    )
    clip_norm: Annotated[Float, Field(gt=0)] | None = key(
        None,
        "largest norm of each parameter's gradient, to which it is scaled; null: none",
        "a number above 0, or null",
        omit_default=True,
    )
    clip_global_norm: Annotated[Float, Field(gt=0)] | None = key(
        None,
        "largest norm of all gradients together, to which they are scaled; null: none",
        "a number above 0, or null",
        omit_default=True,
    )
    clip_value: Annotated[Float, Field(gt=0)] | None = key(
        None,
        "largest absolute value of an element of a gradient; null: none",
        "a number above 0, or null",
        omit_default=True,
    )
    average_weights: Annotated[Float, Field(ge=0, le=1)] | None = key(
        None,
        "fraction of a moving average of each weight kept in a step; null: no averages",
        "a number from 0 to 1, or null",
        omit_default=True,
    )
    average_overwrites: Annotated[int, Field(ge=0, le=MOST)] = key(
        0,
        "steps after which weights become their averages; 0: never",
        f"a whole number of steps from 0 to {MOST}",
        omit_default=True,
    )
    decoupled_decay: bool = key(
        False, "weight decay beside the step of any optimizer, as of adamw", omit_default=True
    )
    decay_kinds: Annotated[
        tuple[Literal["weight", "bias", "scale", "shift"], ...],
        AfterValidator(each_once),
        BeforeValidator(listed),
    ] = key(
        ("weight",),
        "parameters that decay: weight, bias; of batch norm scale, shift",
        "a list of weight, bias, scale and shift, each once",
        omit_default=True,
    )

    @property
    def clips(self) -> str:
        """The setting by which gradients are clipped, or several; empty where they are not."""
        names = ("clip_norm", "clip_global_norm", "clip_value")
        return " and ".join(name for name in names if getattr(self, name) is not None)


@with_choices(LOSSES)
class TrainedLoss(Section):
    heading = "Loss and metrics"

    loss: str = key("cross_entropy", "what training minimises: {words}", omit_default=True)


class Metrics(Section):
    heading = TrainedLoss.heading

    metrics: Annotated[
        tuple[Annotated[str, AfterValidator(_metric_name)], ...],
        AfterValidator(each_once),
        BeforeValidator(listed),
    ] = key(
        (),
        f"measured beside loss and errors: any of {', '.join(METRIC_NAMES)} (or another number), "
        "or module:function",
        "a list of metrics such as [accuracy, f1], each once",
        omit_default=True,
    )
