"""Adam and AdamW."""

from dataclasses import dataclass
from typing import Any, ClassVar

from tandem.optim.optimizer import OPTIMIZERS, Numbers, Optimizer, Stepped, in_dtype
from tandem.registry import setting

MOMENTS = ("first_moment", "second_moment")
_BETA = "a number of at least 0 and below 1"


@dataclass(frozen=True)
class Moments(Optimizer):
    """Base of optimizers with running means of the gradient and of its square."""

    @property
    def states(self) -> tuple[str, ...]:
        return MOMENTS

    adam_beta1: float = setting(
        0.9,
        "adam, adamw, adamax, nadam: fraction of the mean gradient kept in a step",
        _BETA,
        omit_default=True,
        ge=0,
        lt=1,
    )
    adam_beta2: float = setting(
        0.999,
        "adam, adamw, adamax, nadam: fraction of the mean square kept in a step",
        _BETA,
        omit_default=True,
        ge=0,
        lt=1,
    )
    adam_epsilon: float = setting(
        1e-8,
        "adam, adamw, adamax, nadam: added to the root of the mean square",
        "a number above 0",
        omit_default=True,
        gt=0,
    )
    adam_epsilon_hat: bool = setting(
        False,
        "adam, adamw, nadam: adam_epsilon is added before the bias correction",
        "true or false",
        omit_default=True,
    )

    def epsilon(self, root: Any) -> Any:
        """Return what is added to the root of the mean square before its bias is corrected.

        `root` is that of the correction, ``sqrt(1 - b2**t)``. With `adam_epsilon_hat` it is the
        "epsilon hat" of Kingma and Ba 2015, arXiv 1412.6980, end of section 2.
        """
        return self.adam_epsilon if self.adam_epsilon_hat else root * self.adam_epsilon


@OPTIMIZERS.register("adam")
@dataclass(frozen=True)
class Adam(Moments):
    """Adam, with the weight decay in the gradient; `tandem.ops.adam_step` has the equations.

    With `adam_amsgrad` the mean square is the largest so far (Reddi, Kale and Kumar 2018, "On the
    convergence of Adam and beyond", algorithm 2).
    """

    is_decoupled: ClassVar[bool] = False  # weight decay

    adam_amsgrad: bool = setting(
        False,
        "adam, adamw: the mean square of a step is the largest so far",
        "true or false",
        omit_default=True,
    )

    @property
    def states(self) -> tuple[str, ...]:
        return (*MOMENTS, *["largest_second_moment"] * self.adam_amsgrad)

    def numbers(self, updates: Any) -> dict[str, Any]:
        root = (1 - self.adam_beta2 ** (updates + 1)) ** 0.5
        factor = root / (1 - self.adam_beta1 ** (updates + 1))
        return {"rate_factor": factor, "epsilon": self.epsilon(root)}

    def step(
        self, weight: Any, states: Any, gradient: Any, rate: Any, decay: float, numbers: Numbers
    ) -> Stepped:
        import pytensor.tensor as pt

        from tandem.ops import adam_step

        first, second, *largest = states
        stepped, first, second = adam_step(
            weight,
            (first, second),
            gradient,
            rate,
            numbers["rate_factor"],
            numbers["epsilon"],
            betas=(self.adam_beta1, self.adam_beta2),
            decay=decay,
            is_decoupled=self.is_decoupled,
        )
        if not largest:
            return stepped, (first, second)
        most = pt.maximum(largest[0], second)
        if self.is_decoupled:
            weight = weight - rate * in_dtype(decay, weight.dtype) * weight
        step = rate * numbers["rate_factor"] * first / (pt.sqrt(most) + numbers["epsilon"])
        return weight - step, (first, second, most)


@OPTIMIZERS.register("adamw")
@dataclass(frozen=True)
class AdamW(Adam):
    """Adam, with the weight decay beside the step and not in the gradient."""

    is_decoupled = True
