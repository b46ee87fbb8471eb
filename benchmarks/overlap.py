"""What is gained by sending gradients in buckets while others are being computed?

    python -m benchmarks.overlap                 two simulated machines, a cable of 1 Gbit/s
    python -m benchmarks.overlap --machines 1    two ranks on this machine

AlexNet's gradients on two ranks of one thread each: alone, then averaged as a whole (`asa`), and
averaged in buckets meanwhile, in turn; the time is that of the slower rank.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.measure import in_turn, parser_of, seconds_per_call
from benchmarks.ranks import start
from examples.resident_step import ResidentStep, Sizes
from tests.support.machines import MACHINES, missing_for_two_machines

RANKS = 2
BUCKETS = (5.0, 25.0, 100.0)  # MB


def serve(batch: int, crop: int, rounds: int) -> None:
    """Measure, as one of the ranks; rank 0 prints a JSON line for each contender."""
    import torch

    from tandem.backend import keep_freed_memory
    from tandem.distributed.mpi import join

    world = join()
    torch.set_num_threads(1)
    keep_freed_memory()

    def slowest(step: Callable[[], None]) -> float:
        world.barrier()
        return float(max(world.all_gather_object(seconds_per_call(step))))

    contenders = make_contenders(world, Sizes(batch, crop, crop + 29, 1000, 1.0))
    found = in_turn({name: partial(slowest, step) for name, step in contenders.items()}, rounds)
    if world.rank == 0:
        for name, measured in found.items():
            print(json.dumps({"name": name, "seconds": measured.seconds}), flush=True)
    world.barrier()


def make_contenders(world: Any, sizes: Sizes) -> dict[str, Callable[[], None]]:
    """Make the contenders, by name."""
    from tandem.backend import device_mode
    from tandem.distributed import Exchange, ExchangeSettings, make_exchange
    from tandem.memory import HostSlots, SlotLayout
    from tandem.memory.parameters import HostMemory

    listening: list[Exchange] = [Exchange()]

    def on_gradient_ready(name: str) -> None:
        listening[0].on_gradient_ready(name.removeprefix("gradient/"))

    resident = ResidentStep(device_mode(), sizes)
    whole = resident.functions[0]
    reporting = resident.compile(device_mode(on_gradient_ready=on_gradient_ready))[0]
    shares = [1 / world.size] * world.size

    def step(function: Callable[[], Any], exchange: Exchange) -> None:
        listening[0] = exchange
        exchange.before_gradients(shares)
        function()
        exchange.before_update(shares)

    def exchange(megabytes: float) -> Exchange:
        chosen = {"exchange": "gradients", "collective": "asa", "bucket_mb": megabytes}
        return make_exchange(ExchangeSettings.of(chosen), memory, world)

    parameters = np.zeros(resident.layout.parameters_nbytes, np.uint8)
    gradients = resident.gradient_vector.view(np.uint8)
    slots = HostSlots.create(SlotLayout.of_pictures(1, 1), world.rank)
    memory = HostMemory(slots, resident.layout, [parameters], [gradients])

    found = {
        "no exchange": partial(step, whole, Exchange()),
        "as a whole": partial(step, whole, exchange(0)),
    }
    for megabytes in BUCKETS:
        found[f"in buckets of {megabytes:g} MB"] = partial(step, reporting, exchange(megabytes))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print each contender's median and its ratio to the exchange as a whole."""
    parser = parser_of(__doc__, prog="python -m benchmarks.overlap")
    parser.add_argument("--machines", type=int, choices=(1, MACHINES), default=2)
    parser.add_argument("--batch", type=int, default=32, help="pictures of a rank (default 32)")
    parser.add_argument("--crop", type=int, default=227, help="pixels (default 227)")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default 7)")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.as_rank:
        serve(options.batch, options.crop, options.rounds)
        return 0
    if options.machines > 1 and (reason := missing_for_two_machines()):
        sys.stderr.write(f"error: {reason}; --machines 1 measures on one\n")
        return 2
    sizes = ["--batch", options.batch, "--crop", options.crop, "--rounds", options.rounds]
    program = ["benchmarks.overlap", "--as-rank", *map(str, sizes)]
    found = list(start(options.machines, RANKS // options.machines, program))
    whole = next(line["seconds"] for line in found if line["name"] == "as a whole")
    for line in found:
        ratios = [mine / other for mine, other in zip(line["seconds"], whole, strict=True)]
        low, _, high = statistics.quantiles(ratios) if len(ratios) > 1 else ratios * 3
        median = statistics.median(line["seconds"])
        print(
            f"{line['name']:22} {median:7.3f} s  {median / statistics.median(whole):.2f} x the "
            f"time of the exchange as a whole  ({low:.2f} to {high:.2f})"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
