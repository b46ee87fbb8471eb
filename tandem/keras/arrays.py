"""Arguments of `fit` as rows of arrays, and their form in the files of a run; imports Keras."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import keras
import numpy as np

from tandem.errors import InputError
from tandem.keras.losses import OF_CLASSES
from tandem.preprocessing.arrays import refuse_rounded, training_rows
from tandem.validation import listed, shown, unmasked

Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class Given:
    """The arguments of `fit` that are data: structures of arrays, as Keras takes them."""

    x: Any
    y: Any = None
    weights: Any = None

    @property
    def count(self) -> int:
        """Rows of the first array."""
        return len(_flat(self.x)[0])

    def part(self, rows: slice) -> "Given":
        """Some of the rows."""

        def cut(each: Any) -> Any:
            return keras.tree.map_structure(lambda array: array[rows], each)

        return Given(*(None if v is None else cut(v) for v in (self.x, self.y, self.weights)))


def gathered(
    x: Any, y: Any, weights: Any, steps: int | None, name: str = "x", reads_all: bool = False
) -> tuple[Given, int]:
    """Collect arrays of what `fit` takes: arrays, pandas, tensors, or batches of them.

    Of a PyDataset, a DataLoader or a generator one pass is made, of `steps` batches if that is
    given; with `reads_all` only where the number of batches is not known.

    Returns
    -------
    given, batch : Given, int
        `batch` is the number of rows in the first batch; 0 for arrays.

    Raises
    ------
    InputError
        There are no rows, arrays of other lengths, or batches and `y` beside them.
    """
    if x is None:
        raise InputError(f"{name}: found None, expected arrays or batches of them")
    if not _is_of_batches(x):
        given = _given((x, y, weights), (name, "y", "weights"))
        for array in (a for v in (given.y, given.weights) for a in _flat(v)):
            if array.ndim == 0 or len(array) != given.count:
                raise InputError(
                    f"y: found shape {array.shape}, expected {given.count} rows, as {name} has"
                )
        return given, 0
    if y is not None or weights is not None:
        raise InputError(f"{name}: found {type(x).__name__} and y, expected its batches alone")
    if (count := _count(x)) is not None and reads_all:
        steps = count
    if steps is None and count is None:
        raise InputError(
            f"{name}: found {type(x).__name__}, which may never end, expected steps_per_epoch "
            "beside it (validation_steps for that of validation)"
        )
    is_indexed = isinstance(x, keras.utils.PyDataset)
    numbers = itertools.count() if count is None else range(count)
    batches = (x[n] for n in numbers) if is_indexed else iter(x)
    parts = [_batch(batch, name) for batch in itertools.islice(batches, steps)]
    if not parts:
        raise InputError(f"{name}: found no batch, expected at least one")
    first = parts[0]

    def joined(get: Callable[[Given], Any]) -> Any:
        if get(first) is None:
            return None
        try:
            return keras.tree.map_structure(lambda *a: np.concatenate(a), *map(get, parts))
        except ValueError as error:
            raise InputError(
                f"{name}: found batches whose rows differ ({error}), expected rows of one shape: "
                "pad them"
            ) from error

    values = (joined(lambda g: g.x), joined(lambda g: g.y), joined(lambda g: g.weights))
    return Given(*values), first.count


def _count(x: Any) -> int | None:
    """The number of batches, if it is known."""
    try:
        return cast(int | None, getattr(x, "num_batches", None) or len(x))
    except (TypeError, NotImplementedError):
        return None


def _is_of_batches(x: Any) -> bool:
    if isinstance(x, keras.utils.PyDataset) or hasattr(x, "__next__"):
        return True
    return type(x).__module__.startswith("torch.utils.data") or (
        hasattr(x, "__iter__") and not hasattr(x, "__getitem__") and not hasattr(x, "__array__")
    )


def _batch(batch: Any, name: str) -> Given:
    parts = batch if isinstance(batch, tuple | list) else (batch,)
    if not 1 <= len(parts) <= 3:
        raise InputError(f"{name}: found a batch of {len(parts)} parts, expected (x, y)")
    return _given(parts, [name] * len(parts))


def _given(parts: Sequence[Any], names: Sequence[str]) -> Given:
    """Arrays of inputs, targets and weights, of which None in a structure stands for ones."""
    given = Given(*map(_arrays, parts, names))
    y = [] if given.y is None else given.y
    for values, name in zip((given.x, y), names, strict=False):
        if any(each is None for each in keras.tree.flatten(values)):
            raise InputError(f"{name}: found None among arrays, expected an array for each")
    if given.weights is None:
        return given
    ones = np.ones(given.count, np.float32)
    filled = keras.tree.map_structure(lambda w: ones if w is None else w, given.weights)
    return replace(given, weights=filled)


def _arrays(values: Any, name: str) -> Any:
    """A structure of NumPy arrays; InputError for what holds no numbers."""
    if values is None:
        return None
    if isinstance(values, Mapping):
        return {key: _arrays(each, f"{name}[{key!r}]") for key, each in values.items()}
    is_nested = isinstance(values, list | tuple) and any(hasattr(v, "shape") for v in values)
    if is_nested:
        return [_arrays(each, f"{name}[{n}]") for n, each in enumerate(values)]
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    try:
        found = unmasked(values, name)
    except ValueError as error:  # nested lists of different lengths
        raise InputError(f"{name}: found no array ({error}), expected rows of one shape") from error
    if found.dtype.kind not in "biuf":
        raise InputError(f"{name}: found {found.dtype}, expected numbers")
    if found.ndim == 0 or len(found) == 0:
        raise InputError(f"{name}: found shape {found.shape}, expected at least one row")
    return found


def _flat(values: Any) -> list[np.ndarray]:
    if values is None:
        return []
    if isinstance(values, Mapping):
        return [array for key in values for array in _flat(values[key])]
    return [a for v in values for a in _flat(v)] if isinstance(values, list) else [values]


def in_order(values: Any, names: Sequence[str], name: str) -> list[np.ndarray]:
    """The arrays of inputs or outputs in the model's order; InputError for another number."""
    if isinstance(values, Mapping) and set(values) >= set(names):
        return [values[each] for each in names]
    if isinstance(values, Mapping):
        values = [values[key] for key in sorted(values)]
    found = _flat(values)
    if len(found) != len(names):
        raise InputError(
            f"{name}: found {len(found)} arrays, expected {len(names)}: {listed([*names])}"
        )
    return found


