"""Splits of a number of rows, or of an axis of a tensor, into consecutive parts."""


def edges(count: int, parts: int) -> list[int]:
    """Return the ``parts + 1`` edges of equal parts of ``range(count)``.

    Part ``i`` is ``range(edges[i], edges[i + 1])``, with ``edges[i] = floor(count * i / parts)``.
    Sizes differ by at most one; with fewer rows than parts, parts without a row lie between others.

    Raises
    ------
    ValueError
        `count` is negative, or `parts` is less than 1.
    """
    if count < 0 or parts < 1:
        raise ValueError(f"{count} rows can't be split into {parts} parts")
    return [count * i // parts for i in range(parts + 1)]


def part_of(shape: tuple[int, ...], axis: int, parts: int, number: int) -> tuple[slice, ...]:
    """Return the index of a part of a tensor that is divided along an axis, by `edges`."""
    ends = edges(shape[axis], parts)
    whole = (slice(None),) * len(shape)
    return (*whole[:axis], slice(ends[number], ends[number + 1]), *whole[axis + 1 :])


def part_shape(shape: tuple[int, ...], axis: int, parts: int, number: int) -> tuple[int, ...]:
    """Return the shape of a part of a tensor that is divided along an axis, by `edges`."""
    ends = edges(shape[axis], parts)
    return (*shape[:axis], ends[number + 1] - ends[number], *shape[axis + 1 :])
