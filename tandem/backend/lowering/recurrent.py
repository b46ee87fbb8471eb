"""The steps of recurrent layers: a few kernels for each, and all else over all steps at once.

Beside them the loss of sequences.
"""

from collections.abc import Callable

import torch
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op

from tandem.backend.lowering.registry import Lowering, computed, lower, on_a_copy
from tandem.ops.ctc import CTC, wrong_label
from tandem.ops.recurrent import GRUSteps, GRUStepsGrad, LSTMSteps, LSTMStepsGrad

Tensor = torch.Tensor
aten = torch.ops.aten


def _before(first: Tensor, states: Tensor) -> Tensor:
    """Return the state before each step."""
    return torch.cat([first[None], states[:-1]])


def _divided(gates: Tensor, units: int) -> tuple[Tensor, ...]:
    return torch.split(gates, units, dim=2)


def lstm_steps(z: Tensor, weight: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    units = len(weight)
    gates = torch.empty_like(z, memory_format=torch.contiguous_format)
    all_h, all_c = (z.new_empty((*z.shape[:2], units)) for _ in range(2))
    i_and_f = gates[:, :, : 2 * units]
    parts = (z, gates, i_and_f, *_divided(gates, units), all_h, all_c)
    for given, all_gates, both, i, f, g, o, next_h, next_c in zip(
        *(part.unbind() for part in parts), strict=True
    ):
        torch.addmm(given, h, weight, out=all_gates)
        both.sigmoid_()
        g.tanh_()
        o.sigmoid_()
        torch.mul(f, c, out=next_c).addcmul_(i, g)
        torch.tanh(next_c, out=next_h).mul_(o)
        h, c = next_h, next_c
    return all_h, all_c, gates


def lstm_steps_grad(
    gates: Tensor, weight: Tensor, c0: Tensor, c: Tensor, g_h: Tensor, g_c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    units = len(weight)
    i, f, g, o = _divided(gates, units)
    reached = c.tanh()
    # By what the gradients of h and c are multiplied in each step.
    of_c = o * (1 - reached * reached)
    factors = torch.empty_like(gates, memory_format=torch.contiguous_format)
    of_i, of_f, of_g, of_o = _divided(factors, units)
    torch.mul(g * i, 1 - i, out=of_i)
    torch.mul(_before(c0, c) * f, 1 - f, out=of_f)
    torch.mul(i, 1 - g * g, out=of_g)
    torch.mul(reached * o, 1 - o, out=of_o)
    g_z = factors  # in place: a step's factors are read once
    three = g_z[:, :, : 3 * units].unflatten(2, (3, units))
    dh, dc, transposed = torch.zeros_like(c0), torch.zeros_like(c0), weight.T
    steps = [part.unbind() for part in (g_z, three, of_o, of_c, f, g_h, g_c)]
    for z, by_c, by_h, through, forget, own_h, own_c in reversed([*zip(*steps, strict=True)]):
        dh = dh + own_h
        dc.add_(own_c).addcmul_(dh, through)
        by_c.mul_(dc[:, None])
        by_h.mul_(dh)
        dh = z.mm(transposed)
        dc.mul_(forget)
    return g_z, dh, dc


def gru_steps(z: Tensor, weight: Tensor, bias: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    units = len(weight)
    gates = torch.empty_like(z, memory_format=torch.contiguous_format)
    all_h, inner = (z.new_empty((*z.shape[:2], units)) for _ in range(2))
    split = 2 * units
    parts = (z[:, :, :split], z[:, :, split:], gates[:, :, :split], *_divided(gates, units))
    for z_both, z_n, both, u, r, n, own, next_h in zip(
        *(part.unbind() for part in (*parts, inner, all_h)), strict=True
    ):
        state = torch.addmm(bias, h, weight)
        torch.add(z_both, state[:, :split], out=both).sigmoid_()
        own.copy_(state[:, split:])
        torch.addcmul(z_n, r, own, out=n).tanh_()
        h = torch.lerp(n, h, u, out=next_h)
    return all_h, gates, inner


def gru_steps_grad(
    gates: Tensor, weight: Tensor, inner: Tensor, h0: Tensor, h: Tensor, g_h: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    units = len(weight)
    u, r, n = _divided(gates, units)
    of_u = (_before(h0, h) - n) * u * (1 - u)
    of_n = (1 - u) * (1 - n * n)
    of_r = inner * r * (1 - r)
    g_z, g_s = (torch.empty_like(gates, memory_format=torch.contiguous_format) for _ in range(2))
    dh, transposed = torch.zeros_like(h0), weight.T
    parts = (of_u, of_r, of_n, u, r, g_h, g_s, *_divided(g_z, units), *_divided(g_s, units))
    steps = [*zip(*(part.unbind() for part in parts), strict=True)]
    for by_u, by_r, by_n, kept, reset, own, s, du, dr, dn, su, sr, sn in reversed(steps):
        dh = dh + own
        torch.mul(dh, by_u, out=du)
        torch.mul(dh, by_n, out=dn)
        torch.mul(dn, by_r, out=dr)
        su.copy_(du)
        sr.copy_(dr)
        torch.mul(dn, reset, out=sn)
        dh = torch.addmm(dh * kept, s, transposed)
    return g_z, g_s, dh


_CALLS: dict[type[Op], Callable[..., tuple[Tensor, ...]]] = {
    LSTMSteps: lstm_steps,
    LSTMStepsGrad: lstm_steps_grad,
    GRUSteps: gru_steps,
    GRUStepsGrad: gru_steps_grad,
}


@lower.register(LSTMSteps)
@lower.register(LSTMStepsGrad)
@lower.register(GRUSteps)
@lower.register(GRUStepsGrad)
def lower_steps(op: Op, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    call = _CALLS[type(op)]
    if device.type != "cpu" or compiled or node.outputs[0].type.dtype != "float32":
        return computed(call)
    from tandem.backend import recurrent_loops  # imports numba

    loop = getattr(recurrent_loops, call.__name__)
    if isinstance(op, LSTMSteps | GRUSteps):
        return computed(on_a_copy(loop), reuse={0: loop})
    return computed(loop)


@lower.register(CTC)
def lower_ctc(op: CTC, node: Apply, device: torch.device, compiled: bool) -> Lowering:
    def call(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if not len(logits):  # which PyTorch refuses
            return logits.new_empty(0), torch.empty_like(logits)
        if labels.numel() and not 0 <= labels.min() <= labels.max() < logits.shape[2]:
            raise IndexError(wrong_label(logits.shape[2]))  # PyTorch's kernels don't check them
        logs = logits.transpose(0, 1).log_softmax(dim=2)
        counts = labels.count_nonzero(dim=1)
        steps = torch.full_like(counts, len(logs))
        loss, ways = aten._ctc_loss(logs, labels, steps, counts, 0, False)
        ones = torch.ones_like(loss)
        gradient = aten._ctc_loss_backward(
            ones, logs, labels, steps, counts, loss, ways, 0, zero_infinity=False
        )
        return loss, gradient.transpose(0, 1)

    return Lowering(call, opaque=True, computes=True)
