"""The kernel of the exchange between GPUs, compiled when a run starts by NVRTC, CUDA's library."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tandem.errors import InputError
from tandem.memory.cuda import CudaDriver, Stream

MOST_TRAINERS = 64  # of one machine: a kernel takes 4 KB of parameters, and these take 1.6

Kernel = Callable[[Sequence[int], Sequence[tuple[int, float]], float, int, np.dtype, Stream], None]
"""Called with the addresses of targets, (address, weight) of each term, what their sum is divided
by, the number of elements, their dtype, and a stream."""

_INSTALL = (
    "`make gpu` installs both, or `pip install cuda-bindings nvidia-cuda-nvrtc` in the versions of "
    "PyTorch's CUDA"
)
_THREADS, _LARGEST_GRID = 256, 4096
_PACK = 16  # bytes that a thread loads and stores at once

_SOURCE = """
struct Average {
    unsigned long long count;  // elements of each vector
    unsigned long long packs;  // of them are loaded and stored WIDTH at a time
    int terms, targets;
    Real divisor;
    Real weights[MOST];
    const Real *sources[MOST];
    Real *results[MOST];
};

// A load or a store of a whole pack is one instruction.
template <int width> struct alignas(sizeof(Real) * width) Pack { Real at[width]; };

// A source may be a target too: element i is read everywhere before it is written anywhere.
template <int width>
__device__ __forceinline__ void average_packs(
    const Average &given, unsigned long long begin, unsigned long long end)
{
    typedef Pack<width> Elements;
    unsigned long long step = (unsigned long long) gridDim.x * blockDim.x;
    unsigned long long i = begin + (unsigned long long) blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < end; i += step) {
        Elements total = reinterpret_cast<const Elements *>(given.sources[0])[i];
        for (int e = 0; e < width; e++)
            total.at[e] = multiply(total.at[e], given.weights[0]);
        for (int k = 1; k < given.terms; k++) {
            Elements term = reinterpret_cast<const Elements *>(given.sources[k])[i];
            for (int e = 0; e < width; e++)
                total.at[e] = add(total.at[e], multiply(term.at[e], given.weights[k]));
        }
        for (int e = 0; e < width; e++)
            total.at[e] = divide(total.at[e], given.divisor);
        for (int k = 0; k < given.targets; k++)
            reinterpret_cast<Elements *>(given.results[k])[i] = total;
    }
}

extern "C" __global__ void average(const __grid_constant__ Average given)
{
    average_packs<WIDTH>(given, 0, given.packs);
    average_packs<1>(given, given.packs * WIDTH, given.count);
}
"""


def kernel_parameters(dtype: np.dtype) -> np.dtype:
    """Return the layout of the kernel's one parameter, the struct `Average`."""
    fields = [
        ("count", "u8"),
        ("packs", "u8"),
        ("terms", "i4"),
        ("targets", "i4"),
        ("divisor", dtype),
        ("weights", dtype, MOST_TRAINERS),
        ("sources", "u8", MOST_TRAINERS),
        ("results", "u8", MOST_TRAINERS),
    ]
    return np.dtype(fields, align=True)


def kernel_source(dtype: np.dtype) -> str:
    """The CUDA source of the kernel that adds vectors of a dtype.

    Products, sums and the quotient are rounded one by one, never fused: the result has the bits of
    `tandem.distributed.kernels.average_into_all`.
    """
    real, letter = {"float32": ("float", "f"), "float64": ("double", "d")}[dtype.name]
    before = [
        f"typedef {real} Real;",
        f"#define MOST {MOST_TRAINERS}",
        f"#define WIDTH {_PACK // dtype.itemsize}",
        f"#define multiply __{letter}mul_rn",
        f"#define add __{letter}add_rn",
        f"#define divide __{letter}div_rn",
    ]
    size = f'static_assert(sizeof(Average) == {kernel_parameters(dtype).itemsize}, "layout");'
    return "\n".join([*before, _SOURCE, size, ""])


def pack_parameters(
    targets: Sequence[int],
    terms: Sequence[tuple[int, float]],
    divisor: float,
    count: int,
    dtype: np.dtype,
) -> Any:
    """Return the kernel's parameter, a struct.

    The kernel reads and writes `count` elements at each of these addresses.
    """
    found = np.zeros((), kernel_parameters(dtype))
    sources, weights = zip(*terms, strict=True)
    # Shards begin on multiples of 16 bytes; what the caller chose to average need not.
    is_aligned = all(address % _PACK == 0 for address in (*targets, *sources))
    found["count"], found["packs"] = count, is_aligned * (count * dtype.itemsize // _PACK)
    found["terms"], found["targets"], found["divisor"] = len(terms), len(targets), divisor
    found["weights"][: len(terms)], found["sources"][: len(terms)] = weights, sources
    found["results"][: len(targets)] = targets
    return found[()]


def compile_average(driver: CudaDriver, dtype: np.dtype) -> Kernel:
    """Compile the kernel that averages vectors of a dtype, at least one element of each.

    It is for a driver's device. Raises InputError if NVRTC is missing, or does not know the device.
    """
    code = compile_source(kernel_source(dtype), driver.architecture)
    function = driver.load_kernel(code, "average")

    def average(
        targets: Sequence[int],
        terms: Sequence[tuple[int, float]],
        divisor: float,
        count: int,
        dtype: np.dtype,
        stream: Stream,
    ) -> None:
        given = pack_parameters(targets, terms, divisor, count, dtype)
        threads = int(given["packs"]) or count
        grid = (min(_LARGEST_GRID, -(-threads // _THREADS)), 1)
        function(given, block=(_THREADS, 1, 1), grid=grid, stream=stream)

    return average


def compile_source(source: str, architecture: str) -> bytes:
    """Compile CUDA source to machine code for an architecture, such as ``sm_90``.

    Raises InputError if NVRTC is missing, or refuses the source or the architecture.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise InputError(
            f"the exchange between GPUs needs NVRTC through cuda-bindings, which can't be "
            f"imported: {error}; {_INSTALL}"
        ) from error
    try:
        # NVRTC itself is loaded by the first call.
        made = nvrtc.nvrtcCreateProgram(source.encode(), b"average.cu", 0, None, None)
    except RuntimeError as error:
        text = str(error).strip().splitlines()[0]
        raise InputError(
            f"the exchange between GPUs needs NVRTC, and the library libnvrtc can't be loaded: "
            f"{text}; {_INSTALL}"
        ) from error
    program = _result(made, "make a program")
    try:
        options = [f"--gpu-architecture={architecture}".encode()]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status:
            size = _result(nvrtc.nvrtcGetProgramLogSize(program), "report")
            log = b" " * size
            _result(nvrtc.nvrtcGetProgramLog(program, log), "report")
            text = log.decode(errors="replace").strip(" \0\n")
            raise InputError(
                f"NVRTC can't compile the exchange's kernel for {architecture}: "
                f"{status.name}: {text}"
            )
        code = b" " * _result(nvrtc.nvrtcGetCUBINSize(program), "give code")
        _result(nvrtc.nvrtcGetCUBIN(program, code), "give code")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code


def _result(answer: tuple[Any, ...], what: str) -> Any:
    """Return what a call of NVRTC returns besides its status."""
    status, *found = answer
    if status:
        raise InputError(f"NVRTC can't {what} for the exchange's kernel: {status.name}")
    return found[0] if found else None
