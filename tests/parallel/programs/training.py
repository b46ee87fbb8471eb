"""Training by data-parallel functions: python training.py 2"""

import sys

import numpy as np
import pytensor as theano
import pytensor.tensor as T

import tandem.parallel as synk
from tandem.ops import dropout
from tandem.parallel.extensions import updates
from tandem.parallel.extensions.train import make_train_function

WORKERS = int(sys.argv[1])
rng = np.random.default_rng(1)
inputs = rng.normal(size=(65, 5))
targets = np.tanh(inputs.dot(rng.normal(size=(5, 2)))) + 0.1
first = {
    "hidden": rng.normal(size=(5, 8)) / 2,
    "out": rng.normal(size=(8, 2)) / 2,
    "bias": np.zeros(2),
}
batches = [rng.permutation(65)[:size] for size in (33, 7, 64, 1, 20)]

synk.fork(WORKERS, threads=1)
x, y = T.dmatrix("x"), T.dmatrix("y")


def parameters(make):
    return {name: make(value.copy(), name=name) for name, value in first.items()}


def loss_of(params, rows=None, step=None):
    """The mean squared error of a network; with rows, half of its units are dropped."""
    hidden = T.tanh(x.dot(params["hidden"]))
    if rows is not None:
        hidden = dropout(hidden, 5, step, rows, rate=0.5, layer=0, factor=2.0)
    return T.mean((hidden.dot(params["out"]) + params["bias"] - y) ** 2)


# The loop by hand, with dropout by the rows of the whole call, beside one serial function.
params, step = parameters(theano.shared), theano.shared(np.int64(0), name="step")
rate = theano.shared(0.5, name="rate")
loss = loss_of(params, synk.row_index(), step)
grad_updates, param_updates, grad_shared = updates.momentum(
    loss, [*params.values()], rate, momentum=0.8
)
gradients = synk.function([x, y], loss, updates=grad_updates)
update = synk.function([], updates=[*param_updates, (step, step + 1)])
test = synk.function([x, y], [loss_of(params), (T.sum((y - 0.1) ** 2), "sum")])
synk.distribute()

alone, count = parameters(theano.shared), theano.shared(np.int64(0))
alone_loss = loss_of(alone, T.arange(x.shape[0]), count)
velocities = [theano.shared(np.zeros_like(value)) for value in first.values()]
alone_updates = [(count, count + 1)]
for param, velocity in zip(alone.values(), velocities, strict=True):
    new = 0.8 * velocity - rate * theano.grad(alone_loss, param)
    alone_updates += [(velocity, new), (param, param + new)]
serial = theano.function([x, y], alone_loss, updates=alone_updates, mode="FAST_COMPILE")

x_data, y_data = gradients.build_inputs(inputs, targets)
before = test(x_data, y_data)[0]
for number, batch in enumerate(batches):
    rate.set_value(0.5 / (1 + number))
    synk.broadcast(rate)
    value = gradients(x_data, y_data, batch=batch, num_slices=1 + number % 3)
    synk.all_reduce(grad_shared)
    update()
    np.testing.assert_allclose(value, serial(inputs[batch], targets[batch]), rtol=1e-12)
for name, param in params.items():
    ranks = [synk.get_value(rank, param) for rank in range(WORKERS)]
    assert all((value == ranks[0]).all() for value in ranks), name
    np.testing.assert_allclose(ranks[0], alone[name].get_value(), rtol=1e-10, atol=1e-12)
after, _ = test(x_data, y_data, num_slices=4)
assert after < before

# Every rule, over variables of PyTensor and residents: the same steps in all ranks.
RULES = {
    "sgd": {"lr": 0.1},
    "sgd_nonflat": {"lr": 0.1},
    "momentum": {"lr": 0.1, "momentum": 0.5},
    "nesterov_momentum": {"lr": 0.1, "momentum": 0.5},
    "adagrad": {"lr": 0.1, "epsilon": 1e-5},
    "rmsprop": {"lr": 0.01, "rho": 0.8, "epsilon": 1e-5},
    "adadelta": {"lr": 1.0, "rho": 0.9, "epsilon": 1e-5},
    "adam": {"lr": 0.01, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-7},
    "adamax": {"lr": 0.01, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-7},
}
for number, name in enumerate(RULES):
    make = synk.shared if number % 2 else theano.shared
    params = parameters(make)
    train = make_train_function(
        loss_of(params), [*params.values()], x, y, getattr(updates, name), **RULES[name]
    )
    losses = [train(x_data, y_data) for _ in range(5)]
    losses.append(train(inputs, targets, batch=slice(0, 65), num_slices=2))
    assert losses[-1] < losses[0], name
    for param in params.values():
        ranks = [synk.get_value(rank, param) for rank in range(WORKERS)]
        assert all((value == ranks[0]).all() for value in ranks), name
synk.close()
print("training:", WORKERS)
