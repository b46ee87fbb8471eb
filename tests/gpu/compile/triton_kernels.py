"""Compile the Triton kernels of generated code for sm_90 without a GPU, see README.md.

    python -m tests.gpu.compile.triton_kernels code/bfloat16_256_gradients.py

Exit status 1 if a kernel does not compile.
"""

import argparse
import re
import time
from pathlib import Path

_KERNEL = re.compile(
    r"^triton_\w+ = async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.M | re.S
)


def compile_kernel(name: str, source: str) -> None:
    """Compile one kernel in its first configuration."""
    from torch._inductor.codecache import PyCodeCache

    kernel = getattr(PyCodeCache.load(source), name)
    kernel._precompile_config(kernel.configs[0])


def main(arguments: list[str] | None = None) -> int:
    """Compile every kernel of the files; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("code", type=Path, nargs="+", help="files of tests.gpu.compile.inductor")
    parser.add_argument("--guard", type=Path, help="fakeguard.cpp as a shared library")
    options = parser.parse_args(arguments)

    import torch._inductor.runtime.triton_helpers as helpers

    from tests.gpu.compile.fake_device import simulate, simulate_triton
    from tests.gpu.compile.inductor import configure

    simulate(options.guard)
    simulate_triton()
    configure()
    helpers.set_driver_to_gpu = lambda: None
    failed, begun = 0, time.monotonic()
    for path in options.code:
        kernels = _KERNEL.findall(path.read_text())
        for name, source in kernels:
            try:
                compile_kernel(name, source)
            except Exception as error:
                failed += 1
                print(f"{path}: {name}: {type(error).__name__}: {str(error)[:400]}")
        print(f"{path}: {len(kernels)} kernels, {time.monotonic() - begun:.0f} s so far")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
