"""How a number of rows is split into consecutive parts."""


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
