"""Generate the GPU code of a trainer's functions without a GPU, see README.md.

    python -m tests.gpu.compile.inductor --precision bfloat16 --batch 256 --out code

Writes PRECISION_BATCH_FUNCTION.py for the gradients, the update and the validation.
"""

import argparse
from pathlib import Path
from typing import Any


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

    settings.compile_threads = 1
    settings.fx_graph_cache = False
    settings.force_disable_caches = True
    settings.joint_graph_constant_folding = False
    attention._get_sfdp_patterns = lambda *_: []
    patterns._misc_patterns_init = lambda *_: None
    padding._pad_mm_init = lambda *_: None


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
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("code"), help="folder (default code)")
    parser.add_argument("--guard", type=Path, help="fakeguard.cpp as a shared library")
    options = parser.parse_args(arguments)

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.gpu.compile.fake_device import build, simulate, simulate_triton

    simulate(options.guard)
    simulate_triton()
    configure()
    options.out.mkdir(parents=True, exist_ok=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        if options.deterministic:
            torch._C._set_deterministic_algorithms(True)
        for name, function in build(options.precision, options.batch, kept=options.kept).items():
            path = options.out / f"{options.precision}_{options.batch}_{name}.py"
            path.write_text(generate(function))
            print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
