"""Ops with graphs inside: loops, branches, and Ops made from a graph."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Apply
from pytensor.ifelse import IfElse
from pytensor.scan.op import Scan

from tandem.backend.inner_graphs import Branches, rewritten
from tandem.backend.lowering.registry import Lowering, lower, torch_dtype

Tensor = torch.Tensor
Step = Callable[..., tuple[Any, ...]]


def _one_or_all(results: Sequence[Any]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


@lower.register(OpFromGraph)
def lower_op_from_graph(
    op: OpFromGraph, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    return Lowering(
        lambda inner, *inputs: _one_or_all(inner(*inputs)), graphs=(rewritten(op.fgraph),)
    )


@lower.register(IfElse)
def lower_if_else(op: IfElse, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    count = op.n_outs

    def choose(condition: float, *values: Any) -> Any:
        return _one_or_all(values[:count] if condition else values[count:])

    views = {output: (output + 1, output + 1 + count) for output in range(count)}
    return Lowering(choose, host=frozenset((0,)), views=views)


@lower.register(Branches)
def lower_branches(op: Branches, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    first = len(op.graphs[0].inputs)

    def choose(yes: Step, no: Step, condition: float, *inputs: Any) -> Any:
        return _one_or_all(yes(*inputs[:first]) if condition else no(*inputs[first:]))

    yes, no = op.graphs
    return Lowering(choose, host=frozenset((0,)), graphs=(rewritten(yes), rewritten(no)))


@dataclass(frozen=True)
class _Trace:
    """The record that a Scan has of one state: where a step reads it, and writes the next."""

    history: int  # states before the first step's, which are given
    taps: tuple[int, ...]  # of the states that a step reads, relative to the position
    written: tuple[int, ...] = (0,)  # of the results
    keeps_all: bool = False  # the trace has a place for every state


def _traces(op: Scan) -> list[_Trace]:
    info = op.info
    several = zip(info.mit_mot_in_slices, info.mit_mot_out_slices, strict=True)
    single = info.mit_sot_in_slices + info.sit_sot_in_slices
    return [
        *(_Trace(-min(taps), tuple(taps), tuple(written), True) for taps, written in several),
        *(_Trace(-min(taps), tuple(taps)) for taps in single),
        *[_Trace(0, ())] * info.n_nit_sot,
    ]


@lower.register(Scan)
def lower_scan(op: Scan, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    op.validate_inner_graph()
    info = op.info
    traces = _traces(op)
    first_state = 1 + info.n_seqs
    first_untraced = first_state + op.n_tap_outs
    first_length = first_untraced + info.n_untraced_sit_sot
    first_fixed = first_length + info.n_nit_sot
    kinds = [torch_dtype(v) for v in node.outputs[op.n_tap_outs : len(traces)]]

    def scan(step: Step, steps: int, *outer: Any) -> Any:
        inputs = (steps, *outer)
        sequences = inputs[1:first_state]
        _check_steps(steps, sequences)
        # Initial states are the beginning of each trace, whose length they have.
        buffers = [x.clone() for x in inputs[first_state:first_untraced]]
        lengths = [*(len(x) for x in buffers), *inputs[first_length:first_fixed]]
        untraced = list(inputs[first_untraced:first_length])
        fixed = inputs[first_fixed:]
        done, stopped = 0, False
        while done < steps and not stopped:
            given = [x[done] for x in sequences]
            for trace, buffer, length in zip(traces, buffers, lengths, strict=False):
                start = trace.history + done
                given += [buffer[(start + tap) % length] for tap in trace.taps]
            results = iter(step(*given, *untraced, *fixed))
            for index, (trace, length) in enumerate(zip(traces, lengths, strict=True)):
                for tap in trace.written:
                    value = next(results)
                    if index == len(buffers):
                        kind = kinds[index - op.n_tap_outs]
                        buffers.append(value.new_empty((length, *value.shape), dtype=kind))
                    _record(buffers[index], (trace.history + done + tap) % length, value)
            untraced = [next(results) for _ in untraced]
            stopped = info.as_while and bool(next(results))
            done += 1
        for output, kind in zip(node.outputs[len(buffers) : len(traces)], kinds, strict=False):
            buffers.append(torch.empty((0,) * output.type.ndim, dtype=kind, device=device))
        if done:
            buffers = [
                _finish(*each, done, steps) for each in zip(traces, buffers, lengths, strict=True)
            ]
        return _one_or_all([*buffers, *untraced])

    host = frozenset((0, *range(first_length, first_fixed)))
    return Lowering(scan, host=host, graphs=(rewritten(op.fgraph),), opaque=True)


def _check_steps(steps: int, sequences: Sequence[Tensor]) -> None:
    if steps < 0:
        raise IndexError(f"Scan was asked to run for negative number of step {steps}")
    for index, sequence in enumerate(sequences):
        if len(sequence) < steps:
            raise ValueError(
                f"Sequence {index} has shape {tuple(sequence.shape)} but the Scan's required "
                f"number of steps is {steps}"
            )


def _record(buffer: Tensor, place: int, value: Tensor) -> None:
    try:
        buffer[place].copy_(value)
    except RuntimeError as error:
        raise ValueError(
            f"a result of a Scan's step has shape {tuple(value.shape)}; the former ones have shape "
            f"{tuple(buffer.shape[1:])}"
        ) from error


def _finish(trace: _Trace, buffer: Tensor, length: int, done: int, steps: int) -> Tensor:
    """Put a trace in order of time, and treat places that no step has reached.

    A shorter trace holds the last states only. What is left of a longer one is zero, as the
    gradient of a truncated loop needs it, or cut off after a stop by condition.
    """
    end = trace.history + done
    if trace.keeps_all or length == end:
        return buffer
    if length < end:
        return buffer.roll(-(end % length), 0) if end % length else buffer
    buffer[end:] = 0
    return buffer[: length - (steps - done)]
