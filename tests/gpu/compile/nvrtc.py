"""Compile the CUDA kernel of the exchange without a GPU, by NVRTC.

python -m tests.gpu.compile.nvrtc --architecture sm_90
"""

import argparse
import time

import numpy as np

from tandem.distributed.gpu_kernel import compile_source, kernel_source


def main(arguments: list[str] | None = None) -> int:
    """Compile the kernel in both precisions; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architecture", default="sm_90", help="of the GPU (default sm_90)")
    options = parser.parse_args(arguments)
    for dtype in (np.dtype("float32"), np.dtype("float64")):
        begun = time.monotonic()
        size = len(compile_source(kernel_source(dtype), options.architecture))
        print(f"{dtype}: {size} bytes, {1e3 * (time.monotonic() - begun):.0f} ms")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
