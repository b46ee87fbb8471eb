"""Training steps on a GPU: ours in its variants, and plain PyTorch's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.measure import Step
from benchmarks.plain_alexnet import Norm, plain_step
from examples.resident_step import ResidentStep, Sizes
from tandem.backend import capture, device_mode
from tandem.memory.cuda import CudaBuffer, CudaDriver

REFERENCE = "ours"


@dataclass(frozen=True)
class StepSetting:
    """The device and the sizes of a step; without a driver it runs on the CPU."""

    sizes: Sizes
    precision: Any
    driver: CudaDriver | None

    @property
    def device(self) -> str:
        return "cpu" if self.driver is None else f"cuda:{self.driver.device}"


class Contender(Protocol):
    """A way to train."""

    @property
    def seconds(self) -> float:
        """To make it and to time it: a guess, on the side of too long."""

    @property
    def goal(self) -> float | None:
        """The least speedup of ours over this one that is the goal."""

    def make(self, place: StepSetting) -> Step:
        """Make a step; most is compiled when it is called."""


@dataclass(frozen=True)
class Ours:
    """Our step on a minibatch that stays on the device."""

    mode: Mapping[str, bool] = field(default_factory=dict)  # arguments of `device_mode`
    without: tuple[str, ...] = ()  # names or tags of rewrites
    compile: bool = True
    as_one: bool = True  # gradient and update in one function, as of a single trainer
    captured: bool = True
    seconds: float = 60
    goal: None = None

    def make(self, place: StepSetting) -> Step:
        mode = device_mode(place.device, self.compile, place.precision, **self.mode)
        mode = mode.excluding(*self.without)
        if place.driver is None:
            step = ResidentStep(mode, place.sizes)
        else:
            driver, layout = place.driver, self.mode.get("channels_last", True)
            step = ResidentStep(
                mode,
                place.sizes,
                place.device,
                lambda nbytes: CudaBuffer.create(driver, nbytes, "parameters"),
                channels_last=layout,
            )
        functions = step.compile(mode, fused=True) if self.as_one else step.functions
        if self.captured:
            return capture(functions, place.device)

        def run() -> None:
            for function in functions:
                function()

        return run


@dataclass(frozen=True)
class Plain:
    """The step in plain PyTorch."""

    norm: Norm
    compile_mode: str | None = None
    tuned: bool = True
    seconds: float = 60
    goal: float | None = None

    def make(self, place: StepSetting) -> Step:
        return plain_step(
            place.sizes.network(),
            place.sizes.batch,
            place.device,
            self.norm,
            place.precision,
            self.compile_mode,
            self.tuned,
        )


TUNING_SECONDS = 180  # several kernels for each product are compiled and timed

CONTENDERS: dict[str, Contender] = {
    REFERENCE: Ours(),
    "compiled": Plain("module", "default", goal=1.2),
    "compiled-sliced": Plain("slices", "default", goal=1.0),
    "max-autotune": Plain("module", "max-autotune", seconds=TUNING_SECONDS, goal=1.2),
    "max-autotune-sliced": Plain("slices", "max-autotune", seconds=TUNING_SECONDS, goal=1.0),
    "ours-unfused": Ours(without=("by_triton",)),
    "ours-channels-first": Ours({"channels_last": False}),
    "ours-strided": Ours(without=("space_to_depth",)),
    "ours-apart": Ours(as_one=False),
    "channels-last": Plain("module", seconds=20),
    "channels-last-sliced": Plain("slices", seconds=20),
    "eager": Plain("module", tuned=False, seconds=20),
    "eager-sliced": Plain("slices", tuned=False, seconds=20),
    "reduce-overhead": Plain("module", "reduce-overhead", goal=1.2),
    "reduce-overhead-sliced": Plain("slices", "reduce-overhead", goal=1.0),
    "ours-uncompiled": Ours(compile=False, seconds=30),
    "ours-uncaptured": Ours(captured=False),
    "ours-tuned": Ours({"tune": True}, seconds=TUNING_SECONDS),
}
"""By name, the most telling first.

"unfused" has PyTorch's kernels of pooling and normalisation, "strided" a first layer of strides
over three colours; "sliced" normalises by sums of slices, not by `LocalResponseNorm`.
"""