def weighted(given: Given, class_weight: Mapping[int, float] | None) -> Given:
    """Rows with the weights of their classes; InputError where they have none."""
    if class_weight is None:
        return given
    targets = _flat(given.y)
    if given.weights is not None or len(targets) != 1:
        found = "sample_weight" if given.weights is not None else f"{len(targets)} targets"
        raise InputError(f"class_weight: found it with {found}, expected a single target alone")
    y = targets[0]
    labels = y.argmax(axis=-1) if y.ndim > 1 and y.shape[-1] > 1 else y.reshape(len(y), -1)[:, 0]
    table = _by_class(class_weight)
    classes, places = np.unique(np.round(labels), return_inverse=True)
    weights = np.array([table.get(int(label), 1.0) for label in classes], np.float32)
    return replace(given, weights=weights[places])


def class_table(class_weight: Mapping[int, float], classes: int) -> tuple[float, ...]:
    """The weight of each class, 1 where none is given."""
    table = _by_class(class_weight)
    return tuple(table.get(number, 1.0) for number in range(classes))


def _by_class(class_weight: Mapping[int, float]) -> dict[int, float]:
    try:
        return {int(key): float(weight) for key, weight in class_weight.items()}
    except (AttributeError, TypeError, ValueError):
        raise InputError(
            f"class_weight: found {shown(class_weight)}, expected weights by class, such as"
            " {0: 1.0, 1: 2.0}"
        ) from None


def divided(given: Given, fraction: float) -> tuple[Given, Given]:
    """Divide rows: the last ones, a fraction, are for validation."""
    begin = training_rows(given.count, fraction)
    return given.part(slice(begin)), given.part(slice(begin, None))


@dataclass(frozen=True)
class Layout:
    """Names and shapes of a model's inputs and outputs, and which targets are whole numbers."""

    inputs: tuple[str, ...]
    input_shapes: tuple[Shape, ...]
    outputs: tuple[str, ...]
    output_shapes: tuple[Shape, ...]
    labels: tuple[bool, ...]
    functions: frozenset[str]  # of losses and metrics
    as_given: frozenset[int] = frozenset()  # outputs of which a target has a shape of its own
    ignored: tuple[int | None, ...] = ()  # the label of each output that its loss leaves out


@dataclass(frozen=True)
class Rows:
    """Inputs, targets and weights of one split, checked, one array for each input and so on."""

    inputs: tuple[np.ndarray, ...]
    targets: tuple[np.ndarray, ...]
    weights: tuple[np.ndarray, ...] = ()

    def __len__(self) -> int:
        return len(self.inputs[0])


