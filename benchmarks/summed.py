"""What `sum_rows` costs a trainer on the CPU: passes over groups of rows against one over all.

    python -m benchmarks.summed --groups 4 --rows 128

Processor time of AlexNet's step, one thread, in turn; of noise, without processes or files. On an
EPYC of Zen 4, not idle, four groups of 128 rows took 1 % less than one pass (medians of two), four
of 32 rows 20 % more (of three): 3 % are sums, the rest is that each pass transforms the filters and
multiplies fewer rows.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from alex_net import AlexNet
from tandem.backend import keep_freed_memory, set_threads
from tandem.config.schema import make_config
from tandem.cost.loading import write_noise
from tandem.distributed import ExchangeSettings, local_groups, make_exchange, open_host_memory
from tandem.memory import HostSlots, SlotLayout
from tandem.optim import optimizer_of
from tandem.processor import describe_processor, prefers_winograd
from tandem.training.compiled_network import CompiledNetwork
from tandem.training.setup import parameter_layout


def step_of(groups: int, rows: int, crop: int, width: float, summed: bool) -> Callable[[], None]:
    """Make the step of a trainer alone: its gradients, the exchange of them, the update."""
    values = {"crop_size": crop, "exchange": "gradients", "use_data_layer": False}
    values["convolutions"] = "winograd" if prefers_winograd(describe_processor()) else "direct"
    values |= {"batch_size": groups * rows, "global_batch": groups * rows}
    config = make_config(values | ({"sum_rows": rows} if summed else {}))
    network, optimizer = AlexNet(crop, 1000, width), optimizer_of(dict(config))
    settings, (group,) = ExchangeSettings.of(dict(config)), local_groups(1)
    slots = HostSlots.create(SlotLayout.of_pictures(config.pass_rows, crop), 0)
    memory = open_host_memory(settings, slots, group, parameter_layout(network, optimizer))
    mean = np.full((3, crop, crop), 117, np.float32)
    model = CompiledNetwork(network, config, optimizer, mean, memory)
    for name, value in network.initial_values(seed=1):
        model.load({name: value})
    exchange, slot = make_exchange(settings, memory, group), slots.arrays[0]
    write_noise(slot, 1000)

    def step() -> None:
        exchange.before_gradients((1.0,))
        for number in range(groups if summed else 1):
            model.compute_gradients(slot, 0)
            exchange.after_gradients(number, config.pass_rows, number == groups - 1)
        exchange.before_update((1.0,))
        model.update(1e-4)

    return step


def measure(groups: int, rows: int, crop: int, width: float, rounds: int) -> list[float]:
    """Return the median processor seconds of a step in one pass, and by groups."""
    set_threads(1)
    keep_freed_memory()
    steps = [step_of(groups, rows, crop, width, summed) for summed in (False, True)]
    found: list[list[float]] = [[], []]
    for number in range(rounds + 1):  # the first compiles
        for seconds, step in zip(found, steps, strict=True):
            begun = time.process_time()
            step()
            if number:
                seconds.append(time.process_time() - begun)
    return [median(seconds) for seconds in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"groups": 4, "rows": 128, "crop": 227, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--width", type=float, default=1.0)
    one, several = measure(**vars(parser.parse_args()))
    print(f"one pass {one:.3f} s, by groups {several:.3f} s: {100 * (several / one - 1):+.1f} %")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
