"""The choices of `Model.compile`, as settings of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import InputError
from tandem.layers.choices import Metric, metrics_of
from tandem.nn.graph import Graph
from tandem.nn.losses import FunctionLoss, Loss, find_loss
from tandem.nn.metrics import find_metrics
from tandem.nn.optimizers import find_optimizer


@dataclass(frozen=True)
class Compilation:
    """An optimizer, a loss and metrics."""

    optimizer: Mapping[str, Any]  # its settings
    loss: Loss
    metrics: Mapping[str, str]  # that of the configuration, by the name in a history

    @classmethod
    def of(cls, optimizer: Any, loss: Any, metrics: Sequence[Any]) -> "Compilation":
        """Check the arguments of `Model.compile`."""
        if loss is None:
            raise InputError("loss: found None, expected a loss, such as categorical_crossentropy")
        chosen = find_loss(loss)
        return cls(
            find_optimizer(optimizer).settings(), chosen, find_metrics(metrics or (), chosen)
        )

    @property
    def measured(self) -> dict[str, Metric]:
        """The metrics by the name in a history."""
        found = metrics_of(list(self.metrics.values()))
        return dict(zip(self.metrics, found, strict=True))

    @property
    def names(self) -> dict[str, str]:
        """The name of each metric in a record, by its name in a history."""
        return {key: metric.name for key, metric in self.measured.items()}

    @property
    def function(self) -> str:
        """The "module:function" of a loss that is the user's own, else empty."""
        return self.loss.path if isinstance(self.loss, FunctionLoss) else ""

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of the configuration."""
        metrics = list(dict.fromkeys(self.metrics.values()))
        return {**self.optimizer, **self.loss.settings(), "metrics": metrics}

    def output_of(self, graph: Graph) -> str:
        """The activation that the loss contains; InputError if the graph does not end in it."""
        wanted, found = self.loss.output, graph.output
        expected = "linear" if self.loss.is_from_logits else wanted
        if wanted != "linear" and found != expected:
            example = f"Dense({graph.output_shape[-1]}, activation={expected!r})"
            other = "" if self.loss.is_from_logits else ", or from_logits=True of the loss"
            there = f"other than {wanted}" if found == "linear" else found
            raise InputError(
                f"loss: found {self.loss.name} after a last activation {there}, expected "
                f"{expected}, such as {example}{other}"
            )
        return wanted