def checked_rows(given: Given, layout: Layout, name: str = "", may_crop: bool = False) -> Rows:
    """Check arrays against a model's inputs and outputs.

    `name` begins the names of arrays in messages, such as "validation_data: "; pictures that are to
    be cropped may be larger than the input. Raises InputError.
    """
    inputs = tuple(
        _checked_input(array, shape, _named(f"{name}x", layout.inputs, n), may_crop)
        for n, (array, shape) in enumerate(
            zip(in_order(given.x, layout.inputs, f"{name}x"), layout.input_shapes, strict=True)
        )
    )
    if given.y is None:
        raise InputError(f"{name}y: found None, expected targets")
    targets = tuple(
        _float32(array, f"{name}y")
        if n in layout.as_given
        else _checked_target(array, shape, label, _named(f"{name}y", layout.outputs, n), ignored)
        for n, (array, shape, label, ignored) in enumerate(
            zip(
                in_order(given.y, layout.outputs, f"{name}y"),
                layout.output_shapes,
                layout.labels,
                layout.ignored or [None] * len(layout.outputs),
                strict=True,
            )
        )
    )
    given_weights = _flat(given.weights)
    if isinstance(given.weights, Mapping):
        given_weights = in_order(given.weights, layout.outputs, f"{name}sample_weight")
    weights = tuple(map(_weights, given_weights, itertools.cycle(layout.output_shapes)))
    places = [{(), shape[:-1]} for shape in layout.output_shapes]
    if len(weights) not in (0, 1, len(targets)) or any(
        len(w) != len(inputs[0]) or not any(_fits(w.shape[1:], shape) for shape in allowed)
        for w, allowed in zip(weights, places, strict=False)
    ):
        shapes = ", ".join(str(w.shape) for w in weights)
        raise InputError(
            f"{name}sample_weight: found shape {shapes}, expected a weight for each of "
            f"{len(inputs[0])} rows, or for each step of them"
        )
    return Rows(inputs, targets, weights)


def _weights(found: np.ndarray, shape: Shape) -> np.ndarray:
    """Weights of rows or their steps; an axis of length 1 may be too many."""
    is_wide = found.ndim > 1 and found.shape[-1] == 1 and not _fits(found.shape[1:], shape[:-1])
    return np.asarray(found[..., 0] if is_wide else found, np.float32)


def _named(name: str, names: Sequence[str], number: int) -> str:
    return name if len(names) == 1 else f"{name} of {names[number]}"


def _checked_input(found: np.ndarray, shape: Shape, name: str, may_crop: bool) -> np.ndarray:
    if found.ndim == len(shape) and shape[-1:] == (1,):
        found = found[..., np.newaxis]
    elif found.ndim == len(shape) + 2 and found.shape[-1] == 1:
        found = found[..., 0]
    crops = may_crop and _is_picture(found) and found.shape[3] == shape[-1]
    if not crops and not _fits(found.shape[1:], shape):
        raise InputError(f"{name}: found shape {found.shape}, expected {_rows(shape)}")
    refuse_rounded(name, found)
    return found if found.dtype == np.uint8 else _float32(found, name)


def _checked_target(
    found: np.ndarray, shape: Shape, is_label: bool, name: str, ignored: int | None
) -> np.ndarray:
    places = shape[:-1]
    if is_label and _fits(found.shape[1:], shape) and shape[-1] != 1:
        raise InputError(
            f"{name}: found shape {found.shape}, expected labels of shape {_rows(places)}: for "
            "one-hot rows take categorical_crossentropy"
        )
    if is_label:
        return _checked_labels(_reshaped(found, places, name), shape[-1], name, ignored)
    return _float32(_reshaped(found, shape, name), name)


def _reshaped(found: np.ndarray, shape: Shape, name: str) -> np.ndarray:
    """Targets with the shape of rows; an axis of length 1 may be missing, or too many."""
    if not fits_output(found.shape[1:], shape):
        raise InputError(
            f"{name}: found shape {found.shape}, expected {_rows(shape)}, as the model's output"
        )
    if found.ndim <= len(shape):
        return found[..., np.newaxis]
    return found[..., 0] if found.ndim > len(shape) + 1 else found


def fits_output(target: Sequence[int], output: Shape) -> bool:
    """Return whether a row's target has an output's shape; an axis of length 1 may be missing."""
    if _fits(target, output):
        return True
    is_short = output[-1:] == (1,) and _fits(target, output[:-1])
    return is_short or (tuple(target[-1:]) == (1,) and _fits(target[:-1], output))


