"""Where the time of a training step goes: kernels by device time.

python -m tests.gpu.first.profile_step --batch 256 --precision bfloat16 --out runs/first_gpu
"""

import argparse
from dataclasses import replace
from pathlib import Path

STEPS, PROFILED = 50, 5


def main(arguments: list[str] | None = None) -> int:
    """Time and profile a step; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=256, help="images of a step (default 256)")
    parser.add_argument("--precision", default="bfloat16", help="float32, tf32 or bfloat16")
    parser.add_argument("--mode", default="ours", help="a contender of benchmarks.gpu")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the whole table")
    options = parser.parse_args(arguments)

    import torch
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.gpu_contenders import CONTENDERS, StepSetting
    from benchmarks.roofline import step_flops
    from examples.resident_step import PAPER
    from tandem.backend import on_stream
    from tandem.memory.cuda import CudaDriver

    driver, sizes = CudaDriver(0), replace(PAPER, batch=options.batch)
    stream = driver.stream()
    torch.backends.cudnn.benchmark = True
    with on_stream("cuda:0", stream.handle):
        replay = CONTENDERS[options.mode].make(StepSetting(sizes, options.precision, driver))
        for _ in range(10):
            replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(STEPS):
            replay()
        end.record()
        end.synchronize()
        seconds = begin.elapsed_time(end) / STEPS / 1e3
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(PROFILED):
                replay()
            torch.cuda.synchronize()
    table = found.key_averages().table(
        sort_by="cuda_time_total", row_limit=200, max_name_column_width=110
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"profile-{options.mode}-{options.precision}-{options.batch}.txt").write_text(
        table
    )
    rate = step_flops(sizes.network(), options.batch) / seconds / 1e12
    print(
        f"batch {options.batch}, {options.precision}: {1e3 * seconds:.3f} ms, "
        f"{options.batch / seconds:.0f} images/s, {rate:.0f} TFLOP/s"
    )
    print("\n".join(table.splitlines()[:28]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
