"""The conversions of a partitioned graph, as text."""

from collections.abc import Callable, Sequence

from tandem.placement.conversions import find_kind
from tandem.placement.partitioned import Conversion, Partitioned
from tandem.placement.rules import Part
from tandem.text_table import aligned

_HEADINGS = ("", "conversion", "of", "shape", "dtype", "from -> to", "received, bytes")
_TEXTS = range(1, 6)  # columns of the table


def explain(partitioned: Partitioned, ranks: int | None = None) -> str:
    """Describe the conversions of a graph, their bytes, and Ops without a rule.

    Parameters
    ----------
    partitioned : Partitioned
    ranks : int, optional
        How many there are: bytes are then given for all of them, where they differ. Without it they
        are those of the rank that the graph is of.

    Returns
    -------
    str
        A line for each conversion, in the order in which ranks make them, and lines with the sum
        and with Ops that have no rule.
    """
    conversions = partitioned.conversions
    if ranks is None:
        received = [[conversion.received] for conversion in conversions]
    else:
        received = [received_by_rank(conversion, ranks) for conversion in conversions]
    sums = [sum(column) for column in zip(*received, strict=True)]
    lines = []
    if conversions:
        cells = [_cells(c, found) for c, found in zip(conversions, received, strict=True)]
        lines += aligned([_HEADINGS, *cells], left=_TEXTS)
    count = f"{len(conversions)} conversion{'s' * (len(conversions) != 1)}"
    lines.append(f"{count}, MB received: {megabytes(sums or [0])}")
    unruled = ", ".join(partitioned.without_rule) or "none"
    lines.append(f"Ops without a rule, computed from whole tensors: {unruled}")
    return "\n".join(lines) + "\n"


def received_by_rank(conversion: Conversion, ranks: int) -> list[int]:
    """Bytes that each rank receives in a conversion."""
    kind = find_kind(conversion.source, conversion.target)
    make = None if kind is None else kind.op
    assert make is not None, f"{conversion.kind} moves no bytes"
    ops = [make(conversion.number, Part(ranks, rank), conversion.shape) for rank in range(ranks)]
    return [op.received(conversion.dtype) for op in ops]


def megabytes(by_rank: Sequence[int]) -> str:
    """Bytes of ranks as text, in 10^6 bytes, see `by_ranks`."""
    return by_ranks(by_rank, _as_megabytes)


def by_ranks(values: Sequence[int], form: Callable[[int], str]) -> str:
    """Values of ranks as text: that of all, that of rank 0 and the others', or the extremes."""
    texts = [form(value) for value in values]
    if len(set(texts)) == 1:
        return texts[0]
    if len(set(texts[1:])) == 1:
        return f"{texts[0]} at rank 0, {texts[1]} at others"
    return f"{form(min(values))} to {form(max(values))}"


def _as_megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.{1 if not nbytes or nbytes >= 1e6 else 3}f}"


def _cells(conversion: Conversion, received: Sequence[int]) -> tuple[str, ...]:
    return (
        str(conversion.number),
        conversion.kind,
        conversion.name,
        str(conversion.shape),
        conversion.dtype,
        f"{conversion.source} -> {conversion.target}",
        by_ranks(received, lambda nbytes: f"{nbytes:,}"),
    )
