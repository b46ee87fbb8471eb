"""Vectors of eight or sixteen float32 numbers for loops, as LLVM's code: numba's language has none.

numba keeps loops on disk by the date of their own file: a change here needs one there, as one of
`tandem.ops.conv.TILE` does.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.errors import TypingError
from numba.core.registry import cpu_target
from numba.extending import intrinsic


def _numbers_at_a_time(processor: str, features: str) -> int:
    """The numbers that a processor, as LLVM calls it, multiplies at a time."""
    # Zen 4 has AVX-512 and takes its vectors in two halves.
    return 16 if "+avx512f" in features.split(",") and processor != "znver4" else 8


# Those for which numba compiles, and to which what it keeps on disk belongs.
VECTOR = _numbers_at_a_time(*cpu_target.target_context.codegen().magic_tuple()[1:])
ROWS = 6 if VECTOR == 8 else 8  # of sums that `add_products` keeps in 16 or 32 registers
COLUMNS = 2 * VECTOR
_LINE = 16  # numbers of a line of the caches
_AHEAD = 512  # numbers that are read into the first cache before their turn


@intrinsic
def copy_vector(typing, target, to, source, at):  # type: ignore[no-untyped-def]
    """Copy a vector from one position to another, both of contiguous arrays."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        places = zip(signature.args[::2], arguments[::2], arguments[1::2], strict=True)
        into, out_of = (place(builder, address(context, builder, *each)) for each in places)
        builder.store(builder.load(out_of, align=4), into, align=4)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp), generate


@intrinsic
def add_products(  # type: ignore[no-untyped-def]
    typing, sums, into, down, adds, x, start, across, g, at, counts, steps
):
    """Add ``x[position + row * across] g[number, column]``, over positions, to sums.

    These are `ROWS` x `COLUMNS`. A row of sums begins at ``sums[into + row * down]``; they begin at
    0 unless `adds`. The positions begin at `start` and are reached by three nested loops, of
    `counts` and `steps`; g begins at `at` and has `COLUMNS` numbers for each position, one after
    the other. What lies behind them in g is fetched in advance.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, into, down, adds, _, start, across, _, at, counts, steps = arguments

        def element(operand: int, position: Any) -> Any:
            return address(context, builder, signature.args[operand], arguments[operand], position)

        # LLVM keeps in registers what a function has allocated for itself.
        places = []
        for row in range(ROWS):
            first = builder.add(into, builder.mul(down, index(row)))
            second = builder.add(first, index(VECTOR))
            places += [place(builder, element(0, position)) for position in (first, second)]
        totals = []
        for total in places:
            before = builder.load(total, align=4)
            begin = builder.select(adds, before, vector([0.0] * VECTOR))
            totals.append(cgutils.alloca_once_value(builder, begin))
        number = cgutils.alloca_once_value(builder, at)
        with ExitStack() as loops:
            position = start
            for axis in range(3):
                count, step = (builder.extract_value(each, axis) for each in (counts, steps))
                loop = loops.enter_context(cgutils.for_range(builder, count))
                position = builder.add(position, builder.mul(loop.index, step))
            first = builder.load(number)
            second = builder.add(first, index(VECTOR))
            builder.store(builder.add(second, index(VECTOR)), number)
            for line in range(0, COLUMNS, _LINE):
                _prefetch(builder, element(7, builder.add(first, index(_AHEAD + line))))
            halves = [
                builder.load(place(builder, element(7, each)), align=4) for each in (first, second)
            ]
            for row in range(ROWS):
                at_row = builder.add(position, builder.mul(across, index(row)))
                spread = _spread(builder, builder.load(element(4, at_row)))
                for half, total in zip(halves, totals[2 * row :][:2], strict=True):
                    builder.store(add_product(builder, builder.load(total), spread, half), total)
        for sum_place, total in zip(places, totals, strict=True):
            builder.store(builder.load(total), sum_place, align=4)
        return context.get_dummy_value()

    number, three = types.intp, types.UniTuple(types.intp, 3)
    operands = sums, number, number, types.boolean, x, number, number, g, number, three, three
    return types.void(*operands), generate


def index(number: int) -> ir.Constant:
    return ir.Constant(ir.IntType(64), number)


def vector(numbers: Sequence[float]) -> ir.Constant:
    return ir.Constant(ir.VectorType(ir.FloatType(), VECTOR), list(numbers))


def address(context: Any, builder: Any, kind: Any, array: Any, position: Any) -> Any:
    """The address of a number of a contiguous array of float32, of a numba type."""
    if kind.dtype != types.float32 or kind.layout != "C":
        raise TypingError(f"found {kind}, expected a contiguous array of float32")
    return builder.gep(context.make_array(kind)(context, builder, array).data, [position])


def place(builder: Any, number: Any) -> Any:
    """The address of the vector that begins at the address of a number."""
    return builder.bitcast(number, ir.VectorType(ir.FloatType(), VECTOR).as_pointer())


def add_product(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """``total + a b``, which may be one instruction, rounded once."""
    product = builder.fmul(a, b, flags=("contract",))
    return builder.fadd(total, product, flags=("contract",))


def _prefetch(builder: Any, number: Any) -> None:
    """Ask for a line of memory, whose address may be any."""
    byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    function = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
    fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], function)
    to_read, keep, data = (ir.Constant(flag, value) for value in (0, 3, 1))
    builder.call(fetch, [builder.bitcast(number, byte), to_read, keep, data])


def _spread(builder: Any, number: Any) -> Any:
    """A vector of equal numbers."""
    undefined = ir.Constant(ir.VectorType(ir.FloatType(), VECTOR), ir.Undefined)
    first = builder.insert_element(undefined, number, index(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), VECTOR), [0] * VECTOR)
    return builder.shuffle_vector(first, first, zeros)
