"""Recurrent layers, by an Op of all steps or by PyTensor's scan, and layers that wrap another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytensor
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem.keras.graph import LayerData
from tandem.keras.lowering.activations import activated
from tandem.keras.lowering.call import Call, number
from tandem.keras.lowering.core import drop, lengths, rows_of
from tandem.keras.lowering.registry import lowers
from tandem.ops import gru, lstm

States = tuple[TensorVariable, ...]
Product = Callable[[TensorVariable], TensorVariable]


@dataclass(frozen=True)
class Cell:
    """One step of a recurrent layer.

    Attributes
    ----------
    sizes : tuple of int
        Units of each state.
    project : function
        Of the inputs of a step, or of all steps at once, to what `step` takes.
    step : function
        Of projected inputs and states to the next states.
    output : int
        Number of the state that is the output.
    steps : function, optional
        Of projected inputs of all steps, and the first states, to the states after each step, each
        (step, batch, unit); where an Op computes them at once.
    """

    sizes: tuple[int, ...]
    project: Product
    step: Callable[..., States]
    output: int = 0
    steps: Callable[..., States] | None = None


def _product(
    layer: Call, weight: TensorVariable, gates: int, key: str, batch: Any, by_gate: bool
) -> Product:
    """Product with a weight, of inputs of which a mask drops some, the same ones in all steps."""
    size, width = cast(tuple[int, int], weight.type.shape)
    rate = layer.number(key, 0, 0.999999, default=0)
    if not rate or layer.training is None:
        return lambda x: _times(x, weight, width)
    ones = pt.specify_shape(pt.ones((batch, size), dtype=layer.dtype), (None, size))
    count = gates if by_gate else 1
    masks = [drop(layer, ones, rate, (size,)) for _ in range(count)]
    parts = [weight[:, n * width // count : (n + 1) * width // count] for n in range(count)]

    def product(x: TensorVariable) -> TensorVariable:
        spread = [m if x.type.ndim == 2 else m.dimshuffle(0, "x", 1) for m in masks]
        pairs = zip(spread, parts, strict=True)
        products = [_times(x * mask, part, width // count) for mask, part in pairs]
        return products[0] if count == 1 else pt.concatenate(products, axis=-1)

    return product


def _times(x: TensorVariable, weight: TensorVariable, width: int) -> TensorVariable:
    return rows_of(x, lambda rows: pt.dot(rows, weight), width)


def _products(layer: Call, inputs: int, gates: int, batch: Any) -> tuple[int, Product, Product]:
    """Units of a cell, and the products of its inputs and of its state with their weights."""
    units = layer.integer("units")
    weight = layer.parameter("kernel", (inputs, gates * units))
    recurrent = layer.parameter("recurrent_kernel", (units, gates * units))
    by_gate = gates > 1 and layer.number("recurrent_dropout", 0, 1, default=0) > 0
    return (
        units,
        _product(layer, weight, gates, "dropout", batch, by_gate),
        _product(layer, recurrent, gates, "recurrent_dropout", batch, by_gate),
    )


def _bias(layer: Call, *shape: int) -> Any:
    return layer.parameter("bias", shape) if layer.flag("use_bias") else number(0, layer)


def _simple_cell(layer: Call, inputs: int, batch: Any) -> Cell:
    units, product, recurrent = _products(layer, inputs, 1, batch)
    bias = _bias(layer, units)

    def step(z: TensorVariable, h: TensorVariable) -> States:
        return (activated(layer, z + recurrent(h)),)

    return Cell((units,), lambda x: product(x) + bias, step)


def _lstm_cell(layer: Call, inputs: int, batch: Any) -> Cell:
    """Hochreiter, Schmidhuber 1997; gates in the order input, forget, cell, output."""
    units, product, recurrent = _products(layer, inputs, 4, batch)
    bias = _bias(layer, 4 * units)
    layer.flag("unit_forget_bias", True)

    def step(z: TensorVariable, h: TensorVariable, c: TensorVariable) -> States:
        gates = z + recurrent(h)
        i, f, g, o = (gates[:, n * units : (n + 1) * units] for n in range(4))
        i, f, o = (activated(layer, gate, "recurrent_activation") for gate in (i, f, o))
        c = f * c + i * activated(layer, g)
        return o * activated(layer, c), c

    def steps(z: TensorVariable, h: TensorVariable, c: TensorVariable) -> States:
        return lstm(z, layer.parameter("recurrent_kernel", (units, 4 * units)), h, c)

    usual = _is_usual(layer)
    return Cell((units, units), lambda x: product(x) + bias, step, steps=steps if usual else None)


def _gru_cell(layer: Call, inputs: int, batch: Any) -> Cell:
    """Cho et al. 2014; gates in the order update, reset, state."""
    units, product, recurrent = _products(layer, inputs, 3, batch)
    resets_after = layer.flag("reset_after", True)
    bias = _bias(layer, *[2] * resets_after, 3 * units)
    has_two = resets_after and layer.flag("use_bias")
    given, inner = (bias[0], bias[1]) if has_two else (bias, number(0, layer))
    recurrent_weight = layer.parameter("recurrent_kernel", (units, 3 * units))
    if not resets_after and layer.value("recurrent_dropout"):
        raise layer.fault("recurrent_dropout with reset_after false", "reset_after true")

    def step(z: TensorVariable, h: TensorVariable) -> States:
        two, own = 2 * units, slice(2 * units, None)
        if resets_after:
            state = recurrent(h) + inner
            gates = activated(layer, z[:, :two] + state[:, :two], "recurrent_activation")
            candidate = gates[:, units:] * state[:, own]
        else:
            state = pt.dot(h, recurrent_weight[:, :two])
            gates = activated(layer, z[:, :two] + state, "recurrent_activation")
            candidate = pt.dot(gates[:, units:] * h, recurrent_weight[:, own])
        update, new = gates[:, :units], activated(layer, z[:, own] + candidate)
        return (update * h + (number(1, h) - update) * new,)

    def steps(z: TensorVariable, h: TensorVariable) -> States:
        of_state = inner if has_two else pt.zeros(3 * units, dtype=layer.dtype)
        return (gru(z, recurrent_weight, of_state, h),)

    usual = resets_after and _is_usual(layer)
    return Cell((units,), lambda x: product(x) + given, step, steps=steps if usual else None)


def _is_usual(layer: Call) -> bool:
    """Return whether the steps are those that Ops compute."""
    activation, recurrent = layer.value("activation"), layer.value("recurrent_activation")
    drops = layer.training is not None and layer.value("recurrent_dropout")
    return activation == "tanh" and recurrent == "sigmoid" and not drops


def _stacked_cell(layer: Call, inputs: int, batch: Any) -> Cell:
    cells: list[Cell] = []
    for each in layer.inners("cells"):
        cells.append(_cell(layer.inside(each), inputs, batch))
        inputs = cells[-1].sizes[cells[-1].output]
    if not cells:
        raise layer.fault("no cells", "at least one")

    def step(x: TensorVariable, *states: TensorVariable) -> States:
        new: list[States] = []
        for cell in cells:
            own, states = states[: len(cell.sizes)], states[len(cell.sizes) :]
            new.append(cell.step(cell.project(x), *own))
            x = new[-1][cell.output]
        return tuple(state for each in new for state in each)

    sizes = tuple(n for cell in cells for n in cell.sizes)
    return Cell(sizes, lambda x: x, step, len(sizes) - len(cells[-1].sizes))


_CELLS: dict[str, Callable[[Call, int, Any], Cell]] = {
    "SimpleRNN": _simple_cell,
    "LSTM": _lstm_cell,
    "GRU": _gru_cell,
    "StackedRNNCells": _stacked_cell,
}


def _cell(layer: Call, inputs: int, batch: Any) -> Cell:
    kind = layer.kind.removesuffix("Cell")
    if kind not in _CELLS:
        raise layer.fault(f"the cell {layer.kind}", f"one of {', '.join(_CELLS)}")
    return _CELLS[kind](layer, inputs, batch)


@lowers("SimpleRNN", "LSTM", "GRU", "RNN")
def recurrent(layer: Call, x: TensorVariable, initial_state: Any = None) -> Any:
    if layer.flag("stateful"):
        raise layer.fault("stateful true", "false: rows are independent of each other")
    for key in ("unroll", "return_sequences", "return_state", "go_backwards"):
        layer.flag(key)
    zeroes = layer.flag("zero_output_for_mask", False)
    cell_layer = layer
    if layer.kind == "RNN":
        cell_layer = layer.inside(cast(LayerData, layer.inner("cell")))
    steps, *features = lengths(x)
    batch = x.shape[0]
    if len(features) != 1:
        raise layer.fault(f"an input of shape {x.type.shape}", "(batch, step, feature)")
    build = _cell if cell_layer is not layer else _CELLS[layer.kind]
    cell = build(cell_layer, features[0], batch)
    given = layer.keywords.pop("initial_state", initial_state)
    states = _initial(layer, cell, batch, given)
    sequences = [cell.project(x).dimshuffle(1, 0, 2)]
    if layer.mask is not None:
        sequences.append(layer.mask.dimshuffle(1, 0, "x"))
    if layer.mask is not None or cell.steps is None or layer.value("recurrent_dropout"):
        layer.pass_.loops[layer.name] = None
    if layer.flag("go_backwards"):
        sequences = [sequence[::-1] for sequence in sequences]
    if layer.mask is None and cell.steps is not None:
        traces = cell.steps(sequences[0], *states)
        outputs, last = traces[cell.output], [trace[-1] for trace in traces]
    else:
        outputs, last = _scanned(cell, sequences, states, steps, zeroes)
    y = outputs.dimshuffle(1, 0, 2) if layer.flag("return_sequences") else outputs[-1]
    y = pt.specify_shape(y, (None, *[steps] * (y.type.ndim - 2), cell.sizes[cell.output]))
    if layer.flag("return_sequences"):
        layer.set_mask(y, layer.first_mask)
    return [y, *last] if layer.flag("return_state") else y


def _initial(layer: Call, cell: Cell, batch: Any, given: Any) -> list[TensorVariable]:
    """The states before the first step: given ones, or zeros."""
    states: Any = given if isinstance(given, list | tuple) else [given]
    if given is None:
        states = [pt.zeros((batch, size), dtype=layer.dtype) for size in cell.sizes]
    if len(states) != len(cell.sizes):
        raise layer.fault(f"{len(states)} initial states", f"{len(cell.sizes)}")
    return [
        pt.specify_shape(state, (None, size))
        for state, size in zip(states, cell.sizes, strict=True)
    ]


def _scanned(
    cell: Cell,
    sequences: Sequence[TensorVariable],
    states: list[TensorVariable],
    steps: int,
    zeroes: bool,
) -> tuple[TensorVariable, list[TensorVariable]]:
    """Outputs of all steps, (step, batch, unit), and the last states.

    A step that is masked keeps the states, and repeats the output before it or is 0.
    """
    count = len(states)

    def step(z: TensorVariable, *others: TensorVariable) -> list[TensorVariable]:
        if len(sequences) == 1:
            return [*cell.step(z, *others)]
        counts, *before = others
        new = cell.step(z, *before[:count])
        made = new[cell.output]
        output = pt.switch(counts, made, number(0, made) if zeroes else before[count])
        kept = [
            pt.switch(counts, one, other) for one, other in zip(new, before[:count], strict=True)
        ]
        return [*kept, output]

    first = [*states]
    if len(sequences) > 1:
        first.append(pt.zeros_like(states[cell.output]))
    found = pytensor.scan(
        step, sequences, first, n_steps=steps, return_list=True, return_updates=False
    )
    outputs = found[count if len(sequences) > 1 else cell.output]
    return outputs, [found[n][-1] for n in range(count)]


@lowers("Bidirectional")
def bidirectional(layer: Call, x: TensorVariable, initial_state: Any = None) -> Any:
    given = layer.keywords.pop("initial_state", initial_state)
    merge, results = layer.value("merge_mode"), []
    for place, key in enumerate(("layer", "backward_layer")):
        inner = cast(LayerData, layer.inner(key))
        sequences = inner.config.get("return_sequences") is True
        if "zero_output_for_mask" in inner.config:
            config = {**inner.config, "zero_output_for_mask": sequences}
            inner = LayerData(inner.name, inner.kind, config)
        keywords: dict[str, Any] = {"mask": layer.mask}
        if given is not None:
            half = len(given) // 2
            keywords["initial_state"] = given[half:] if place else given[:half]
        results.append(layer.apply(inner, inner.name, x, **keywords))
    (forward, *states), (backward, *others) = results
    if sequences:
        backward = backward[:, ::-1]
    y: Any
    if merge is None:
        y = [forward, backward]
    elif merge == "concat":
        y = pt.concatenate([forward, backward], axis=-1)
    elif merge == "mul":
        y = forward * backward
    elif merge in ("sum", "ave"):
        y = (forward + backward) * number(1 if merge == "sum" else 0.5, forward)
    else:
        raise layer.fault(f"merge_mode {merge}", "concat, sum, ave, mul or null")
    outputs = y if merge is None else [y]
    if sequences:
        for each in outputs:
            layer.set_mask(each, layer.first_mask)
    return [*outputs, *states, *others]


@lowers("TimeDistributed", keeps_mask=True)
def time_distributed(layer: Call, x: TensorVariable) -> TensorVariable:
    """All steps as rows of a larger minibatch."""
    steps, *rest = lengths(x)
    inner = layer.inner("layer")
    rows = pt.specify_shape(x.reshape((-1, *rest)), (None, *rest))
    with layer.several_rows(steps):
        (y, *others) = layer.apply(inner, inner.name, rows)
    if others:
        raise layer.fault("several outputs of the layer inside", "one")
    out = lengths(y)
    return pt.specify_shape(y.reshape((x.shape[0], steps, *out)), (None, steps, *out))
