"""Update rules for data-parallel training, each in two halves with an all-reduce between them.

Each rule takes a loss and its parameters and returns `(grad_updates, param_updates, grad_shared)`:
the updates of a function that computes gradients from rows, the updates of a function without
inputs that steps the parameters, and the shared variable to all-reduce after the first and before
the second. All gradients lie in that one flat vector and are computed where they lie, so that an
exchange is one operation.

Parameters are shared variables of PyTensor or residents of the pool; the state of a rule is of the
same sort as its parameter. Rates and the like are numbers, or scalar variables, shared ones too.
Call the rules after `fork`. Formulas and defaults are those of the update rules of Lasagne.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.tensor.sharedvar import TensorSharedVariable as Shared

import tandem.parallel as synk

__all__ = [
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "momentum",
    "nesterov_momentum",
    "rmsprop",
    "sgd",
    "sgd_nonflat",
]

Updates = list[tuple[Shared, Variable]]  # variables and their new values
Rule = tuple[Updates, Updates, Any]  # grad_updates, param_updates, grad_shared
# From a parameter, its gradient, and a conversion of numbers to the parameter's dtype:
Step = Callable[[Shared, Variable, Callable[[Any], Any]], Updates]

_NONE = "there are no parameters to update"


def sgd(loss: Variable, params: Sequence[Shared], lr: Any) -> Rule:
    """Stochastic gradient descent: ``p <- p - lr g``.

    Parameters
    ----------
    loss : float scalar
        An average over rows.
    params : sequence of shared variables
        p, of any shapes.
    lr : float or scalar variable
        Learning rate.

    Returns
    -------
    grad_updates, param_updates : list of (variable, new value)
        For the function that reads rows, and for the one that steps.
    grad_shared : DeviceSharedVariable
        Float (n,), all gradients with the padding of `FlatLayout`; for `all_reduce`.

    Raises
    ------
    TypeError
        A parameter is no shared variable of floats.
    ValueError
        There are no parameters.
    """
    return _flat(loss, params, lambda p, g, number: [(p, p - number(lr) * g)])


def momentum(loss: Variable, params: Sequence[Shared], lr: Any, momentum: Any = 0.9) -> Rule:
    """Stochastic gradient descent with momentum: ``v <- m v - lr g``, ``p <- p + v``.

    Polyak 1964, "Some methods of speeding up the convergence of iteration methods". Parameters,
    results and errors are those of `sgd`; `momentum` is m.
    """

    def step(p: Shared, g: Variable, number: Callable[[Any], Any]) -> Updates:
        v = _state(p, "velocity")
        new = number(momentum) * v - number(lr) * g
        return [(v, new), (p, p + new)]

    return _flat(loss, params, step)


def nesterov_momentum(
    loss: Variable, params: Sequence[Shared], lr: Any, momentum: Any = 0.9
) -> Rule:
    """Nesterov's momentum: ``v <- m v - lr g``, ``p <- p + m v - lr g``.

    Nesterov 1983, in the form of Sutskever, Martens, Dahl and Hinton 2013, "On the importance of
    initialization and momentum in deep learning", with the gradient at the shifted parameters.
    Parameters, results and errors are those of `sgd`; `momentum` is m.
    """

    def step(p: Shared, g: Variable, number: Callable[[Any], Any]) -> Updates:
        v = _state(p, "velocity")
        new = number(momentum) * v - number(lr) * g
        return [(v, new), (p, p + number(momentum) * new - number(lr) * g)]

    return _flat(loss, params, step)


def adagrad(loss: Variable, params: Sequence[Shared], lr: Any = 1.0, epsilon: Any = 1e-6) -> Rule:
    """Adagrad: ``s <- s + g**2``, ``p <- p - lr g / sqrt(s + epsilon)``.

    Duchi, Hazan and Singer 2011, "Adaptive subgradient methods for online learning and stochastic
    optimization". Parameters, results and errors are those of `sgd`.
    """

    def step(p: Shared, g: Variable, number: Callable[[Any], Any]) -> Updates:
        s = _state(p, "sum of squares")
        new = s + pt.sqr(g)
        return [(s, new), (p, p - number(lr) * g / pt.sqrt(new + number(epsilon)))]

    return _flat(loss, params, step)


def rmsprop(
    loss: Variable,
    params: Sequence[Shared],
    lr: Any = 1.0,
    rho: Any = 0.9,
    epsilon: Any = 1e-6,
) -> Rule:
    """RMSProp: ``s <- rho s + (1 - rho) g**2``, ``p <- p - lr g / sqrt(s + epsilon)``.

    Tieleman and Hinton 2012, lecture 6.5 of "Neural networks for machine learning". Parameters,
    results and errors are those of `sgd`.
    """

    def step(p: Shared, g: Variable, number: Callable[[Any], Any]) -> Updates:
        s = _state(p, "mean square")
        new = number(rho) * s + number(1 - rho) * pt.sqr(g)
        return [(s, new), (p, p - number(lr) * g / pt.sqrt(new + number(epsilon)))]

    return _flat(loss, params, step)


def adadelta(
    loss: Variable,
    params: Sequence[Shared],
    lr: Any = 1.0,
    rho: Any = 0.95,
    epsilon: Any = 1e-6,
) -> Rule:
    """Adadelta: steps in the ratio of the mean squares of former steps and of gradients.

    ``s <- rho s + (1 - rho) g**2``, ``u = g sqrt(d + epsilon) / sqrt(s + epsilon)``,
    ``d <- rho d + (1 - rho) u**2``, ``p <- p - lr u``. Zeiler 2012, "ADADELTA: an adaptive learning
    rate method", arXiv 1212.5701, algorithm 1. Parameters, results and errors are those of `sgd`.
    """

    def step(p: Shared, g: Variable, number: Callable[[Any], Any]) -> Updates:
        s, d = _state(p, "mean square"), _state(p, "mean squared step")
        kept, rest, small = number(rho), number(1 - rho), number(epsilon)
        new = kept * s + rest * pt.sqr(g)
        u = g * pt.sqrt(d + small) / pt.sqrt(new + small)
        return [(s, new), (d, kept * d + rest * pt.sqr(u)), (p, p - number(lr) * u)]

    return _flat(loss, params, step)


def adam(
    loss: Variable,
    params: Sequence[Shared],
    lr: Any = 0.001,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    epsilon: Any = 1e-8,
) -> Rule:
    """Adam: steps by the mean gradient over the root of the mean square.

    With step t from 1: ``m <- b1 m + (1 - b1) g``, ``v <- b2 v + (1 - b2) g**2``,
    ``a = lr sqrt(1 - b2**t) / (1 - b1**t)``, ``p <- p - a m / (sqrt(v) + epsilon)``. Kingma and Ba
    2015, arXiv 1412.6980, in the form at the end of section 2. Parameters, results and errors are
    those of `sgd`.
    """
    counts, t = _steps(params)
    rate = lr * pt.sqrt(1 - beta2**t) / (1 - beta1**t)

    def step(p: Shared, g: Variable, number: Callable[[Any], Any]) -> Updates:
        m, v = _state(p, "first moment"), _state(p, "second moment")
        first = number(beta1) * m + number(1 - beta1) * g
        second = number(beta2) * v + number(1 - beta2) * pt.sqr(g)
        new = p - number(rate) * first / (pt.sqrt(second) + number(epsilon))
        return [(m, first), (v, second), (p, new)]

    return _flat(loss, params, step, counts)


def adamax(
    loss: Variable,
    params: Sequence[Shared],
    lr: Any = 0.002,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    epsilon: Any = 1e-8,
) -> Rule:
    """Adamax: Adam with the infinity norm of the gradients in place of their mean square.

    With step t from 1: ``m <- b1 m + (1 - b1) g``, ``u <- max(b2 u, abs(g))``,
    ``p <- p - lr / (1 - b1**t) m / (u + epsilon)``. Kingma and Ba 2015, arXiv 1412.6980, section
    7.1. Parameters, results and errors are those of `sgd`.
    """
    counts, t = _steps(params)
    rate = lr / (1 - beta1**t)

    def step(p: Shared, g: Variable, number: Callable[[Any], Any]) -> Updates:
        m, u = _state(p, "first moment"), _state(p, "infinity norm")
        first = number(beta1) * m + number(1 - beta1) * g
        norm = pt.maximum(number(beta2) * u, pt.abs(g))
        new = p - number(rate) * first / (norm + number(epsilon))
        return [(m, first), (u, norm), (p, new)]

    return _flat(loss, params, step, counts)


def sgd_nonflat(loss: Variable, params: Sequence[Shared], lr: Any) -> Rule:
    """Stochastic gradient descent, each gradient in a variable of its own.

    To measure what the flat vector is worth: `grad_shared` is a list, and an all-reduce of it as
    many operations. Parameters and errors are those of `sgd`.
    """
    gradients = _gradients(loss, params)
    stored = [_state(p, "gradient") for p in params]
    grad_updates = [(s, _fitted(g, s)) for s, g in zip(stored, gradients, strict=True)]
    param_updates = [
        (p, _fitted(p - _in_dtype(p.dtype, lr) * s, p)) for p, s in zip(params, stored, strict=True)
    ]
    return grad_updates, param_updates, stored


def _flat(
    loss: Variable,
    params: Sequence[Shared],
    step: Step,
    counts: Sequence[tuple[Shared, Variable]] = (),
) -> Rule:
    """Return the two halves of a rule, with the gradients in one flat vector between them."""
    gradients = _gradients(loss, params)
    shapes = {f"gradient {i}": p.get_value(borrow=True).shape for i, p in enumerate(params)}
    dtype = np.result_type(*(p.dtype for p in params)).name
    flat = synk.flat(shapes, dtype, "gradients")
    views: list[Any] = [flat.views[name] for name in shapes]
    param_updates = list(counts)
    for p, view in zip(params, views, strict=True):
        stepped = step(p, view, partial(_in_dtype, p.dtype))
        param_updates += [(old, _fitted(new, old)) for old, new in stepped]
    grad_updates = [(view, _fitted(g, view)) for view, g in zip(views, gradients, strict=True)]
    return grad_updates, param_updates, flat.vector


def _gradients(loss: Variable, params: Sequence[Shared]) -> list[Variable]:
    if not params:
        raise ValueError(_NONE)
    for number, p in enumerate(params):
        if not isinstance(p, Shared) or np.dtype(p.dtype).kind != "f":
            raise TypeError(f"parameter {number} is {p} ({p.type}), no shared variable of floats")
    gradients: Any = pytensor.grad(loss, list(params))
    return list(gradients)


def _state(p: Shared, kind: str) -> Any:
    """Return zeros in the shape of a parameter, resident if it is."""
    return _like(p, np.zeros_like(p.get_value(borrow=True)), f"{kind} of {p.name or 'a parameter'}")


def _steps(params: Sequence[Shared]) -> tuple[Updates, Variable]:
    """Return the updates of a count of steps, and the number of the step, from 1, in float64."""
    if not params:
        raise ValueError(_NONE)
    steps = _like(params[0], np.array(0, np.int64), "steps")
    return [(steps, steps + 1)], (steps + 1).astype("float64")


def _like(p: Shared, value: np.ndarray, name: str) -> Any:
    """Return a shared variable of the sort of a parameter: resident, or of PyTensor."""
    if _is_resident(p):
        return synk.shared(value, name)
    return pytensor.shared(value, name=name, shape=p.type.shape if value.ndim else ())


def _is_resident(p: Shared) -> bool:
    from tandem.backend.shared import DeviceSharedVariable

    return isinstance(p, DeviceSharedVariable)


def _in_dtype(dtype: str, number: Any) -> Any:
    """Return a number, or scalar variable, in a dtype."""
    return pt.cast(number, dtype) if isinstance(number, Variable) else np.dtype(dtype).type(number)


def _fitted(new: Variable, old: Shared) -> Variable:
    """Return a new value with the dtype and the fixed shape of the variable that takes it."""
    if new.type.dtype != old.type.dtype:
        new = pt.cast(new, old.type.dtype)
    return new if old.type.is_super(new.type) else pt.specify_shape(new, old.type.shape)
