"""A layer of one's own for tandem.nn: in a module, which the processes of a run can import.

model.add(Swish()), and nn.load_model(path, layers=[Swish])
"""

from dataclasses import dataclass

from pytensor.tensor.variable import TensorVariable

from tandem.layers import Parameter, sigmoid
from tandem.nn.layers import BuildContext, Layer, Shape


@dataclass(frozen=True, eq=False)
class Swish(Layer):
    """``x sigmoid(b x)``, with a number b that is learnt.

    Ramachandran, Zoph, Le 2017, "Searching for activation functions", arXiv 1710.05941.
    """

    initial: float = 1.0

    def shape(self, *inputs: Shape) -> Shape:
        return self.single(inputs)

    def declare(self, name: str, *inputs: Shape) -> tuple[Parameter, ...]:
        return (Parameter(f"{name}.scale", (1,), "scale", self.initial),)

    def build(self, context: BuildContext, *inputs: TensorVariable) -> TensorVariable:
        (x,) = inputs
        return x * sigmoid(context.parameter("scale")[0] * x)
