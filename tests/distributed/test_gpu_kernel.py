"""The kernel of the exchange between GPUs: its own source on the host, and compiled for GPUs."""

import ctypes
import functools
import shutil
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tandem.distributed import gpu_kernel
from tandem.distributed.gpu_kernel import (
    MOST_TRAINERS,
    compile_average,
    compile_source,
    kernel_parameters,
    kernel_source,
    pack_parameters,
)
from tandem.distributed.kernels import average_into_all
from tandem.distributed.shares import weights_and_divisor
from tandem.errors import InputError
from tandem.memory.cuda import CudaDriver

DTYPES = [np.dtype("float32"), np.dtype("float64")]

# What CUDA has and C++ has not; a block's threads run one after another.
BEFORE = """
#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
struct Place { unsigned x; };
static Place gridDim, blockDim, blockIdx, threadIdx;
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static double __dmul_rn(double a, double b) { return a * b; }
static double __dadd_rn(double a, double b) { return a + b; }
static double __ddiv_rn(double a, double b) { return a / b; }
"""
AFTER = """
#include <cstddef>
extern "C" void launch(const Average *given, unsigned grid, unsigned block)
{
    gridDim.x = grid; blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++)
            average(*given);
}
extern "C" const size_t offsets[] = {
    offsetof(Average, count), offsetof(Average, packs), offsetof(Average, terms),
    offsetof(Average, targets), offsetof(Average, divisor), offsetof(Average, weights),
    offsetof(Average, sources), offsetof(Average, results)};
"""


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernel's source as a library of the host, which is launched as PyCUDA launches it."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    dtype, folder = request.param, tmp_path_factory.mktemp("kernel")
    source, library = folder / "average.cpp", folder / "average.so"
    source.write_text(BEFORE + kernel_source(dtype) + AFTER)
    options = [
        "-std=c++17",
        "-O2",
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-shared",
        "-fPIC",
        "-Wall",
    ]
    command = [compiler, *options, "-Wno-unused-function", "-Werror", source, "-o", library]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))

    def launch(given: Any, grid: tuple[int, int], block: tuple[int, int, int], stream: Any) -> None:
        data = bytes(memoryview(given))  # as PyCUDA passes it
        loaded.launch(ctypes.create_string_buffer(data, len(data)), grid[0], block[0])

    return SimpleNamespace(dtype=dtype, library=loaded, launch=launch)


