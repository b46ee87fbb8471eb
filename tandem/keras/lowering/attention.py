"""Attention."""

import math
from functools import reduce
from typing import Any, cast

import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from tandem.keras.lowering.call import Call, number
from tandem.keras.lowering.core import drop, lengths, rows_of
from tandem.keras.lowering.registry import lowers

_NEVER = -1e9  # the score of a place that does not count


def _projected(
    layer: Call, x: TensorVariable, name: str, shape: tuple[int, int], is_last: bool = False
) -> TensorVariable:
    """Product of (batch, step, feature) with a weight of Keras's three axes.

    `shape` are (heads, units) of the result; with `is_last` the input has the heads, and the result
    is (batch, step, unit).
    """
    inner, (heads, units) = lengths(x)[-1], shape
    outputs = (units,) if is_last else shape
    weight_shape = (heads, inner // heads, units) if is_last else (inner, heads, units)
    width = math.prod(outputs)
    weight = layer.parameter("kernel", weight_shape, layer=name, settings="kernel")
    flat = weight.reshape((inner, width))
    y = rows_of(x, lambda rows: pt.dot(rows, flat), width)
    if layer.flag("use_bias"):
        bias = layer.parameter("bias", outputs, layer=name, settings="bias")
        y = y + bias.reshape((width,))
    if not is_last:  # that of the last is the layer's
        layer.regularize(y, "activity_regularizer")
    return y


def _by_head(x: TensorVariable, heads: int) -> TensorVariable:
    """(batch, step, head x unit) as (batch, head, step, unit)."""
    steps, width = lengths(x)
    return x.reshape((x.shape[0], steps, heads, width // heads)).dimshuffle(0, 2, 1, 3)


def _matmul(x: Any, y: Any) -> TensorVariable:
    return cast(TensorVariable, pt.matmul(x, y))


def _causal(queries: int, keys: int) -> TensorVariable:
    """Bool (1, query, key): whether a key is no later than a query."""
    return pt.ge(_lags(queries, keys), 0).dimshuffle("x", 0, 1)


def _lags(queries: int, keys: int) -> TensorVariable:
    """Steps from each key to each query, int64 (query, key)."""
    return pt.arange(queries).dimshuffle(0, "x") - pt.arange(keys).dimshuffle("x", 0)


@lowers("MultiHeadAttention")
def multi_head_attention(layer: Call, *arguments: Any) -> Any:
    """Vaswani et al. 2017, section 3.2.2."""
    given = dict(zip(("query", "value", "key"), arguments, strict=False))
    given |= {k: layer.keywords.pop(k) for k in ("query", "value", "key") if k in layer.keywords}
    query, value = given["query"], given["value"]
    key = value if given.get("key") is None else given["key"]
    for x in (query, key, value):
        if x.type.ndim != 3:
            raise layer.fault(f"an input of shape {x.type.shape}", "(batch, step, feature)")
    if layer.value("attention_axes") not in (None, [1], (1,)):
        raise layer.fault("attention_axes", "those of sequences")
    heads, units = layer.integer("num_heads"), layer.integer("key_dim")
    value_units, rate = layer.integer("value_dim"), layer.number("dropout", 0, 0.999999)
    mask, counts = layer.mask_of(query), _counts(layer, query, value, given.get("key"))
    for x in (query, key, value):  # as in Keras, layers that are built later find none
        layer.pass_.masks.pop(x, None)
    returns_scores = layer.keywords.pop("return_attention_scores", False)
    if returns_scores and layer.value("activity_regularizer") is not None:
        raise layer.fault("activity_regularizer with return_attention_scores", "one of them")
    shape = layer.value("output_shape") or [lengths(query)[-1]]
    if not isinstance(shape, list | tuple) or len(shape) != 1:
        raise layer.fault(f"output_shape {shape}", "one length")
    q = _by_head(_projected(layer, query, "query", (heads, units)), heads)
    k = _by_head(_projected(layer, key, "key", (heads, units)), heads)
    v = _by_head(_projected(layer, value, "value", (heads, value_units)), heads)
    scores = _matmul(q * number(1 / math.sqrt(units), q), k.dimshuffle(0, 1, 3, 2))
    if counts is not None:
        scores = pt.switch(counts, scores, number(_NEVER, scores))
    weights = pt.special.softmax(scores, axis=3)
    if counts is not None and (rate or returns_scores):  # else, of no places, their mean
        weights = pt.switch(counts, weights, number(0, weights))
    sizes = (heads, lengths(query)[0], lengths(key)[0])
    weights = pt.specify_shape(weights, (None, *sizes))
    kept = drop(layer, weights, rate, sizes)
    y = _matmul(kept, v).dimshuffle(0, 2, 1, 3)
    y = y.reshape((query.shape[0], sizes[1], heads * value_units))
    y = _projected(layer, y, "attention_output", (heads, int(shape[0])), is_last=True)
    layer.set_mask(y, mask)
    return [y, weights] if returns_scores else y


def _counts(layer: Call, query: Any, value: Any, key: Any) -> TensorVariable | None:
    """Bool, broadcasting to (batch, head, query, key): the places that count; None if all do."""
    own, given = layer.keywords, []
    for name, x, order in (
        ("query", query, (0, 1, "x")),
        ("value", value, (0, "x", 1)),
        ("key", key, (0, "x", 1)),
    ):
        mask = own.pop(f"{name}_mask", None)
        if x is not None and (mask is None or name == "query"):  # of which Keras takes its own
            mask = layer.mask_of(x)
        if mask is not None:
            given.append(mask.astype("bool").dimshuffle(*order))
    explicit = own.pop("attention_mask", None)
    if explicit is not None:
        given.append(explicit.astype("bool"))
    steps = lengths(query)[0], lengths(value)[0]
    if own.pop("use_causal_mask", False):
        given.append(_causal(*steps))
    window = layer.value("sliding_window")
    if window is not None:
        given.append(
            pt.lt(abs(_lags(*steps)), layer.integer("sliding_window")).dimshuffle("x", 0, 1)
        )
    spread = [m if m.type.ndim == 4 else m.dimshuffle(0, "x", 1, 2) for m in given]
    return cast(Any, reduce(pt.and_, spread)) if spread else None


@lowers("Attention", "AdditiveAttention")
def attention(layer: Call, inputs: Any) -> Any:
    """Luong et al. 2015, and by sums Bahdanau et al. 2014."""
    query, value = inputs[0], inputs[1]
    key = inputs[2] if len(inputs) > 2 else value
    is_sum = layer.kind == "AdditiveAttention"
    if not is_sum:
        is_sum = layer.word("score_mode", "dot", "concat") == "concat"
    if is_sum:
        parts = pt.tanh(query.dimshuffle(0, 1, "x", 2) + key.dimshuffle(0, "x", 1, 2))
        if layer.flag("use_scale", False):
            raise layer.fault("use_scale of added scores", "use_scale false")
        weight: Any = number(1, query)
        if layer.kind == "Attention":
            weight = layer.parameter("concat_score_weight", ())
        scores = weight * parts.sum(axis=-1)
    else:
        scores = _matmul(query, key.dimshuffle(0, 2, 1))
        if layer.flag("use_scale"):
            scores = scores * layer.parameter("scale", ())
    given = layer.mask if isinstance(layer.mask, list) else [layer.mask_of(x) for x in inputs]
    masks = [mask if mask is None else mask.astype("bool") for mask in given]
    counts = [] if masks[1] is None else [masks[1].dimshuffle(0, "x", 1)]
    if layer.keywords.pop("use_causal_mask", False):
        counts.append(_causal(lengths(query)[0], lengths(key)[0]))
    if counts:
        scores = pt.switch(reduce(pt.and_, counts), scores, scores + number(_NEVER, scores))
    weights = pt.special.softmax(scores, axis=2)
    sizes = (lengths(query)[0], lengths(key)[0])
    weights = pt.specify_shape(weights, (None, *sizes))
    y = _matmul(drop(layer, weights, layer.number("dropout", 0, 0.999999), sizes), value)
    if masks[0] is not None:
        y = pt.switch(masks[0].dimshuffle(0, 1, "x"), y, number(0, y))
        layer.set_mask(y, masks[0])
    return [y, weights] if layer.keywords.pop("return_attention_scores", False) else y
