"""The rate and decay of each parameter that a run updates."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from tandem.errors import InputError
from tandem.layers.parameter import Kind, Parameter, layer_of
from tandem.layers.training_pass import is_below
from tandem.validation import suggestion


@dataclass(frozen=True)
class ParameterRate:
    """The rate, decay and freezing of one parameter."""

    factor: float  # its rate, as a multiple of the run's
    decay: float  # per step and unit of its rate


@dataclass(frozen=True)
class ParameterGroups:
    """The rates, decay and freezing of parameters, by kind and by layer.

    A layer's name stands for all below it: ``layer1`` for ``layer1.0.conv1``. By default biases
    learn at twice the rate, and only weights decay: Krizhevsky et al. 2012, section 5, and the
    original's program.
    """

    freeze: Collection[str] = ()  # layers that are not trained
    lr_multipliers: Mapping[str, float] = field(default_factory=dict)  # on the rates of layers
    bias_rate: float = 2.0  # of biases, as a multiple of the run's
    decay_kinds: tuple[Kind, ...] = ("weight",)

    def learned(
        self, declared: Mapping[str, Parameter], weight_decay: float = 0.0
    ) -> dict[str, ParameterRate]:
        """The rate of every parameter that is learned, in the network's order.

        Raises InputError if the network lacks a layer, or if none is left to learn.
        """
        # A network may freeze single parameters of a layer.
        check_layers("freeze", [name for name in self.freeze if name not in declared], declared)
        check_layers("lr_multipliers", self.lr_multipliers, declared)
        rates = {
            name: ParameterRate(
                (self.bias_rate if parameter.kind == "bias" else 1.0) * self._multiplier(name),
                weight_decay if parameter.kind in self.decay_kinds else 0.0,
            )
            for name, parameter in declared.items()
            if parameter.trainable and not is_below(name, self.freeze)
        }
        if not rates:
            raise InputError("freeze names every layer of the network: none is left to learn")
        return rates

    def averages(self, declared: Mapping[str, Parameter]) -> dict[str, float]:
        """The arrays that a run updates without training them, and what a step keeps of each."""
        return {
            name: parameter.keep
            for name, parameter in declared.items()
            if not parameter.trainable and not is_below(name, self.freeze)
        }

    def _multiplier(self, name: str) -> float:
        """The factor of the innermost layer that is named."""
        named = [layer for layer in self.lr_multipliers if is_below(name, [layer])]
        return self.lr_multipliers[max(named, key=len)] if named else 1.0


def check_layers(setting: str, given: Iterable[str], parameters: Iterable[str]) -> None:
    """Refuse the name of a layer that the network does not have.

    `setting` is the key of the configuration that names the layers `given`. The InputError names
    the layer, the nearest of the network's, and the outermost of them.
    """
    layers = list(dict.fromkeys(layer_of(name) for name in parameters))
    for layer in given:
        if not any(is_below(name, [layer]) for name in layers):
            outermost = list(dict.fromkeys(name.partition(".")[0] for name in layers))
            hint = suggestion(layer, layers) or suggestion(layer.partition(".")[0], outermost)
            raise InputError(
                f"{setting}: the network has no layer {layer!r}{hint or '.'} "
                f"It has {', '.join(outermost)}"
            )
