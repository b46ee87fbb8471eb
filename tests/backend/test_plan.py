"""The schedule of a function that is not made."""

import numpy as np
import pytensor
import pytensor.tensor as pt

from tandem.backend import device_mode, device_shared
from tandem.backend.plan import plan_function


def test_it_is_that_of_the_function_that_would_be_made() -> None:
    w = device_shared(np.ones((3, 4), "float32"), "w")
    last = device_shared(np.zeros(4, "float32"), "last")
    x = pt.tensor("x", shape=(5, 3), dtype="float32")
    given = pt.tensor("given", shape=(4,), dtype="float32")
    y = pt.exp(x @ w) + given
    updates = [(w, w - x.T @ y), (last, y.sum(axis=0))]
    mode = device_mode("cpu", on_gradient_ready=lambda name: None, buckets=[["last"], ["w"]])
    planned = plan_function([x], updates, mode, {given: last}, "a function")
    made = pytensor.function([x], [], updates=updates, givens={given: last}, mode=mode)
    nodes = made.vm.program.nodes.values()
    assert [str(node.op) for node in planned.order] == [str(node.op) for node in nodes]
    ready = [[v.name for v in cut.ready] for cut in planned.cuts.values()]
    assert ready == [["last"]]  # the other at the end
    np.testing.assert_array_equal(w.get_value(), np.ones((3, 4)))
