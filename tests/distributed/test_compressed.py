"""PyTorch's conversions to 16 bits against NumPy's, bit for bit; what is not converted."""

import numpy as np
import pytest

from tandem.distributed import ExchangeSettings, LocalGroup, local_groups
from tandem.distributed.compressed import TransferFormat
from tandem.distributed.exchange import rank_vector
from tandem.memory import HostSlots, SlotLayout
from tandem.memory.flat import FlatLayout
from tandem.memory.parameters import FlatName, HostMemory
from tests.support.numpy_formats import NumpyTransferFormat
from tests.support.threads import run_threads


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_rounding_has_numpys_bits(name: str) -> None:
    rng = np.random.default_rng(0)
    values = (2.0 ** rng.uniform(-30, 14.9, 10_000) * rng.choice([-1, 1], 10_000)).astype("float32")
    ties = (1 + (2 * np.arange(100) + 1) * 2.0 ** (-11 if name == "float16" else -8)).astype("f4")
    values = np.concatenate([values, ties, np.float32([0, -0.0, 2**15, -(2**15), np.inf])])
    found, expected = (np.empty(values.size, np.uint16) for _ in range(2))
    TransferFormat(name).narrow(values, found)
    NumpyTransferFormat(name).narrow(values, expected)
    assert (found == expected).all()
    back, oracle = (np.empty(values.size, np.float32) for _ in range(2))
    TransferFormat(name).widen(found, back)
    NumpyTransferFormat(name).widen(found, oracle)
    assert back.tobytes() == oracle.tobytes()


LAYOUT = FlatLayout.of(
    {"fc.weight": (40, 50)}, "float32", states=("momentum",), untrained={"norm.variance": (70,)}
)
AVERAGES = slice(2048, 2048 + 70)
BUCKETS = [slice(2048, LAYOUT.size), slice(1024, 2048), slice(0, 1024)]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("parameters", [slice(0, LAYOUT.parameters_size)]),
        ("gradients", [slice(0, LAYOUT.size)]),
        ("gradients", BUCKETS),
    ],
)
def test_averages_travel_in_float32_and_spoil_no_scale(name: FlatName, parts: list[slice]) -> None:
    """Variances of a million beside gradients of a millionth, which float16 does not span."""
    rng = np.random.default_rng(0)
    size = LAYOUT.size if name == "gradients" else LAYOUT.parameters_size
    vectors = [(1e-6 * rng.uniform(1, 2, size)).astype(np.float32) for _ in range(3)]
    shares = [0.5, 0.5, 0.0]
    choice = ExchangeSettings.of({"collective": "asa16"}).collective
    slots = HostSlots.create(SlotLayout.of_pictures(1, 8), rank=0)

    def average(group: LocalGroup) -> None:
        own = vectors[group.rank].view(np.uint8)
        unused = np.zeros(LAYOUT.parameters_nbytes, np.uint8)
        pair = (own, unused) if name == "parameters" else (unused, own)
        memory = HostMemory(slots, LAYOUT, *([flat] for flat in pair))
        vector = rank_vector(memory, name, group)
        before = vector.own.copy()
        made = choice.make(vector, parts, group)  # where the bits of parameters are common
        vector.own[...] = 2 * before
        vector.own[AVERAGES] *= 1e12
        for part, all_reduce in zip(parts, made, strict=True):
            all_reduce.average(vector.own[part], shares)

    expected = np.mean([2 * v.astype(float) for v in vectors[:2]], axis=0)
    expected[AVERAGES] *= 1e12
    if name == "parameters":  # all start with the same
        for vector in vectors[1:]:
            vector[...] = vectors[0]
        expected = 2 * vectors[0].astype(float)
        expected[AVERAGES] *= 1e12
    run_threads([lambda group=group: average(group) for group in local_groups(3)])
    for vector in vectors:
        assert vector.tobytes() == vectors[0].tobytes()
        np.testing.assert_allclose(vector[AVERAGES], expected[AVERAGES], rtol=2e-7)
        np.testing.assert_allclose(vector, expected, rtol=2**-9)
