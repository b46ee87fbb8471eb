"""Spans of single Ops."""

from pathlib import Path

import numpy as np
import pytensor
import pytensor.tensor as pt

from tandem.backend import device_mode
from tandem.trace.recorder import Recorder
from tandem.training.op_tracing import OpObserver
from tests.support.traces import spans_in


def test_a_region_is_a_span_with_its_ops_and_their_work(tmp_path: Path) -> None:
    path = tmp_path / "trace-0.json"
    recorder = Recorder("trainer 0", 0, path, (0, 1), {})
    observer = OpObserver(recorder)
    x = pt.vector("x", shape=(10,), dtype="float64")
    mode = device_mode("cpu", regions=True, observe=observer)
    function = pytensor.function([x], pt.sum(pt.sin(pt.exp(x)) * x), mode=mode)
    observer.describe(function)
    recorder.begin_step()
    function(np.ones(10))
    recorder.close()
    (span,) = spans_in(path)
    assert span.name == "Region (Exp, Sin, Mul, +1)"
    assert span.args["ops"] == ["Exp", "Sin", "Mul", "Sum"]
    assert (span.args["flops"], span.args["kind"]) == (4 * 10, "elementwise")
