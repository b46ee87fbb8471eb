"""Update rules for data-parallel training, each in two halves with an all-reduce between them.

Each rule takes a loss and its parameters and returns `(grad_updates, param_updates, grad_shared)`:
the updates of a function that computes gradients from rows, the updates of a function without
inputs that steps the parameters, and the shared variable to all-reduce after the first and before
the second. All gradients lie in that one flat vector and are computed where they lie, so that an
exchange is one operation.

Parameters are shared variables of PyTensor or residents of the pool; the state of a rule is of the
same sort as its parameter. Rates and the like are numbers, or scalar variables, shared ones too.
Call the rules after `fork`. Formulas are those of `tandem.optim`, forms and defaults those of the
update rules of Lasagne.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.tensor.sharedvar import TensorSharedVariable as Shared

import tandem.parallel as synk
from tandem.optim import SGD, Optimizer
from tandem.optim.adadelta import Adadelta
from tandem.optim.adagrad import Adagrad
from tandem.optim.adam import Adam
from tandem.optim.adamax import Adamax
from tandem.optim.optimizer import in_dtype
from tandem.optim.rmsprop import RMSProp

__all__ = [
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "apply_momentum",
    "apply_nesterov_momentum",
    "flat_unflat_grads",
    "momentum",
    "nesterov_momentum",
    "rmsprop",
    "sgd",
    "sgd_nonflat",
]

Updates = list[tuple[Shared, Variable]]  # variables and their new values
Rule = tuple[Updates, Updates, Any]  # grad_updates, param_updates, grad_shared


def sgd(
    loss: Variable, params: Sequence[Shared], learning_rate: Any = None, *, lr: Any = None
) -> Rule:
    """Stochastic gradient descent: ``p <- p - lr g``.

    Parameters
    ----------
    loss : float scalar
        An average over rows.
    params : sequence of shared variables
        p, of any shapes.
    learning_rate : float or scalar variable
        lr, by which name it may be given too.

    Returns
    -------
    grad_updates, param_updates : list of (variable, new value)
        For the function that reads rows, and for the one that steps.
    grad_shared : DeviceSharedVariable
        Float (n,), all gradients with the padding of `FlatLayout`; for `all_reduce`.

    Raises
    ------
    TypeError
        A parameter is no shared variable of floats, or there is no rate.
    ValueError
        There are no parameters.
    """
    return _flat(loss, params, None, _rate(learning_rate, lr))


def momentum(
    loss: Variable,
    params: Sequence[Shared],
    learning_rate: Any = None,
    momentum: Any = 0.9,
    *,
    lr: Any = None,
) -> Rule:
    """Stochastic gradient descent with momentum, see `tandem.ops.momentum_step`.

    Parameters, results and errors are those of `sgd`; `momentum` is m.
    """
    return _flat(loss, params, SGD(0.0, momentum=momentum), _rate(learning_rate, lr))


def nesterov_momentum(
    loss: Variable,
    params: Sequence[Shared],
    learning_rate: Any = None,
    momentum: Any = 0.9,
    *,
    lr: Any = None,
) -> Rule:
    """Nesterov's momentum, see `tandem.ops.momentum_step`.

    Parameters, results and errors are those of `sgd`; `momentum` is m.
    """
    rule = SGD(0.0, momentum=momentum, use_nesterov_momentum=True)
    return _flat(loss, params, rule, _rate(learning_rate, lr))


def adagrad(
    loss: Variable,
    params: Sequence[Shared],
    learning_rate: Any = 1.0,
    epsilon: Any = 1e-6,
    *,
    lr: Any = None,
) -> Rule:
    """Adagrad, see `tandem.optim.adagrad.Adagrad`. Parameters and results are those of `sgd`."""
    return _flat(loss, params, Adagrad(0.0, epsilon), _rate(learning_rate, lr))


def rmsprop(
    loss: Variable,
    params: Sequence[Shared],
    learning_rate: Any = 1.0,
    rho: Any = 0.9,
    epsilon: Any = 1e-6,
    *,
    lr: Any = None,
) -> Rule:
    """RMSProp, epsilon inside the root, see `tandem.optim.rmsprop.RMSProp`.

    Parameters and results are those of `sgd`.
    """
    return _flat(loss, params, RMSProp(0.0, rho, epsilon, True), _rate(learning_rate, lr))


def adadelta(
    loss: Variable,
    params: Sequence[Shared],
    learning_rate: Any = 1.0,
    rho: Any = 0.95,
    epsilon: Any = 1e-6,
    *,
    lr: Any = None,
) -> Rule:
    """Adadelta, see `tandem.optim.adadelta.Adadelta`. Parameters and results are those of `sgd`."""
    return _flat(loss, params, Adadelta(0.0, rho, epsilon), _rate(learning_rate, lr))


def adam(
    loss: Variable,
    params: Sequence[Shared],
    learning_rate: Any = 0.001,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    epsilon: Any = 1e-8,
    *,
    lr: Any = None,
) -> Rule:
    """Adam with "epsilon hat", see `tandem.ops.adam_step`. Parameters and results are `sgd`'s."""
    return _flat(loss, params, Adam(0.0, beta1, beta2, epsilon, True), _rate(learning_rate, lr))


