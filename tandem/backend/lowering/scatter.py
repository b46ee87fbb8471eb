"""Writing to the elements that index tensors select, of which some may be selected repeatedly.

The results are NumPy's: the last of several values for one element is kept, and all values that are
added to one are added in a fixed order, so that they have the same bits for any number of threads.
PyTorch's ``index_put_`` promises neither.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor
Tensors = Sequence[Tensor | None]  # for each axis (a mask covers several) an index or None


def put(part: Tensor, tensors: Tensors, y: Tensor, traced: bool) -> None:
    """Set the selected elements of `part`; `traced` if ``torch.compile`` reads the call."""
    if part.device.type == "cpu" and not traced:
        part.numpy()[_index(tensors)] = y.numpy()
        return
    given = [x for x in tensors if x is not None]
    if y.ndim and not all(x.dtype == torch.bool for x in given):
        tensors = _without_masks(tensors, part)
        y = _last_values(_Selection(part, tensors), y)
    torch.ops.aten.index_put_(part, list(tensors), y, False)


def add(part: Tensor, tensors: Tensors, y: Tensor, traced: bool) -> None:
    """Add to the selected elements of `part`, as often as they are selected."""
    given = [x for x in tensors if x is not None]
    if part.device.type != "cpu" or all(x.dtype == torch.bool for x in given):
        torch.ops.aten.index_put_(part, list(tensors), y, True)
        return
    if len(given) == 1 and not traced:
        axis = next(axis for axis, x in enumerate(tensors) if x is not None)
        _add_along(part, axis, given[0], y)
        return
    selection = _Selection(part, _without_masks(tensors, part))
    values = selection.rows_of(y)
    rows = selection.elements.reshape(selection.count, *values.shape[1:])
    places = selection.places.flatten()
    expanded = places.view(-1, *[1] * (values.ndim - 1)).expand(values.shape)
    if part.dtype == torch.bool:
        rows.scatter_reduce_(0, expanded, values, "amax")
    else:
        rows.scatter_add_(0, expanded, values)
    if traced or rows.data_ptr() != selection.elements.data_ptr():
        # The indexed axes could not be joined without a copy.
        selection.elements.copy_(rows.view(selection.elements.shape))


def _add_along(part: Tensor, axis: int, index: Tensor, y: Tensor) -> None:
    before, after = part.shape[:axis], part.shape[axis + 1 :]
    values = y.expand(*before, *index.shape, *after).reshape(*before, index.numel(), *after)
    # PyTorch's call takes the values in their order, and no negative index.
    positive = torch.where(index < 0, index + part.shape[axis], index)
    try:
        part.index_add_(axis, positive.flatten(), values)
    except RuntimeError as error:
        raise (IndexError(str(error)) if "out of bounds" in str(error) else error) from error


def add_once(part: Tensor, tensors: Tensors, y: Tensor, traced: bool) -> None:
    """Add to the selected elements of `part`; of several values for one, only the last counts."""
    chosen = tuple(slice(None) if x is None else x for x in tensors)
    put(part, tensors, part[chosen] + y, traced)


def _index(tensors: Tensors) -> Any:
    return tuple(slice(None) if x is None else x.numpy() for x in tensors)


def _without_masks(tensors: Tensors, part: Tensor) -> list[Tensor | None]:
    """Replace masks by the positions of their true elements."""
    found: list[Tensor | None] = []
    for x in tensors:
        if x is None or x.dtype != torch.bool:
            found.append(x)
            continue
        covered = part.shape[len(found) : len(found) + x.ndim]
        if x.shape != covered:
            raise IndexError(f"a mask of shape {tuple(x.shape)} indexes axes of {tuple(covered)}")
        found += torch.nonzero(x, as_tuple=True)
    return found


class _Selection:
    """The elements of a tensor that index tensors select, each by one number."""

    def __init__(self, part: Tensor, tensors: Tensors) -> None:
        self.axes = [axis for axis, x in enumerate(tensors) if x is not None]
        indices = [x for x in tensors if x is not None]
        sizes = [part.shape[axis] for axis in self.axes]
        self.count = math.prod(sizes)
        # The indexed axes, then the others.
        self.elements = part.movedim(self.axes, list(range(len(self.axes))))
        numbers = torch.arange(self.count, device=part.device).view(*sizes)
        self.places = numbers[tuple(indices)]
        adjacent = self.axes[-1] - self.axes[0] == len(self.axes) - 1
        # Where the axes of `places` are among those of the selected elements.
        self.first = self.axes[0] if adjacent else 0
        rest = self.elements.shape[len(self.axes) :]
        self.shape = (*rest[: self.first], *self.places.shape, *rest[self.first :])

    def rows_of(self, y: Tensor) -> Tensor:
        """Return the values for the selected elements, those of each place in a row."""
        ndim = self.places.ndim
        found = y.expand(self.shape)
        found = found.movedim(list(range(self.first, self.first + ndim)), list(range(ndim)))
        return found.reshape(self.places.numel(), *found.shape[ndim:])


def _last_values(selection: _Selection, y: Tensor) -> Tensor:
    """Give all values for one element the last one, so that their order does not matter."""
    places = selection.places.flatten()
    ordered, origins = places.sort(stable=True)
    last = origins[torch.searchsorted(ordered, places, right=True) - 1]
    found = selection.rows_of(y)[last]
    found = found.reshape(*selection.places.shape, *found.shape[1:])
    ndim = selection.places.ndim
    first = selection.first
    return found.movedim(list(range(ndim)), list(range(first, first + ndim)))
