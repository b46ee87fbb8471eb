"""Steps of optimizers on PyTorch's kernels."""

import math

import torch
from pytensor.graph.basic import Apply

from tandem.backend.lowering.registry import Lowering, computed, lower
from tandem.ops.adam import AdamStep
from tandem.ops.momentum import MomentumStep

Tensor = torch.Tensor
aten = torch.ops.aten


@lower.register(MomentumStep)
def lower_momentum_step(
    op: MomentumStep, node: Apply, device: torch.device, compiled: bool
) -> Lowering:
    m, decay, nesterov = op.momentum, op.decay, op.nesterov

    def step(w: Tensor, v: Tensor, g: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
        change = rate * (g + decay * w if decay else g)
        v = m * v - change
        return (w + (m * v - change) if nesterov else w + v), v

    def into(
        new_w: Tensor, new_v: Tensor, w: Tensor, v: Tensor, g: Tensor, rate: Tensor
    ) -> tuple[Tensor, Tensor]:
        if not (new_w is w and new_v is v and m and not nesterov and _fusible(w, v, rate)):
            found = step(w, v, g, rate)
            return new_w.copy_(found[0]), new_v.copy_(found[1])
        # One pass over memory. PyTorch's kernel computes v <- m v + (1 - dampening) (g + decay w)
        # and w <- w - lr v; ours has the rate in v. It assumes that all three are laid out alike.
        if g.stride() != w.stride():
            g = torch.empty_like(w).copy_(g)
        aten._fused_sgd_(
            [w],
            [g],
            [v],
            weight_decay=decay,
            momentum=m,
            lr=-1.0,
            dampening=1 + rate.item(),
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
        return w, v

    return computed(step, into=None if device.type != "cpu" else into, in_place=True)


def _fusible(w: Tensor, v: Tensor, rate: Tensor) -> bool:
    """Test if PyTorch's kernel for a step may be used: it takes 1 + rate, and whole memory."""
    number = rate.item()
    # Below 2**-29, 1 + rate has lost bits of a float32 rate.
    return w.stride() == v.stride() and (1 + number) - 1 == number and _is_dense(w)


def _is_dense(x: Tensor) -> bool:
    """Return whether the elements fill their memory, in any order of axes, without gaps or
    overlaps.
    """
    length = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1 and stride != length:
            return False
        length *= size
    return True


@lower.register(AdamStep)
def lower_adam_step(op: AdamStep, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    beta1, beta2, decay = op.beta1, op.beta2, op.decay
    fused = aten._fused_adamw_ if op.is_decoupled else aten._fused_adam_

    def step(
        w: Tensor, m: Tensor, v: Tensor, g: Tensor, rate: Tensor, factor: Tensor, epsilon: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if decay and op.is_decoupled:
            w = w - (rate * decay) * w
        elif decay:
            g = g + decay * w
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        return w - (rate * factor) * m / (v.sqrt() + epsilon), m, v

    def into(
        new_w: Tensor,
        new_m: Tensor,
        new_v: Tensor,
        w: Tensor,
        m: Tensor,
        v: Tensor,
        g: Tensor,
        *numbers: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rate, factor, epsilon = (number.item() for number in numbers)
        alike = w.stride() == m.stride() == v.stride() and _is_dense(w)
        if not (new_w is w and new_m is m and new_v is v and alike and factor > 0):
            found = step(w, m, v, g, *numbers)
            pairs = zip((new_w, new_m, new_v), found, strict=True)
            new_w, new_m, new_v = (new.copy_(value) for new, value in pairs)
            return new_w, new_m, new_v
        # One pass over memory. PyTorch's kernel corrects biases by the number of the step: none is
        # left after infinitely many, and the corrections that we were given take their place.
        if g.stride() != w.stride():
            g = torch.empty_like(w).copy_(g)
        fused(
            [w],
            [g],
            [m],
            [v],
            [],
            [torch.tensor(math.inf)],
            lr=rate * factor,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay / factor if op.is_decoupled else decay,
            eps=epsilon,
            amsgrad=False,
            maximize=False,
        )
        return w, m, v

    return computed(step, into=None if device.type != "cpu" else into, in_place=True)
