"""A network with an Op of which no rule says how it is divided."""

from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.tensor.variable import TensorVariable

from tandem.layers import Builder, LayeredNetwork, global_average_pool


class Unruled(Op):
    """The identity."""

    __props__ = ()

    def make_node(self, *inputs: Any) -> Apply:
        (x,) = inputs
        return Apply(self, [pt.as_tensor_variable(x)], [x.type()])

    def perform(self, node: Apply, inputs: Any, output_storage: Any) -> None:
        output_storage[0][0] = inputs[0].copy()

    def pullback(self, inputs: Any, outputs: Any, cotangents: Any) -> list[Any]:
        return [cotangents[0]]


class UnruledNetwork(LayeredNetwork):
    """The Op stands between two fully connected layers."""

    def build(self, net: Builder, x: TensorVariable) -> TensorVariable:
        x = global_average_pool(net.convolution("conv", x, 8, 3, bias=0.0))
        hidden: Any = Unruled()(net.fully_connected("fc1", x, 16))
        return net.fully_connected("fc2", hidden, self.classes)
