"""Forms of random graphs: each makes a term of a graph from some that are there."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytensor.scalar as ps
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.scalar.basic import Composite
from pytensor.scalar.loop import ScalarLoop
from pytensor.tensor.elemwise import Elemwise

from tests.support.random_graphs import DTYPES, Form, Grower, Term, largest


def _tame(term: Term) -> bool:
    """Whether sums of the term's numbers neither overflow nor cancel far beyond rounding."""
    return term.kind != "f" or largest(term.value) < 100


def _numeric(term: Term) -> bool:
    return term.kind != "b"


_ANY_UNARY = [pt.neg, pt.abs, pt.sign, pt.sqr, pt.floor, pt.ceil, pt.trunc, pt.isnan, pt.isinf]
_BINARY = [
    pt.add, pt.sub, pt.mul, pt.true_div, pt.int_div, pt.mod, pt.maximum, pt.minimum, pt.eq, pt.neq,
    pt.lt, pt.le, pt.gt, pt.ge, pt.second,
]  # fmt: skip
_FUNCTIONS = [
    pt.exp, pt.log, pt.log1p, pt.expm1, pt.sin, pt.cos, pt.tanh, pt.sqrt, pt.sigmoid, pt.arctan,
    pt.softplus, pt.erf, pt.reciprocal, pt.log2, pt.arcsinh,
]  # fmt: skip
_BITWISE = [pt.bitwise_and, pt.bitwise_or, pt.bitwise_xor]


def _unary(g: Grower) -> Any:
    return g.choose(_ANY_UNARY)(g.pick().variable)


def _pair(g: Grower, accept: Callable[[Term], bool] = lambda t: True) -> tuple[Variable, Variable]:
    """Two terms of one shape, or one with a part of its axes, or with a number."""
    x = g.pick(accept)
    way = g.integers(0, 4)
    if way == 0:
        constant = g.values(g.choose((x.value.dtype.name, g.choose(DTYPES))), ())
        return x.variable, pt.constant(constant)
    if way == 1 and x.value.ndim:
        axis = int(g.integers(0, x.value.ndim))
        other = pt.moveaxis(pt.moveaxis(x.variable, axis, 0)[:1], 0, axis)
        return x.variable, pt.specify_broadcastable(other, axis)
    y = g.pick(lambda t: accept(t) and t.value.shape == x.value.shape)
    return x.variable, y.variable


def _binary(g: Grower) -> Any:
    x, y = _pair(g)
    op = g.choose(_BINARY)
    return op(y, x) if g.chance(0.3) else op(x, y)


def _bitwise(g: Grower) -> Any:
    x, y = _pair(g, lambda t: t.kind in "biu")
    return g.choose((lambda: pt.invert(x), lambda: g.choose(_BITWISE)(x, y)))()


def _power(g: Grower) -> Any:
    x = g.pick(lambda t: _tame(t) and t.kind in "biu").variable
    return x ** np.array(g.integers(0, 4), g.choose(("int8", "int64", "uint8")))


def _switch(g: Grower) -> Any:
    x, y = _pair(g)
    return pt.switch(x > pt.constant(np.int8(1)), x, y)


def _clip(g: Grower) -> Any:
    x = g.pick(_numeric)
    bounds = g.values(x.value.dtype.name, (2,))
    return pt.clip(x.variable, *bounds)


def _cast(g: Grower) -> Any:
    x = g.pick()
    dtype = g.choose(DTYPES)
    if x.kind == "f" and np.dtype(dtype).kind in "iu":
        # The result for NaN and what does not fit is the processor's choice.
        info = np.iinfo(dtype)
        if not np.all((x.value > float(info.min)) & (x.value < float(info.max))):
            raise ValueError("not within the type")
    return pt.cast(x.variable, dtype)


def _function(g: Grower) -> Any:
    return g.choose(_FUNCTIONS)(g.pick(_tame).variable)


def _axes(g: Grower, term: Term) -> Any:
    ndim = term.value.ndim
    if not ndim or g.chance(0.3):
        return None
    count = int(g.integers(1, ndim + 1))
    return tuple(int(a) for a in g.rng.permutation(ndim)[:count])


