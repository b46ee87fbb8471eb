"""How do VGG, ResNets and GoogLeNet compare with plain PyTorch, in time and memory?

    python -m benchmarks.networks                       all, about half an hour
    python -m benchmarks.networks --only training       or inference, memory, start, compile
    python -m benchmarks.networks --network ResNet-50   one of them
    python -m benchmarks.networks --batch 128           instead of 64, or 16 of 224 x 224 pixels

A step is a trainer's, from 8-bit crops; plain PyTorch gets converted images. The best variant of
plain PyTorch is the peer that counts; for GoogLeNet without PyTorch's compiler, which takes longer
than all else here. Both sides have as many threads as cores. Compile time is that of a trainer's
functions, with its first step. Prints JSON lines, then a table.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from benchmarks import memory, start
from benchmarks.measure import Comparison, Figure, Found, Step, compare, measure, run
from examples.resident_step import Sizes

if TYPE_CHECKING:  # torch is imported in the processes that are measured
    from tandem.layers import Network
    from tests.support.torch_networks import PlainNetwork

OURS, BEST = "ours", "the best of PyTorch"
SPEED, MEMORY, COMPILE = 1.0, 1.2, 2.3  # targets: at least, at most, at most
FIRST_STEP_SECONDS = 30.0


@dataclass(frozen=True)
class Case:
    """A network of `tandem.models`, its sizes, and how plain PyTorch's is called."""

    network: str
    sizes: Sizes
    peer: str  # class in tests.support.torch_networks
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    is_compiled: bool = True  # whether PyTorch's compiler is compared with, too

    def ours(self) -> "Network":
        """Make the network."""
        from tandem.layers.network import NetworkDescription, build_network

        sizes, path = self.sizes, f"tandem.models.{self.network}"
        return build_network(
            NetworkDescription(
                sizes.crop, sizes.classes, sizes.width, network=path, options=self.options
            )
        )

    def plain(self) -> "PlainNetwork":
        """Make plain PyTorch's network."""
        from tests.support import torch_networks

        return getattr(torch_networks, self.peer)(*self.arguments)


def _sizes(crop: int, classes: int, batch: int) -> Sizes:
    return Sizes(batch=batch, crop=crop, stored=crop, classes=classes, width=1.0)


BATCHES = ("16", "64", "128")  # to choose from
SMALL, LARGE = _sizes(32, 10, batch=64), _sizes(224, 1000, batch=16)
CASES = {
    "VGG-11": Case("vgg:VGG11", SMALL, "PlainVGG", (11, 32, 10)),
    "ResNet-32": Case("resnet:ResNet32", SMALL, "PlainCifarResNet", (32, 10)),
    "WRN-16-4": Case(
        "wide_resnet:WideResNet",
        replace(SMALL, width=4.0),
        "PlainWideResNet",
        (16, 4, 10),
        {"depth": 16},
    ),
    "ResNet-50": Case("resnet:ResNet50", LARGE, "PlainResNet", (50, 1000)),
    "GoogLeNet": Case(
        "googlenet:GoogLeNetBN", LARGE, "PlainGoogLeNetBN", (1000,), is_compiled=False
    ),
}
DEEP = {
    "ResNet-110": Case("resnet:ResNet110", SMALL, "PlainCifarResNet", (110, 10)),
    "ResNet-56": Case("resnet:ResNet56", SMALL, "PlainCifarResNet", (56, 10)),
}


def our_training(case: Case) -> Step:
    """Make the step of a trainer alone."""
    from benchmarks.host_model import host_model, noise_slot, train_step

    return partial(train_step, host_model(case.sizes, network=case.ours()), noise_slot(case.sizes))


def our_inference(case: Case) -> Step:
    """Make the inference of a minibatch."""
    import pytensor

    from benchmarks.host_model import host_model
    from tandem.backend import device_mode, device_shared

    net = case.ours()
    weights = host_model(case.sizes, network=net).weights
    images = device_shared(_images(case.sizes).numpy(), name="images", device="cpu")
    givens = {net.parameters[name]: value for name, value in weights.items()}
    return pytensor.function(
        [],
        net.logits(images, None),
        givens=givens,
        mode=device_mode("cpu"),
        name="inference",
        on_unused_input="ignore",  # auxiliary heads
    )


def plain_training(case: Case) -> dict[str, Step]:
    """Make plain PyTorch's step in its variants."""
    import torch

    from benchmarks.plain_step import training_variants

    sizes = case.sizes
    labels = torch.randint(0, sizes.classes, (sizes.batch,))
    return training_variants(case.plain, _images(sizes), labels)


