"""Averaging with half the bytes: vectors travel in 16 bits and are added in 32."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from tandem.distributed.allreduce import (
    AllReduce,
    Format,
    blocks,
    library_of,
    shard,
    weigh,
    zeros_like,
)
from tandem.distributed.group import Group
from tandem.distributed.rank_vector import RankVector


class TransferFormat:
    """A floating-point format of 16 bits, by PyTorch's conversions, for arrays and for tensors.

    float16 has 11 significant bits and reaches from 6e-5 to 65504; bfloat16 has 8, and float32's
    range.
    """

    def __init__(self, name: Format) -> None:
        self._name = name
        # Vectors are scaled so that their largest element is below two to this power: rounding up
        # included, nothing overflows float16.
        self.largest_exponent = 15 if name == "float16" else None

    def narrow(self, source: Any, target: Any) -> None:
        """Round float32 (n,) to the nearest, ties to even, into uint16 (n,) that hold its bits."""
        import torch

        self._view(target).copy_(torch.as_tensor(source))

    def widen(self, source: Any, target: Any) -> None:
        """Write the values whose bits are uint16 (n,) into float32 (n,)."""
        import torch

        torch.as_tensor(target).copy_(self._view(source))

    def _view(self, bits: Any) -> Any:
        import torch

        return torch.as_tensor(bits).view(getattr(torch, self._name))


class CompressedAllReduce(AllReduce):
    """ASA16: as ASA, but vectors travel in 16 bits; they are added in float32, in rank order.

    Rank r sends ``q_r = round(share_r x_r)``. The owner of a shard adds ``y = sum q_r`` and sends
    ``z = round(y)``, which every rank takes, its owner too, so that all hold the same bits. With
    u the unit roundoff (2**-11 for float16, 2**-8 for bfloat16), and but for float32's own
    rounding and what lies below the format's normal numbers,

        ``|z - sum share_r x_r| <= u sum |share_r x_r| + u |y|``, and
        ``|y| <= (1 + u) sum |share_r x_r|``, so the error is at most ``(2 u + u**2)`` of that sum.

    float16 has a small range, so each rank multiplies what it sends by a power of two that brings
    its largest element to [2**14, 2**15), which is exact; elements that are smaller than 2**-29 of
    the largest lose relative precision, at an absolute error of at most 2**-40 of the largest.

    Running averages are of another size than the weights or gradients that they lie with, which
    would have few bits left beside them, and are few: they travel in float32 (`make_piecewise`).

    With error feedback, what a rounding has lost is added to what is sent in the next step (Seide
    et al. 2014, section 3; on both ways as Tang et al. 2019, "DoubleSqueeze"): the sums over many
    steps are then off by no more than one step's rounding. What is kept so is in no checkpoint.
    """

    def __init__(self, group: Group, vector: Any, transfer: TransferFormat, feedback: bool) -> None:
        if str(vector.dtype) not in ("float32", "torch.float32"):
            raise ValueError(f"vectors of {vector.dtype} do not travel in 16 bits, float32 does")
        self._group, self._transfer, length = group, transfer, len(vector)
        self._parts = [shard(length, group.size, rank) for rank in range(group.size)]
        self._own = self._parts[group.rank]
        size = self._own.stop - self._own.start
        self._packed = zeros_like(vector, length, "uint16")
        self._received = zeros_like(vector, (group.size, size), "uint16")
        self._total = zeros_like(vector, size)
        self._lost = zeros_like(vector, length) if feedback else None
        self._lost_sum = zeros_like(vector, size) if feedback else None
        largest = max((part.stop - part.start for part in blocks(vector)), default=0)
        self._term = zeros_like(vector, largest)

    def average(self, vector: Any, shares: Sequence[float]) -> None:
        if self._group.size == 1:
            return
        weigh(vector, shares[self._group.rank])
        scales = self._group.all_gather_object(self._pack(vector, self._packed, self._lost))
        self._group.all_to_all(self._packed, self._received, self._parts)
        self._total[...] = 0
        for packed, scale in zip(self._received, scales, strict=True):
            self._add(packed, scale, self._total)
        own = self._packed[self._own]
        scales = self._group.all_gather_object(self._pack(self._total, own, self._lost_sum))
        self._group.all_gather(self._packed, self._parts)
        vector[...] = 0
        for part, scale in zip(self._parts, scales, strict=True):
            self._add(self._packed[part], scale, vector[part])

    def _pack(self, values: Any, packed: Any, lost: Any | None) -> float:
        """Round values and what was lost before into 16 bits; return their scale.

        `values` are overwritten, `lost` becomes what this rounding has lost.
        """
        if lost is not None:
            values += lost
        scale, library = self._scale(values), library_of(values)
        for block in blocks(values):
            term = self._term[: block.stop - block.start]
            library.multiply(values[block], scale, out=term)
            self._transfer.narrow(term, packed[block])
            if lost is not None:
                self._transfer.widen(packed[block], term)
                term *= 1 / scale
                library.subtract(values[block], term, out=lost[block])
        return scale

    def _add(self, packed: Any, scale: float, total: Any) -> None:
        for block in blocks(total):
            term = self._term[: block.stop - block.start]
            self._transfer.widen(packed[block], term)
            term *= 1 / scale
            total[block] += term

    def _scale(self, values: Any) -> float:
        """A power of two that makes good use of the format's range."""
        if self._transfer.largest_exponent is None:
            return 1.0
        largest = max((float(abs(values[b]).max()) for b in blocks(values)), default=0.0)
        if largest == 0 or not math.isfinite(largest):
            return 1.0
        return 2.0 ** min(self._transfer.largest_exponent - math.frexp(largest)[1], 126)


class PiecewiseAllReduce(AllReduce):
    """Average pieces of a vector, each by an all-reduce of its own."""

    def __init__(self, pieces: Sequence[tuple[slice, AllReduce]]) -> None:
        self._pieces = pieces

    def average(self, vector: Any, shares: Sequence[float]) -> None:
        for piece, all_reduce in self._pieces:
            all_reduce.average(vector[piece], shares)


def make_piecewise(
    vector: RankVector,
    parts: Sequence[slice],
    compress: Callable[[Any], AllReduce],
    keep: Callable[[Any], AllReduce],
) -> list[AllReduce]:
    """Make what averages each part: `keep` where the vector is exact, `compress` elsewhere.

    A part without exact elements is averaged as one. Collective.
    """
    divided = [_divide(part, vector.exact) for part in parts]

    def make(is_exact: bool, make_one: Callable[[Any], AllReduce]) -> list[AllReduce]:
        pieces = [piece for pieces in divided for piece, exact in pieces if exact == is_exact]
        return vector.by_messages(pieces, make_one)

    made = {
        is_exact: iter(make(is_exact, one)) for is_exact, one in ((False, compress), (True, keep))
    }
    found: list[AllReduce] = []
    for part, pieces in zip(parts, divided, strict=True):
        own = [
            (slice(piece.start - part.start, piece.stop - part.start), next(made[exact]))
            for piece, exact in pieces
        ]
        found.append(own[0][1] if len(own) == 1 else PiecewiseAllReduce(own))
    return found


def _divide(part: slice, exact: slice) -> list[tuple[slice, bool]]:
    """The pieces of a part before, within and behind what is exact; the part if it has none."""
    begin, end = (min(max(at, part.start), part.stop) for at in (exact.start, exact.stop))
    if begin == end:
        return [(part, False)]
    pieces = [(slice(part.start, begin), False), (slice(begin, end), True)]
    return [
        each for each in [*pieces, (slice(end, part.stop), False)] if each[0].start < each[0].stop
    ]