def _reduce(g: Grower) -> Any:
    x = g.pick()
    op = g.choose((pt.max, pt.min, pt.all, pt.any, pt.argmax, pt.argmin))
    axes = _axes(g, x)
    if op in (pt.argmax, pt.argmin) and axes is not None:
        axes = axes[0]
    return op(x.variable, axis=axes)


def _integer_sum(g: Grower) -> Any:
    x = g.pick(lambda t: t.kind in "biu")
    return g.choose((pt.sum, pt.prod))(x.variable, axis=_axes(g, x))


def _sum(g: Grower) -> Any:
    x = g.pick(lambda t: t.kind == "f" and _tame(t))
    return g.choose((pt.sum, pt.mean))(x.variable, axis=_axes(g, x))


def _sum_scale(g: Grower, value: np.ndarray) -> float:
    x = g.used[0].value
    return max(1.0, largest(x) * x.size)


def _cumulate(g: Grower) -> Any:
    x = g.pick(lambda t: t.kind in "biu" and t.value.ndim > 0)
    axis = int(g.integers(0, x.value.ndim))
    return g.choose((pt.cumsum, pt.cumprod))(x.variable, axis=axis)


def _softmax(g: Grower) -> Any:
    # What PyTensor gives for infinity depends on how it rewrites the graph inside the Op.
    x = g.pick(lambda t: t.kind == "f" and t.value.ndim > 0 and np.isfinite(t.value).all())
    axis = int(g.integers(0, x.value.ndim))
    return g.choose((pt.special.softmax, pt.special.log_softmax))(x.variable, axis=axis)


def _sort(g: Grower) -> Any:
    x = g.pick(lambda t: t.value.ndim > 0)
    axis = int(g.integers(0, x.value.ndim))
    if g.chance(0.5):
        return pt.sort(x.variable, axis=axis)
    return pt.argsort(x.variable, axis=axis, kind="stable")


def _dot(g: Grower) -> Any:
    x = g.pick(lambda t: t.value.ndim in (1, 2) and _tame(t))
    length = x.value.shape[-1]
    y = g.pick(lambda t: t.value.ndim in (1, 2) and t.value.shape[0] == length and _tame(t))
    return pt.dot(x.variable, y.variable)


def _dot_scale(g: Grower, value: np.ndarray) -> float:
    x, y = g.used[0].value, g.used[1].value
    return max(1.0, largest(x) * largest(y) * (1 + x.shape[-1]))


def _shape_number(g: Grower) -> Any:
    """A number computed from lengths alone, at times used as a tensor."""
    x = g.pick(lambda t: t.value.ndim > 0, exact=False)
    y = g.pick(lambda t: t.value.ndim > 0, exact=False)
    n = x.variable.shape[int(g.integers(0, x.value.ndim))]
    m = y.variable.shape[int(g.integers(0, y.value.ndim))]
    made = g.choose(
        (
            lambda: n + m, lambda: n - m, lambda: n * m, lambda: n // m, lambda: n % m,
            lambda: n / (m + 1), lambda: pt.maximum(n, m), lambda: pt.eq(n, m), lambda: n < m,
            lambda: pt.switch(n < m, n, m), lambda: x.variable.shape, lambda: x.variable.size * m,
            lambda: pt.prod(x.variable.shape[:1]), lambda: pt.stack([n, m]), lambda: n * 2**62,
            lambda: pt.cast(n, "float32") * np.float32(0.5), lambda: pt.cast(n - m, "int8"),
        )
    )()  # fmt: skip
    # The number is used several times, as nodes may write over what they are given.
    uses = [g.pick(_numeric).variable for _ in range(g.integers(0, 3))]
    wide = [made.dimshuffle("x", "x") + np.int64(1)] if made.ndim == 0 and g.chance(0.3) else []
    return [*wide, *(g.choose((pt.add, pt.mul, pt.true_div))(x, made) for x in uses), made]


