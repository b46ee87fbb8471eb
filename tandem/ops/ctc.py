"""Connectionist temporal classification (Graves et al. 2006)."""

# A make_node names its inputs, in place of the *inputs of PyTensor's Op.
# mypy: disable-error-code=override

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType, disconnected_type
from pytensor.graph.basic import Apply
from pytensor.tensor.variable import TensorVariable

from tandem.ops.base import TensorOp, Values, same_length, tensor_input


def wrong_label(classes: int) -> str:
    """What to say of labels of which one is no class."""
    return f"a label is no class, expected numbers from 0 to {classes - 1}"


class CTC(TensorOp):
    """Loss of sequences without alignment, as `ctc` defines it, and its gradient.

    ``CTC()(logits, labels)`` has the outputs loss, (row,), and the gradient of each row's loss with
    respect to its logits, (row, step, class), by the forward and backward variables of section 4.1.
    """

    __props__ = ()

    def make_node(self, logits: Any, labels: Any) -> Apply:
        logits = tensor_input(self, "logits", logits, 3)
        labels = tensor_input(self, "labels", labels, 2, ("int64",))
        rows = same_length(self, "rows", logits.type.shape[0], labels.type.shape[0])
        loss = pt.tensor(dtype=logits.type.dtype, shape=(rows,))
        return Apply(self, [logits, labels], [loss, logits.type()])

    def infer_shape(self, fgraph: Any, node: Apply, shapes: list[tuple]) -> list[tuple]:
        return [shapes[0][:1], shapes[0]]

    def perform(self, node: Apply, inputs: Values, output_storage: list[list[Any]]) -> None:
        logits, labels = inputs
        if labels.size and not 0 <= labels.min() <= labels.max() < logits.shape[2]:
            raise IndexError(wrong_label(logits.shape[2]))
        logs = logits - np.logaddexp.reduce(logits, axis=2, keepdims=True)
        losses, gradient = np.empty(len(logits), logits.dtype), np.exp(logs)
        for row, (log, label) in enumerate(zip(logs, labels, strict=True)):
            path = np.zeros(2 * np.count_nonzero(label) + 1, int)  # a blank around each label
            path[1::2] = label[: len(path) // 2]
            before, behind = _summed(log[:, path], path), _summed(log[::-1, path[::-1]], path[::-1])
            total = np.logaddexp.reduce(before[-1, -2:])
            losses[row] = -total
            with np.errstate(invalid="ignore"):  # of a row without a way
                places = before + behind[::-1, ::-1] - log[:, path] - total
            for place, kind in enumerate(path):
                gradient[row, :, kind] -= np.exp(places[:, place])
        output_storage[0][0], output_storage[1][0] = losses, gradient

    def pullback(self, inputs: Values, outputs: Values, cotangents: Values) -> list[Any]:
        if not isinstance(cotangents[1].type, DisconnectedType):
            raise NotImplementedError(f"{self}: the gradient has no gradient of its own")
        return [cotangents[0].dimshuffle(0, "x", "x") * outputs[1], disconnected_type()]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[True, True], [False, False]]


def _summed(logs: np.ndarray, path: np.ndarray) -> np.ndarray:
    """Logarithms of the sums over all ways to each (step, place of the path)."""
    found = np.full_like(logs, -np.inf)
    found[0, :2] = logs[0, :2]
    # A blank between two labels may be left out, unless they are the same.
    skips = np.append([False, False], (path[2:] != 0) & (path[2:] != path[:-2]))[: len(path)]
    for step in range(1, len(logs)):
        for place in range(len(path)):
            ways = found[step - 1, max(0, place - 1 - skips[place]) : place + 1]
            found[step, place] = np.logaddexp.reduce(ways) + logs[step, place]
    return found


def ctc(logits: Any, labels: Any) -> TensorVariable:
    """Loss of sequences of labels, of which it is not known at which steps they are.

    The negative logarithm of the probability of all ways to the labels: each step has a class, of
    which 0 is the blank; equal classes in a row are one label, and blanks are left out.

    Parameters
    ----------
    logits : float32 or float64 (row, step, class)
    labels : int64 (row, label)
        Classes from 1; zeros at the end of a row are none.

    Returns
    -------
    loss : (row,)
        Infinite where a row has more labels than its steps can hold.
    """
    loss, _ = CTC()(logits, labels)
    return loss