def _checked_labels(
    found: np.ndarray, classes: int | None, name: str, ignored: int | None
) -> np.ndarray:
    labels = found.astype(np.int64)
    if not np.array_equal(labels, found):
        raise InputError(f"{name}: found numbers with fractions, expected whole labels")
    kept = labels if ignored is None else labels[labels != ignored]
    low, high = (int(kept.min()), int(kept.max())) if kept.size else (0, 0)
    if low < 0 or classes is None or high >= classes:
        raise InputError(
            f"{name}: found labels from {low} to {high}, expected 0 to {(classes or 0) - 1}, as "
            f"the model has {classes} outputs"
        )
    return labels


def _float32(found: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        numbers = np.ascontiguousarray(found, np.float32)
    bad = ~np.isfinite(numbers.reshape(len(numbers), -1)).all(axis=1)
    if bad.any():
        row = int(bad.argmax())
        value = found[row].reshape(-1)[~np.isfinite(numbers[row].reshape(-1))][0]
        raise InputError(
            f"{name}: found {value} in row {row}, expected finite numbers that float32 can hold"
        )
    return numbers


def _fits(found: Sequence[int], shape: Shape) -> bool:
    return len(found) == len(shape) and all(
        m in (None, n) for n, m in zip(found, shape, strict=True)
    )


def _is_picture(found: np.ndarray) -> bool:
    shape = found.shape
    return (
        found.dtype == np.uint8 and found.ndim == 4 and shape[1] == shape[2] and shape[3] in (1, 3)
    )


def _rows(shape: Shape) -> str:
    return f"({', '.join(['n', *map(str, shape)])})"


@dataclass(frozen=True)
class Form:
    """The form in which all splits are stored.

    Attributes
    ----------
    are_pictures : bool
        uint8 pictures with classes, which may be cropped and mirrored; else rows of float32 or
        uint8.
    has_classes : bool
        Whether a target is the number of a class, of a single output.
    weights, input_shapes, targets : tuple of tuple of int
        Shapes of rows, of the weights at the end of targets, and as in an `Objective`.
    """

    are_pictures: bool
    has_classes: bool
    weights: tuple[tuple[int, ...], ...]
    input_shapes: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, parts: Sequence[Rows], layout: Layout) -> "Form":
        """Find the form of splits; InputError where they differ in their shapes."""
        first = parts[0]
        shapes = tuple(array.shape[1:] for array in first.inputs)
        for rows in parts[1:]:
            if (found := tuple(array.shape[1:] for array in rows.inputs)) != shapes:
                raise InputError(f"validation_data: found rows of shape {found}, expected {shapes}")
        weights = max((tuple(w.shape[1:] for w in rows.weights) for rows in parts), key=len)
        for rows in parts[1:]:
            if rows.weights and any(w.shape[1:] not in weights for w in rows.weights):
                raise InputError(
                    "validation_data: found weights of other shapes than those of training"
                )
        has_classes = (
            len(first.targets) == 1
            and len(layout.output_shapes[0]) == 1
            and not weights
            and layout.functions <= OF_CLASSES
            and not any(label is not None for label in layout.ignored)
            and (layout.labels[0] or all(map(_are_one_hot, (r.targets[0] for r in parts))))
        )
        are_pictures = (
            has_classes and len(shapes) == 1 and all(_is_picture(r.inputs[0]) for r in parts)
        )
        targets = tuple(array.shape[1:] for array in first.targets)
        return cls(are_pictures, has_classes, weights, shapes, targets)

    def packed(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets as files hold them."""
        x, y = rows.inputs[0], rows.targets[0]
        if len(rows.inputs) > 1 or not 1 <= x.ndim - 1 <= 3:
            x = np.concatenate([i.reshape(len(i), -1) for i in rows.inputs], axis=1)
        if self.has_classes:
            return x, y if y.ndim == 1 else y.argmax(axis=1).astype(np.int64)
        parts = [t.reshape(len(t), -1).astype(np.float32, copy=False) for t in rows.targets]
        if self.weights:
            ones = tuple(np.ones((len(x), *shape), np.float32) for shape in self.weights)
            given = rows.weights or ones
            parts += [w.reshape(len(x), -1) for w in given * (len(self.weights) // len(given))]
        return x, np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]

    @property
    def classes(self) -> int:
        """Values of a target, where it is no class."""
        return sum(map(math.prod, (*self.targets, *self.weights)))


def _are_one_hot(rows: np.ndarray) -> bool:
    return bool(((rows == 0) | (rows == 1)).all() and (rows.sum(axis=-1) == 1).all())
