"""Tables of predictions, and of the layers of a step."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tandem.cost.machine import Speed
from tandem.cost.predict import Prediction
from tandem.layers.parameter import layer_of
from tandem.text_table import aligned

if TYPE_CHECKING:
    from tandem.cost.steps import TrainerStep

_MEMORY, _WORK = "memory-bound", "GFLOP"
_COLUMNS = (
    "ranks",
    "machines",
    "compute",
    "exchange",
    "exposed",
    "load",
    "step",
    "images/s",
    "speed-up",
    "efficiency",
)


def as_row(prediction: Prediction) -> dict[str, Any]:
    """A prediction as JSON has it: seconds, and images a second."""
    computed = ("step", "images_per_second", "efficiency")
    found = {name: getattr(prediction, name) for name in computed}
    return dataclasses.asdict(prediction) | found


def predictions_table(predictions: Sequence[Prediction]) -> list[str]:
    """Lines of a table, one for each number of ranks."""
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for p in predictions:
        times = (p.compute, p.exchange, p.exposed, p.load, p.step)
        seconds = (f"{value:.4g} s" for value in times)
        rates = (f"{p.images_per_second:,.1f}", f"{p.speedup:.2f}", f"{p.efficiency:.0%}")
        rows.append((f"{p.ranks:,}", f"{p.machines:,}", *seconds, *rates))
    return aligned(rows)


def layers_table(step: "TrainerStep", speed: Speed) -> list[str]:
    """Lines of a table of milliseconds, one for each layer: forward, backward and update.

    The last column is the part of a layer's time in lines that memory limits, not arithmetic.
    """
    from tandem.training.attribution import INPUT  # which imports PyTensor

    layers: dict[str, Counter[str]] = {}
    for line in step.lines:
        took = line.seconds(speed)
        found = layers.setdefault(line.place.layer, Counter())
        computing = line.work.flops / speed.rate(line.work.kind)
        by_memory = line.work.nbytes / speed.bandwidth > computing
        found.update({line.place.phase: took, _MEMORY: took * by_memory, _WORK: line.work.flops})
    whole = sum(step.seconds(speed))
    rows: list[tuple[str, ...]] = [
        ("layer", "forward ms", "backward ms", "update ms", "of the step", _WORK, _MEMORY)
    ]
    known = dict.fromkeys(map(layer_of, step.layout.offsets))
    for layer in dict.fromkeys([INPUT, *known, *layers]):
        if layer not in layers:
            continue
        found = layers[layer]
        phases = [found[phase] for phase in ("forward", "backward", "update")]
        took = sum(phases)
        cells = (f"{1e3 * seconds:.2f}" for seconds in phases)
        bound = found[_MEMORY] / took if took else 0.0
        shares = (f"{took / whole:.1%}", f"{found[_WORK] / 1e9:.2f}", f"{bound:.0%}")
        rows.append((layer, *cells, *shares))
    return aligned(rows, left=range(1))
