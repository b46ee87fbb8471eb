"""What the design rests on: memory handles between processes, one context with PyTorch, contention.

python -m tests.gpu.first.probe
"""

import argparse
import ctypes
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

SIDE = 8192  # of a matrix product
FILLS = 2000


def serve(handle: Any, slot: Any, layout: Any, pipe: Connection) -> None:
    """Fill the slot of another process as often as the pipe asks; send the seconds."""
    begun = time.perf_counter()
    from tandem.memory.cuda import CudaBuffer, CudaDriver, CudaSlot, SlotUploader

    driver = CudaDriver(0)
    opened = CudaBuffer.open(driver, handle)
    uploader = SlotUploader(driver, [CudaSlot.open(driver, layout, slot)])
    took = time.perf_counter() - begun
    pipe.send(f"opened {opened.nbytes >> 20} MiB by its handle {took:.2f} s after the start")

    def fill(staged: Any) -> None:
        staged.valid[...] = len(staged.labels)

    while (count := pipe.recv()) is not None:
        begun = time.perf_counter()
        for _ in range(count):
            uploader.fill(0, fill)
        uploader._stream.synchronize()
        pipe.send(time.perf_counter() - begun)
    uploader.close()
    opened.close()
    pipe.send("closed")


def probe() -> None:
    """Print what was found."""
    begun = time.perf_counter()
    from tandem.memory import SlotLayout
    from tandem.memory.cuda import CudaBuffer, CudaDriver, CudaSlot

    driver = CudaDriver(0)
    print(f"context: {time.perf_counter() - begun:.2f} s")
    import torch

    torch.cuda.set_device(0)
    torch.ones(1, device="cuda:0")
    current = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(current))
    print("one context with PyTorch:", current.value == driver._context.handle)

    layout = SlotLayout.of_pictures(256, 256)
    buffer, slot = CudaBuffer.create(driver, 64 << 20), CudaSlot.create(driver, layout)
    slot.end_reading(driver.stream())
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    handles = (buffer.handle(), slot.handle(), layout, there)
    child = context.Process(target=serve, args=handles, daemon=True)
    child.start()
    there.close()
    print(here.recv())

    x = torch.randn(SIDE, SIDE, device="cuda:0", dtype=torch.bfloat16)
    y = torch.randn_like(x)

    def seconds_of(step: Any, count: int) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / count

    seconds_of(lambda: x @ y, 40)
    alone = seconds_of(lambda: x @ y, 40)
    here.send(20)
    idle = here.recv() / 20
    here.send(FILLS)
    time.sleep(0.2)
    beside = seconds_of(lambda: x @ y, 40)
    while not here.poll(0):
        seconds_of(lambda: x @ y, 5)
    busy = here.recv() / FILLS
    print(f"a product: {1e3 * alone:.3f} ms, {2 * SIDE**3 / alone / 1e12:.0f} TFLOP/s")
    print(f"beside a process that copies: {1e3 * beside:.3f} ms, x {beside / alone:.3f}")
    rates = [layout.nbytes / seconds / 1e9 for seconds in (idle, busy)]
    print(f"a minibatch of {layout.nbytes / 1e6:.0f} MB to the GPU: {rates[0]:.1f} GB/s")
    print(f"beside products: {rates[1]:.1f} GB/s")
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0").random_()
    target = torch.empty_like(source)
    seconds_of(lambda: target.copy_(source), 3)
    copy = seconds_of(lambda: target.copy_(source), 20)
    print(f"a copy on the GPU: {2 * source.numel() / copy / 1e12:.2f} TB/s read and written")
    here.send(None)
    print(here.recv())


def main(arguments: list[str] | None = None) -> int:
    """Probe the first GPU; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    probe()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