def _move(g: Grower) -> Any:
    x = g.pick(exact=False)
    v, ndim = x.variable, x.value.ndim
    order = [int(a) for a in g.rng.permutation(ndim)]
    return g.choose(
        (
            lambda: v.dimshuffle(order), lambda: v.dimshuffle("x", *order), lambda: v.flatten(),
            lambda: v.dimshuffle(*order, "x"), lambda: v.reshape((-1,) + (1,) * (ndim > 2)),
            lambda: v.reshape((*v.shape[1:], v.shape[0])), lambda: pt.flip(v),
            lambda: pt.tensor_copy(v), lambda: pt.alloc(v, g.length(), *(v.shape if ndim else ())),
            lambda: pt.squeeze(v), lambda: pt.diagonal(v), lambda: pt.tile(v, (2,) * max(1, ndim)),
            lambda: pt.roll(v, 1, axis=0), lambda: pt.tril(v),
        )
    )()  # fmt: skip


def _join(g: Grower) -> Any:
    x = g.pick(lambda t: t.value.ndim > 0, exact=False)
    axis = int(g.integers(0, x.value.ndim))
    rest = np.delete(x.value.shape, axis).tolist()
    y = g.pick(
        lambda t: t.value.ndim == x.value.ndim and np.delete(t.value.shape, axis).tolist() == rest,
        exact=False,
    )
    terms = [x.variable, y.variable, x.variable][: int(g.integers(1, 4))]
    return pt.join(axis, *terms)


def _split(g: Grower) -> Any:
    x = g.pick(lambda t: t.value.ndim > 0, exact=False)
    axis = int(g.integers(0, x.value.ndim))
    first = int(g.integers(0, x.value.shape[axis] + 1))
    sizes = pt.stack([pt.constant(first), x.variable.shape[axis] - first])
    return pt.split(x.variable, sizes, n_splits=2, axis=axis)


def _arange(g: Grower) -> Any:
    if g.chance(0.5):
        dtype = g.choose(("int8", "int64", "uint8", None))
        x = g.pick(lambda t: t.value.ndim > 0, exact=False)
        return pt.arange(int(g.integers(-3, 3)), x.variable.shape[0] * 2, 2, dtype=dtype)
    start, stop, step = (np.round(g.rng.uniform(-3, 3), 1) for _ in range(3))
    return pt.arange(*(pt.constant(v) for v in (start, stop, step)))


def _entry(g: Grower, length: int) -> Any:
    """An index of one axis: numbers, slices in both directions, or an array with repetitions."""

    def bound() -> int | None:
        return None if g.chance(0.3) else int(g.integers(-length - 2, length + 3))

    way = g.integers(0, 6)
    if way == 0 and length:
        return int(g.integers(-length, length))
    if way == 1 and length:
        shape = g.choose(((), (4,), (2, 3), (0,)))
        kind = g.choose(("int64", "int32", "uint8"))
        places = g.integers(0 if kind == "uint8" else -length, length, shape)
        return pt.as_tensor(np.asarray(places, kind))
    if way == 2:
        return pt.as_tensor(g.rng.random(length) < 0.5)
    return slice(bound(), bound(), g.choose((None, 1, 2, -1, -2)))


def _part(g: Grower, exact: bool) -> tuple[Term, Any]:
    x = g.pick(lambda t: t.value.ndim > 0, exact=exact)
    if g.chance(0.15) and x.kind != "f":
        return x, x.variable[x.variable > pt.constant(np.int8(1))]
    count = int(g.integers(1, x.value.ndim + 1))
    return x, x.variable[tuple(_entry(g, length) for length in x.value.shape[:count])]


def _index(g: Grower) -> Any:
    return _part(g, exact=False)[1]


def _take(g: Grower) -> Any:
    """Rows at computed places."""
    x = g.pick(lambda t: t.value.ndim > 0 and t.value.shape[0] > 0, exact=False)
    i = g.pick(lambda t: t.kind in "iu" and t.value.ndim < 3)
    length = x.value.shape[0]
    return x.variable[pt.cast(i.variable % np.array(min(length, 100), i.value.dtype), "int64")]