def adamax(
    loss: Variable,
    params: Sequence[Shared],
    learning_rate: Any = 0.002,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    epsilon: Any = 1e-8,
    *,
    lr: Any = None,
) -> Rule:
    """Adamax, see `tandem.optim.adamax.Adamax`. Parameters and results are those of `sgd`."""
    return _flat(loss, params, Adamax(0.0, beta1, beta2, epsilon), _rate(learning_rate, lr))


def sgd_nonflat(
    loss: Variable, params: Sequence[Shared], learning_rate: Any = None, *, lr: Any = None
) -> Rule:
    """Stochastic gradient descent, each gradient in a variable of its own.

    To measure what the flat vector is worth: `grad_shared` is a list, and an all-reduce of it as
    many operations. Parameters and errors are those of `sgd`.
    """
    gradients, rate = _gradients(loss, params), _rate(learning_rate, lr)
    stored = [_state(p, "gradient") for p in params]
    grad_updates = [(s, _fitted(g, s)) for s, g in zip(stored, gradients, strict=True)]
    param_updates = [
        (p, _fitted(p - in_dtype(rate, p.dtype) * s, p))
        for p, s in zip(params, stored, strict=True)
    ]
    return grad_updates, param_updates, stored


def flat_unflat_grads(
    loss: Variable, params: Sequence[Shared]
) -> tuple[Any, Variable, list[Variable]]:
    """Gradients as one vector, for update rules of your own.

    Returns
    -------
    grad_shared : shared variable
        Float (n,), of zeros, resident if the parameters are; for `all_reduce`.
    flat_grad : variable
        The new value of `grad_shared`.
    unflat_grads : list of variable
        The parts of `grad_shared`, in the shapes of the parameters.
    """
    gradients = _gradients(loss, params)
    shapes = [p.get_value(borrow=True).shape for p in params]
    ends = [*itertools.accumulate(map(math.prod, shapes), initial=0)]
    dtype = np.result_type(*(p.dtype for p in params))
    zeros = np.zeros(ends[-1], dtype)
    stored = (
        synk.shared(zeros, "gradients")
        if _is_resident(params[0])
        else pytensor.shared(zeros, "gradients")
    )
    flat = _fitted(pt.concatenate([pt.flatten(g) for g in gradients]), stored)
    places = zip(params, shapes, itertools.pairwise(ends), strict=True)
    return stored, flat, [stored[a:b].reshape(s).astype(p.dtype) for p, s, (a, b) in places]


def apply_momentum(param_updates: Updates, momentum: Any = 0.9) -> Updates:
    """Updates with momentum of those of a rule: ``v <- m v + step``, ``p <- p + v``."""
    return _with_velocity(param_updates, momentum, False)


