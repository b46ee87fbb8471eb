"""Generate and compile the GPU code of a trainer's functions without a GPU, see README.md.

    python -m tests.gpu.compile.inductor --precision bfloat16 --batch 256 --out code

Writes PRECISION_BATCH_FUNCTION.py for each function, and compiles every Triton kernel in it for
sm_90. Exit status 1 if one does not compile.
"""

import argparse
import re
import time
from pathlib import Path
from typing import Any

from tests.gpu.compile.fake_device import FUNCTIONS, build, simulate, simulate_triton

_KERNEL = re.compile(
    r"^triton_\w+ = async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.M | re.S
)


def generate(function: Any) -> str:
    """Return Inductor's code of a function built by `fake_device.build`."""
    import torch
    from torch._inductor.graph import GraphLowering

    plain, code = GraphLowering.codegen, []

    def codegen(lowering: Any) -> Any:
        found = plain(lowering)[0]
        code.append(getattr(found, "value", found))
        raise RuntimeError("the code is generated, and that is all")

    program = function.vm.program
    values = [each.value for each in function.maker.inputs]
    inputs = [value.storage[0] if hasattr(value, "storage") else value for value in values]
    inputs = [each.view(1) if i in program.as_vectors else each for i, each in enumerate(inputs)]
    GraphLowering.codegen = codegen
    try:
        torch.compile(program.run, fullgraph=True, dynamic=False)(*inputs)
    except Exception:
        if not code:
            raise
    finally:
        GraphLowering.codegen = plain
    return str(code[0])


def configure() -> None:
    """Keep Inductor from caches, from other processes, and from patterns that need a device."""
    import torch._inductor.config as settings
    import torch._inductor.fx_passes.fuse_attention as attention
    import torch._inductor.fx_passes.misc_patterns as patterns
    import torch._inductor.fx_passes.pad_mm as padding
    import torch._inductor.runtime.triton_helpers as helpers

    settings.compile_threads = 1
    settings.fx_graph_cache = False
    settings.force_disable_caches = True
    settings.joint_graph_constant_folding = False
    attention._get_sfdp_patterns = lambda *_: []
    patterns._misc_patterns_init = lambda *_: None
    padding._pad_mm_init = lambda *_: None
    helpers.set_driver_to_gpu = lambda: None


def compile_kernels(code: str) -> list[str]:
    """Compile every Triton kernel, in its first configuration; return the errors."""
    from torch._inductor.codecache import PyCodeCache

    found = []
    for name, source in _KERNEL.findall(code):
        kernel = getattr(PyCodeCache.load(source), name)
        try:
            kernel._precompile_config(kernel.configs[0])
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {str(error)[:400]}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Write the code of each function; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precision", default="bfloat16", help="float32, tf32 or bfloat16")
    parser.add_argument("--batch", type=int, default=256, help="images of a step (default 256)")
    parser.add_argument(
        "--kept", type=int, default=0, help="pictures of each split that the GPU keeps (default 0)"
    )
    parser.add_argument("--rand-colour", type=float, default=0.0, help="colour noise (default 0)")
    parser.add_argument("--crop", type=int, default=227, help="pixels (default 227)")
    parser.add_argument("--width", type=float, default=1.0, help="factor on filters (default 1)")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--functions", nargs="+", default=FUNCTIONS, choices=FUNCTIONS)
    parser.add_argument("--out", type=Path, default=Path("code"), help="folder (default code)")
    options = parser.parse_args(arguments)

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    simulate()
    simulate_triton()
    configure()
    options.out.mkdir(parents=True, exist_ok=True)
    status = 0
    with FakeTensorMode(allow_non_fake_inputs=True):
        if options.deterministic:
            torch._C._set_deterministic_algorithms(True)
        functions = build(
            options.precision,
            options.batch,
            options.functions,
            crop=options.crop,
            kept=options.kept,
            rand_colour=options.rand_colour,
            width=options.width,
        )
        generated = {name: generate(function) for name, function in functions.items()}
    for name, code in generated.items():
        path, begun = options.out / f"{options.precision}_{options.batch}_{name}.py", time.time()
        path.write_text(code)
        errors = compile_kernels(code)
        status |= bool(errors)
        kernels = len(_KERNEL.findall(code))
        print(
            f"{path}: {kernels} kernels compiled in {time.time() - begun:.0f} s", *errors, sep="\n"
        )
    return status


if __name__ == "__main__":
    raise SystemExit(main())
