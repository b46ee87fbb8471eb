"""Graphs of PyTensor as ONNX, run by onnxruntime."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, checker, helper

from tandem.export.graph import OPSET, OnnxGraph
from tests.support.lazily import Lazily

onnxruntime = Lazily("onnxruntime")


def translated(x: Any, y: Any) -> tuple[OnnxGraph, str]:
    """The ONNX nodes from x to y, and the name of y."""
    graph = OnnxGraph()
    graph.bind(x, "x")
    return graph, graph.translate(y)


def by_onnxruntime(inputs: Sequence[Any], y: Any, values: Sequence[np.ndarray]) -> np.ndarray:
    """The value of y, float32, for values of inputs."""
    graph = OnnxGraph()
    names = [f"x{number}" for number in range(len(inputs))]
    for variable, name in zip(inputs, names, strict=True):
        graph.bind(variable, name)
    graph.add("Identity", [graph.translate(y)], "y")
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", *variable.type.shape[1:]])
        for name, variable in zip([*names, "y"], [*inputs, y], strict=True)
    ]
    model = helper.make_model(
        helper.make_graph(graph.nodes, "test", infos[:-1], infos[-1:], graph.constants),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=8,
    )
    checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, dict(zip(names, values, strict=True)))[0]
