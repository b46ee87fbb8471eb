"""Functions that make one step of training, data-parallel or by this process alone."""

from collections.abc import Callable, Sequence
from typing import Any

import pytensor
from pytensor.graph.basic import Variable
from pytensor.tensor.sharedvar import TensorSharedVariable
from pytensor.tensor.variable import TensorVariable

import tandem.parallel as synk
from tandem.backend import device_mode

__all__ = ["make_train_function", "make_train_function_theano"]


def make_train_function(
    loss: Variable,
    params: Sequence[TensorSharedVariable],
    x: TensorVariable,
    y: TensorVariable,
    update_rule: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Return a function that steps the parameters from one minibatch over all workers.

    Parameters
    ----------
    loss : float scalar
        An average over the rows of `x` and `y`.
    params : sequence of shared variables
        What is trained.
    x, y : variables
        Inputs, scattered on axis 0.
    update_rule : callable
        One of `tandem.parallel.extensions.updates`; it gets the loss, the parameters, and the
        further arguments.

    Returns
    -------
    callable
        ``train(x_data, y_data, **options) -> loss``: the average over all rows, before the step.
        Options are those of a call of a function: `batch`, `num_slices`. Slices are not cut short:
        the last batch of an epoch ends at the last row.

    Examples
    --------
    >>> train = make_train_function(loss, [w, b], x, y, updates.sgd, lr=0.1)  # doctest: +SKIP
    >>> train(pictures, labels, batch=indices)  # doctest: +SKIP
    """
    grad_updates, param_updates, grad_shared = update_rule(loss, params, *args, **kwargs)
    compute_gradients = synk.function([x, y], loss, updates=grad_updates)
    step = synk.function([], updates=param_updates)

    def train(x_data: Any, y_data: Any, **options: Any) -> Any:
        value = compute_gradients(x_data, y_data, **options)
        synk.all_reduce(grad_shared)
        step()
        return value

    return train


def make_train_function_theano(
    loss: Variable,
    params: Sequence[TensorSharedVariable],
    x: TensorVariable,
    y: TensorVariable,
    update_rule: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Return a function that steps the parameters by this process alone, to compare with.

    Arguments are those of `make_train_function`; ``train(x_data, y_data) -> loss``.
    """
    grad_updates, param_updates, _ = update_rule(loss, params, *args, **kwargs)
    mode = device_mode("cpu")
    compute_gradients = pytensor.function([x, y], loss, updates=grad_updates, mode=mode)
    step = pytensor.function([], updates=param_updates, mode=mode)

    def train(x_data: Any, y_data: Any) -> Any:
        value = compute_gradients(x_data, y_data)
        step()
        return value

    return train