def apply_nesterov_momentum(param_updates: Updates, momentum: Any = 0.9) -> Updates:
    """As `apply_momentum`, but ``p <- p + m v + step``, with the new v."""
    return _with_velocity(param_updates, momentum, True)


def _with_velocity(param_updates: Updates, momentum: Any, nesterov: bool) -> Updates:
    updates: Updates = []
    for p, new in param_updates:
        v, m = _state(p, "velocity"), in_dtype(momentum, p.dtype)
        after = m * v + (new - p)
        stepped = m * after + new if nesterov else p + after
        updates += [(old, _fitted(value, old)) for old, value in ((v, after), (p, stepped))]
    return updates


def _flat(
    loss: Variable,
    params: Sequence[Shared],
    rule: Optimizer | None,  # None: plain steps
    rate: Any,
) -> Rule:
    """Return the two halves of a rule, with the gradients in one flat vector between them."""
    gradients = _gradients(loss, params)
    shapes = {f"gradient {i}": p.get_value(borrow=True).shape for i, p in enumerate(params)}
    dtype = np.result_type(*(p.dtype for p in params)).name
    flat = synk.flat(shapes, dtype, "gradients")
    views: list[Any] = [flat.views[name] for name in shapes]
    param_updates: Updates = []
    numbers: dict[str, Any] = {}
    if rule is not None and rule.numbers(0):
        steps = _like(params[0], np.array(0, np.int64), "steps")
        param_updates.append((steps, steps + 1))
        numbers = rule.numbers(steps.astype("float64"))
    for p, view in zip(params, views, strict=True):
        own = {name: in_dtype(number, p.dtype) for name, number in numbers.items()}
        states = [] if rule is None else [_state(p, name.replace("_", " ")) for name in rule.states]
        if rule is None:
            new, after = p - in_dtype(rate, p.dtype) * view, ()
        else:
            new, after = rule.step(p, states, view, pt.as_tensor(in_dtype(rate, p.dtype)), 0.0, own)
        stepped = [*zip(states, after, strict=True), (p, new)]
        param_updates += [(old, _fitted(new, old)) for old, new in stepped]
    grad_updates = [(view, _fitted(g, view)) for view, g in zip(views, gradients, strict=True)]
    return grad_updates, param_updates, flat.vector


def _rate(learning_rate: Any, lr: Any) -> Any:
    """The rate, which may be given by one name or the other."""
    rate = learning_rate if lr is None else lr
    if rate is None:
        raise TypeError("learning_rate is missing")
    return rate


def _gradients(loss: Variable, params: Sequence[Shared]) -> list[Variable]:
    if not params:
        raise ValueError("there are no parameters to update")
    for number, p in enumerate(params):
        if not isinstance(p, Shared) or np.dtype(p.dtype).kind != "f":
            raise TypeError(f"parameter {number} is {p} ({p.type}), no shared variable of floats")
    gradients: Any = pytensor.grad(loss, list(params))
    return list(gradients)


def _state(p: Shared, kind: str) -> Any:
    """Return zeros in the shape of a parameter, resident if it is."""
    return _like(p, np.zeros_like(p.get_value(borrow=True)), f"{kind} of {p.name or 'a parameter'}")


def _like(p: Shared, value: np.ndarray, name: str) -> Any:
    """Return a shared variable of the sort of a parameter: resident, or of PyTensor."""
    if _is_resident(p):
        return synk.shared(value, name)
    return pytensor.shared(value, name=name, shape=p.type.shape if value.ndim else ())


def _is_resident(p: Shared) -> bool:
    from tandem.backend.shared import DeviceSharedVariable

    return isinstance(p, DeviceSharedVariable)


def _fitted(new: Variable, old: Shared) -> Variable:
    """Return a new value with the dtype and the fixed shape of the variable that takes it."""
    if new.type.dtype != old.type.dtype:
        new = pt.cast(new, old.type.dtype)
    return new if old.type.is_super(new.type) else pt.specify_shape(new, old.type.shape)
