"""Losses, with Keras's names and arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from tandem.errors import InputError
from tandem.nn.graph import own_function

__all__ = [
    "BinaryCrossentropy",
    "CategoricalCrossentropy",
    "CategoricalHinge",
    "FunctionLoss",
    "KLDivergence",
    "Loss",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "SparseCategoricalCrossentropy",
    "find_loss",
]

Output = Literal["softmax", "sigmoid", "linear"]
Targets = Literal["one-hot", "labels", "either", "numbers"]


@dataclass(frozen=True)
class Loss:
    """Base of a loss.

    Attributes
    ----------
    setting : str
        The key ``loss`` of the configuration.
    output : str
        The activation that the loss contains: a cross-entropy is computed from the outputs before
        it, which is exact where probabilities would be rounded to 0 or 1.
    targets : str
        one-hot: rows of a number for each class; labels: whole numbers; either of these; numbers:
        any.
    """

    setting: ClassVar[str] = ""
    output: ClassVar[Output] = "linear"
    targets: ClassVar[Targets] = "numbers"

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def is_from_logits(self) -> bool:
        """Return whether the model's outputs lack the activation."""
        return getattr(self, "from_logits", False)

    def settings(self) -> dict[str, Any]:
        """The keys of the configuration that it stands for."""
        return {"loss": self.setting}


@dataclass(frozen=True)
class CategoricalCrossentropy(Loss):
    """Softmax cross-entropy of one-hot rows, or of other probabilities, in nats."""

    setting, output = "cross_entropy", "softmax"
    targets: ClassVar[Targets] = "one-hot"

    from_logits: bool = False
    label_smoothing: float = 0.0

    def settings(self) -> dict[str, Any]:
        return {"loss": self.setting, "label_smoothing": self.label_smoothing}


@dataclass(frozen=True)
class SparseCategoricalCrossentropy(Loss):
    """Softmax cross-entropy of labels, in nats."""

    setting, output, targets = "cross_entropy", "softmax", "labels"

    from_logits: bool = False


@dataclass(frozen=True)
class BinaryCrossentropy(Loss):
    """Sigmoid cross-entropy of each output against a number from 0 to 1, in nats; their mean."""

    setting, output = "binary_cross_entropy", "sigmoid"

    from_logits: bool = False


@dataclass(frozen=True)
class KLDivergence(Loss):
    """Kullback-Leibler divergence of the softmax from the targets, in nats."""

    setting, output, targets = "kl_divergence", "softmax", "one-hot"


@dataclass(frozen=True)
class CategoricalHinge(Loss):
    """Hinge of the true class against the best other one."""

    setting, targets = "categorical_hinge", "one-hot"


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    """Mean squared error of a row."""

    setting = "mse"


@dataclass(frozen=True)
class MeanAbsoluteError(Loss):
    """Mean absolute error of a row."""

    setting = "mae"


@dataclass(frozen=True)
class FunctionLoss(Loss):
    """A function of a module, ``f(targets, predictions)``, both symbolic rows, to one number each.

    Parameters
    ----------
    path : str
        "module:function".
    """

    path: str = ""

    @property
    def name(self) -> str:
        return self.path

    def settings(self) -> dict[str, Any]:
        return {}


_NAMES: dict[str, type[Loss]] = {
    "categorical_crossentropy": CategoricalCrossentropy,
    "sparse_categorical_crossentropy": SparseCategoricalCrossentropy,
    "binary_crossentropy": BinaryCrossentropy,
    "kl_divergence": KLDivergence,
    "categorical_hinge": CategoricalHinge,
    "mean_squared_error": MeanSquaredError,
    "mse": MeanSquaredError,
    "mean_absolute_error": MeanAbsoluteError,
    "mae": MeanAbsoluteError,
}


def find_loss(loss: Any) -> Loss:
    """A loss by its name, of a module's function, or as it is."""
    if isinstance(loss, Loss):
        return loss
    if callable(loss):
        return FunctionLoss(own_function("loss", loss))
    from tandem.validation import shown, suggestion

    if not isinstance(loss, str) or loss.lower() not in _NAMES:
        hint = suggestion(str(loss), _NAMES) or "."
        raise InputError(
            f"loss: found {shown(loss)}{hint} Expected a loss of tandem.nn.losses, a function of a "
            f"module, or one of {', '.join(_NAMES)}"
        )
    return _NAMES[loss.lower()]()


@dataclass(frozen=True)
class _Crossentropy(CategoricalCrossentropy):
    """The cross-entropy of a loaded run, for one-hot rows and labels."""

    targets = "either"

    @property
    def name(self) -> str:
        return "CategoricalCrossentropy"


def loss_of_run(settings: Mapping[str, Any], from_logits: bool) -> Loss:
    """The loss of a run's settings, on outputs with or without the activation."""
    kinds: dict[str, type[Loss]] = {kind.setting: kind for kind in reversed(_NAMES.values())}
    kinds["cross_entropy"] = _Crossentropy
    kind = kinds[settings["loss"]]
    given = {"from_logits": from_logits, "label_smoothing": settings.get("label_smoothing", 0.0)}
    return kind(**{f.name: given[f.name] for f in fields(kind)})