@pytest.fixture
def average(host: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(gpu_kernel, "compile_source", lambda source, architecture: b"")
    driver: Any = SimpleNamespace(architecture="", load_kernel=lambda code, name: host.launch)
    return compile_average(driver, host.dtype)


def run(average: Any, vectors: list[np.ndarray], shares: list[float]) -> None:
    weights, divisor = weights_and_divisor(shares)
    addresses = [vector.ctypes.data for vector in vectors]
    terms = [pair for pair in zip(addresses, weights, strict=True) if pair[1] > 0]
    average(addresses, terms, divisor, vectors[0].size, vectors[0].dtype, None)


def make(rng: np.random.Generator, size: int, offset: int, dtype: np.dtype) -> np.ndarray:
    """Numbers of all sizes, `offset` elements behind an address that is a multiple of 64 bytes."""
    memory = np.zeros((size + offset) * dtype.itemsize + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset * dtype.itemsize
    vector = memory[start : start + size * dtype.itemsize].view(dtype)
    vector[:] = rng.normal(size=size) * 10.0 ** rng.integers(-20, 20, size)
    return vector


def by_numpy(vectors: list[np.ndarray], shares: list[float]) -> np.ndarray:
    kind, (weights, divisor) = vectors[0].dtype.type, weights_and_divisor(shares)
    products = [v * kind(w) for v, w in zip(vectors, weights, strict=True) if w > 0]
    return functools.reduce(np.add, products) / kind(divisor)


@pytest.mark.parametrize("trainers", range(1, 10))
def test_the_kernel_rounds_and_adds_as_numpy_does(host: Any, average: Any, trainers: int) -> None:
    rng = np.random.default_rng(trainers)
    for size in (1, 2, 3, 4, 5, 63, 64, 1021, 1024, 4099):
        for offsets in ([0] * trainers, [1] * trainers, list(range(trainers))):
            counts = rng.integers(1, 129, trainers)
            if trainers > 1 and size % 2 == 0:
                counts[rng.integers(trainers)] = 0
            shares = (counts / counts.sum()).tolist()
            vectors = [make(rng, size, offset, host.dtype) for offset in offsets]
            for vector, share in zip(vectors, shares, strict=True):
                if share == 0:
                    vector[:] = np.nan
            expected = by_numpy(vectors, shares)
            run(average, vectors, shares)
            for vector in vectors:
                assert vector.tobytes() == expected.tobytes()


def test_the_bits_are_those_of_the_exchange_on_the_host(host: Any, average: Any) -> None:
    vectors = [make(np.random.default_rng(rank), 1021, 0, host.dtype) for rank in range(3)]
    expected, shares = [vector.copy() for vector in vectors], [128 / 301, 128 / 301, 45 / 301]
    average_into_all(expected, shares)
    run(average, vectors, shares)
    for vector in vectors:
        assert vector.tobytes() == expected[0].tobytes()


def test_as_many_trainers_as_the_kernel_has_places_for(host: Any, average: Any) -> None:
    rng = np.random.default_rng(0)
    vectors = [make(rng, 1000, 0, host.dtype) for _ in range(MOST_TRAINERS)]
    shares = [1 / MOST_TRAINERS] * MOST_TRAINERS
    expected = by_numpy(vectors, shares)
    run(average, vectors, shares)
    for vector in vectors:
        assert vector.tobytes() == expected.tobytes()


def test_a_large_vector_takes_several_turns_of_the_threads(
    host: Any, average: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_kernel, "_LARGEST_GRID", 2)
    vectors = [np.full(10_003, value, host.dtype) for value in (1, 2)]
    run(average, vectors, [0.5, 0.5])
    for vector in vectors:
        assert (vector == 1.5).all()


def test_nothing_beside_the_vectors_is_written(host: Any, average: Any) -> None:
    memory = np.full(1050, 7, host.dtype)
    inside = memory[11:1037]
    run(average, [inside, np.zeros(inside.size, host.dtype)], [0.5, 0.5])
    assert (inside == 3.5).all()
    assert (memory[:11] == 7).all()
    assert (memory[1037:] == 7).all()


def test_the_parameter_is_laid_out_as_the_kernel_reads_it(host: Any) -> None:
    layout = kernel_parameters(host.dtype)
    offsets = (ctypes.c_size_t * len(layout)).in_dll(host.library, "offsets")
    assert list(offsets) == [layout.fields[name][1] for name in layout.names]
    assert layout.itemsize <= 4096


@pytest.mark.parametrize(("offset", "packs"), [(0, 250), (16, 250), (4, 0)])
def test_aligned_vectors_are_read_in_packs(offset: int, packs: int) -> None:
    targets, terms = [256, 512 + offset], [(256, 0.5), (512 + offset, 0.5)]
    assert pack_parameters(targets, terms, 1.0, 1003, np.dtype("float32"))["packs"] == packs


class Refused(Exception):
    """PyCUDA's base of errors."""


class FakePyCuda:
    """What a driver needs of ``pycuda.driver`` to load a kernel for a device."""

    Error = Refused

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.loaded: list[bytes] = []
        self._capability = capability

    def Device(self, number: int) -> Any:
        return SimpleNamespace(compute_capability=lambda: self._capability)

    def module_from_buffer(self, code: bytes) -> Any:
        if not code:
            raise Refused("device kernel image is invalid")
        self.loaded.append(code)
        return SimpleNamespace(get_function=lambda name: f"{name} of {code.decode()}")


def driver_of(cuda: FakePyCuda) -> CudaDriver:
    driver = object.__new__(CudaDriver)
    vars(driver).update(device=3, _cuda=cuda)
    return driver


@pytest.mark.parametrize(
    ("capability", "name"), [((8, 0), "sm_80"), ((9, 0), "sm_90"), ((12, 1), "sm_121")]
)
def test_the_architecture_is_the_devices(capability: tuple[int, int], name: str) -> None:
    assert driver_of(FakePyCuda(capability)).architecture == name


def test_a_driver_loads_the_kernel_or_reports_why_not() -> None:
    driver = driver_of(FakePyCuda())
    assert driver.load_kernel(b"code", "average") == "average of code"
    with pytest.raises(InputError, match="cuda:3 can't load the kernel 'average': device kernel"):
        driver.load_kernel(b"", "average")


# By NVRTC, for GPUs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_120"])
def test_nvrtc_compiles_the_kernel(dtype: np.dtype, architecture: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    try:
        code = compile_source(kernel_source(dtype), architecture)
    except InputError as error:
        if "can't be loaded" in str(error):
            pytest.skip(str(error))
        raise
    assert code.startswith(b"\x7fELF")
    assert b"average" in code


def fake_nvrtc(monkeypatch: pytest.MonkeyPatch, **calls: Any) -> None:
    """Put a module in NVRTC's place."""
    package, module = ModuleType("cuda.bindings"), ModuleType("cuda.bindings.nvrtc")
    vars(module).update(calls)
    vars(package)["nvrtc"] = module
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", module)


def test_without_cuda_bindings_the_message_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(InputError, match=r"cuda-bindings, which can't be imported.*pip install"):
        compile_source("", "sm_90")


def test_without_its_library_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("Failure finding libnvrtc.so\n  no such file")

    fake_nvrtc(monkeypatch, nvrtcCreateProgram=fail)
    message = r"libnvrtc can't be loaded: Failure finding libnvrtc\.so; .*nvidia-cuda-nvrtc"
    with pytest.raises(InputError, match=message):
        compile_source("", "sm_90")


def test_what_nvrtc_reports_is_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    class Status(int):
        name = "NVRTC_ERROR_COMPILATION"

    def log(program: Any, buffer: bytes) -> tuple[int]:
        ctypes.memmove(buffer, b"line 1: no", 10)
        return (0,)

    destroyed: list[str] = []
    fake_nvrtc(
        monkeypatch,
        nvrtcCreateProgram=lambda *_: (0, "program"),
        nvrtcCompileProgram=lambda *_: (Status(6),),
        nvrtcGetProgramLogSize=lambda program: (0, 12),
        nvrtcGetProgramLog=log,
        nvrtcDestroyProgram=destroyed.append,
    )
    message = "kernel for sm_20: NVRTC_ERROR_COMPILATION: line 1: no$"
    with pytest.raises(InputError, match=message):
        compile_source("", "sm_20")
    assert destroyed == ["program"]
