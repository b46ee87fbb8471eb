"""Compile the CUDA kernels of the exchange without a GPU, by NVRTC.

python -m tests.gpu.compile.nvrtc --library libnvrtc.so.13 --architecture sm_90
"""

import argparse
import ctypes
import itertools
import time

from tandem.distributed.peer_to_peer import average_source


def compile_source(library: ctypes.CDLL, source: str, architecture: str) -> int:
    """Compile CUDA source; return the bytes of the result.

    Raises
    ------
    RuntimeError
        It does not compile; the message is the compiler's log.
    """
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    if library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"exchange.cu", 0, None, None
    ):
        raise RuntimeError("NVRTC made no program")
    option = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
    failed = library.nvrtcCompileProgram(program, 1, option)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    if failed or library.nvrtcGetCUBINSize(program, ctypes.byref(size)):
        raise RuntimeError(log.value.decode())
    return size.value


def main(arguments: list[str] | None = None) -> int:
    """Compile the sum of one to eight vectors in both precisions; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", default="libnvrtc.so.13", help="CUDA's runtime compiler")
    parser.add_argument("--architecture", default="sm_90", help="of the GPU (default sm_90)")
    options = parser.parse_args(arguments)
    library = ctypes.CDLL(options.library)
    for dtype, terms in itertools.product(("float32", "float64"), range(1, 9)):
        begun = time.monotonic()
        size = compile_source(library, average_source(dtype, terms), options.architecture)
        print(f"{dtype}, {terms} terms: {size} bytes, {1e3 * (time.monotonic() - begun):.0f} ms")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