def plain_inference(case: Case) -> dict[str, Step]:
    """Make plain PyTorch's inference in its variants."""
    from benchmarks.plain_step import inference_variants

    return inference_variants(case.plain, _images(case.sizes))


def _like_a_trainer() -> None:
    import torch

    from tandem.backend import keep_freed_memory, set_threads

    keep_freed_memory()
    set_threads(torch.get_num_threads())


def _images(sizes: Sizes) -> Any:
    import torch

    return 60 * torch.randn(sizes.batch, 3, sizes.crop, sizes.crop)


def _speed(
    what: str,
    rounds: int,
    cases: Mapping[str, Case],
    ours: Callable[[Case], Step],
    plain: Callable[[Case], dict[str, Step]],
) -> Iterator[Comparison]:
    """Compare with each variant; only the fastest has the target."""
    _like_a_trainer()
    for name, case in cases.items():
        peers = plain(case)
        if not case.is_compiled:
            peers = {peer: step for peer, step in peers.items() if "compiled" not in peer}
        contenders = {OURS: ours(case)} | peers
        own, *others = measure(contenders, rounds, warmups=2)
        fastest = min(others, key=lambda measured: measured.median)
        question = f"{what} of {name}, batch {case.sizes.batch}, {case.sizes.crop}"
        for other in others:
            yield compare(question, own, other, target=SPEED if other is fastest else None)
        del contenders
        gc.collect()


def training(rounds: int, cases: Mapping[str, Case]) -> Iterator[Found]:
    """Compare training steps."""
    yield from _speed("training step", rounds, cases, our_training, plain_training)


def inference(rounds: int, cases: Mapping[str, Case]) -> Iterator[Found]:
    """Compare inference."""
    yield from _speed("inference", rounds, cases, our_inference, plain_inference)


def _our_steps(case: Case, steps: int, report: Connection) -> None:
    _like_a_trainer()
    memory.make_steps(our_training(case), steps, report)


def _plain_steps(case: Case, steps: int, report: Connection) -> None:
    first = next(iter(plain_training(case).values()))
    memory.make_steps(first, steps, report)


def peaks(rounds: int, cases: Mapping[str, Case]) -> Iterator[Found]:
    """Compare the peaks of a trainer's memory with those of plain PyTorch, eager."""
    for network, case in cases.items():
        steps = memory.WARM_STEPS
        ours, plain = (memory.watch(t, case, steps)[0] for t in (_our_steps, _plain_steps))
        question = f"memory of a trainer of {network}, batch {case.sizes.batch}, {case.sizes.crop}"
        yield Figure(
            question, f"peak {ours:.0f} MB over plain PyTorch's", ours / plain, "x", MEMORY
        )


def first_steps(rounds: int, cases: Mapping[str, Case]) -> Iterator[Found]:
    """Time the start of a run of the largest network, warm."""
    if "ResNet-50" in cases:
        settings = ("--network", "tandem.models.resnet:ResNet50", "--crop_size", "224")
        yield from start.answer(
            max(1, rounds // 3),
            settings=(*settings, "--batch_size", "16"),
            question="start of a run of ResNet-50 to its first step",
            target=FIRST_STEP_SECONDS,
        )


def compile_times(rounds: int, cases: Mapping[str, Case]) -> Iterator[Found]:
    """Compare the time until the end of the first step of a network with a smaller one's."""
    if cases is CASES:
        steps = {name: lambda case=case: our_training(case)() for name, case in DEEP.items()}
        larger, smaller = measure(steps, max(1, rounds // 3))
        question = "compile time of a trainer's functions"
        yield compare(question, larger, smaller, "time", COMPILE)


PARTS = {
    "training": training,
    "inference": inference,
    "memory": peaks,
    "start": first_steps,
    "compile": compile_times,
}


def answer(
    rounds: int, only: str | None = None, network: str | None = None, batch: str | None = None
) -> Iterator[Found]:
    """Answer every part of the question, or one, for every network or one."""
    cases = CASES if network is None else {network: CASES[network]}
    if batch is not None:
        cases = {
            name: replace(case, sizes=replace(case.sizes, batch=int(batch)))
            for name, case in cases.items()
        }
    for name, part in PARTS.items():
        if only in (None, name):
            yield from part(rounds, cases)


if __name__ == "__main__":
    raise SystemExit(run(__doc__, answer, rounds=7, only=[*PARTS], network=[*CASES], batch=BATCHES))