def _write(g: Grower) -> Any:
    x, part = _part(g, exact=True)
    dtype = x.value.dtype.name
    way = g.integers(0, 3)
    if way == 0:
        value = pt.constant(g.values(dtype, ()))
    elif way == 1:
        value = pt.arange(part.size).reshape(part.shape) % 100
        value = pt.gt(value, 3) if dtype == "bool" else pt.cast(value, dtype)
    else:
        value = g.pick(lambda t: t.value.ndim == part.type.ndim and t.value.dtype == dtype).variable
    if g.chance(0.5):
        return pt.set_subtensor(part, value)
    if x.kind == "f" and not _tame(x):
        raise ValueError("a sum may cancel")
    return pt.inc_subtensor(part, value, ignore_duplicates=g.chance(0.3))


def _nonzero(g: Grower) -> Any:
    return pt.nonzero(g.pick(lambda t: t.value.ndim > 0).variable)


def _gradient(g: Grower) -> Any:
    x = g.pick(lambda t: t.kind == "f" and t.value.ndim > 0 and _tame(t))
    part = x.variable[tuple(_entry(g, length) for length in x.value.shape[:1])]
    return pytensor.grad((part * 2).sum(), x.variable)


def _scan(g: Grower) -> Any:
    x = g.pick(lambda t: t.value.ndim > 0 and t.kind in "iu")
    start = pt.zeros_like(x.variable[0])
    return pytensor.scan(
        lambda row, total: pt.maximum(row, total) - (row // 2),
        sequences=[x.variable], outputs_info=[start], return_updates=False,
    )  # fmt: skip


def _composite(g: Grower) -> Any:
    """A graph of scalars, one of which is built twice: PyTensor makes both one node."""
    x, y = _pair(g, _numeric)
    a, b = (ps.get_scalar_type(v.type.dtype)() for v in (x, y))
    output = ps.sub(ps.maximum(ps.add(a, b), a), ps.minimum(ps.add(a, b), b))
    return Elemwise(Composite([a, b], [output]))(x, y)


def _scalar_loop(g: Grower) -> Any:
    """A loop over scalars, in whose step one is built twice."""
    x = g.pick(lambda t: t.kind in "if").variable
    steps = g.values("int64", ()) % 5
    state = ps.get_scalar_type(x.type.dtype)()
    size = ps.abs(state)
    update = ps.sub(ps.maximum(size, state), ps.minimum(ps.abs(state), ps.neg(size)))
    until = ps.gt(update, ps.add(size, size)) if g.chance(0.5) else None
    loop = ScalarLoop(init=[state], update=[update], until=until)
    return Elemwise(loop)(pt.constant(steps), x)


FORMS: dict[str, Form] = {
    "unary": Form(_unary, 2),
    "binary": Form(_binary, 5),
    "bitwise": Form(_bitwise),
    "power": Form(_power),
    "switch": Form(_switch),
    "clip": Form(_clip),
    "cast": Form(_cast, 2),
    "function": Form(_function, 2, exact=False),
    "reduction": Form(_reduce, 2),
    "sum of integers": Form(_integer_sum),
    "sum": Form(_sum, exact=False, scale=_sum_scale),
    "cumulative": Form(_cumulate),
    "softmax": Form(_softmax, 0.5, exact=False),
    "sort": Form(_sort),
    "dot": Form(_dot, exact=False, scale=_dot_scale),
    "shape": Form(_shape_number, 3),
    "move": Form(_move, 3),
    "join": Form(_join),
    "split": Form(_split, 0.5),
    "arange": Form(_arange),
    "index": Form(_index, 3),
    "take": Form(_take),
    "write": Form(_write, 3),
    "nonzero": Form(_nonzero, 0.5),
    "gradient": Form(_gradient, exact=False, scale=_sum_scale),
    "scan": Form(_scan, 0.05),
    "composite": Form(_composite, 0.5),
    "loop over scalars": Form(_scalar_loop, 0.3),
}
