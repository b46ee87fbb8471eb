"""Random graphs and random updates give what PyTensor's Python linker gives.

One graph is run again with ``python -m tests.backend.test_fuzz SEED``.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytest
import torch
from pytensor.compile.mode import Mode

from tandem.backend import device_mode
from tests.support.check_function import DEVICE, PLAIN_DEVICE, PYTHON, compile_graph
from tests.support.graph_forms import FORMS
from tests.support.random_graphs import RandomGraph, Term, grow
from tests.support.random_updates import RandomUpdates

QUICK, SLOW = 50, 6000  # graphs
GROUP = 25  # graphs of one test
REGIONS = device_mode("cpu", regions=True)


def check(seed: int, rewritten: bool, device: Mode = DEVICE) -> None:
    """Compare a random graph on the device with the same graph on the Python linker."""
    graph = grow(seed, FORMS)
    if not graph.outputs:
        return
    variables = [term.variable for term in graph.outputs]
    given = [value.copy() for value in graph.values]
    what = "rewritten" if rewritten else "as built"
    try:
        function = compile_graph(graph.inputs, variables, device if rewritten else PLAIN_DEVICE)
    except Exception as error:
        if rewritten and fails_everywhere(graph, type(error)):
            return
        raise AssertionError(explained(graph, f"{what}: compilation failed: {error!r}")) from error
    if rewritten:
        # Rewrites may change rounding, and what an error or an overflow gives: the reference is
        # the graph that they made.
        rewrote = function.maker.fgraph.clone()
        reference = compile_graph(rewrote.inputs, rewrote.outputs, PYTHON)
    else:
        reference = compile_graph(graph.inputs, variables, PYTHON)
    try:
        expected = reference(*given)
    except (OverflowError, NotImplementedError):
        # PyTensor's Python linker does not cast numbers that do not fit, nor sum some functions of
        # half precision; its other linkers do.
        return
    except Exception as error:
        # A rewrite may have made a graph that cannot be computed.
        with pytest.raises(type(error)):
            function(*given)
        return
    for call in ("first", "second"):
        try:
            found = function(*given)
        except Exception as error:
            raise AssertionError(explained(graph, f"{what}, {call} call: {error!r}")) from error
        for term, got, wanted in zip(graph.outputs, found, expected, strict=True):
            problem = difference(got, np.asarray(wanted), term, term.exact and not rewritten)
            if problem:
                message = f"{what}, {call} call: {problem}\ngot {got!r}\nexpected {wanted!r}"
                raise AssertionError(explained(graph, message, term))
            # What was returned is the caller's.
            got[...] = 1
    for value, before in zip(given, graph.values, strict=True):
        assert value.tobytes() == before.tobytes(), explained(graph, "an input was overwritten")


def fails_everywhere(graph: RandomGraph, error: type[Exception]) -> bool:
    """Whether PyTensor's own linker cannot compile a graph either, once it is rewritten."""
    variables = [term.variable for term in graph.outputs]
    try:
        compile_graph(graph.inputs, variables, Mode(linker="py", optimizer="fast_run"))
    except error:
        return True
    return False


def difference(got: np.ndarray, expected: np.ndarray, term: Term, exact: bool) -> str:
    """Describe how two results differ; empty if they are the same.

    Permitted are, and nothing else: any sign and payload of NaN; either sign of zero; for what is
    made by functions, sums and products of floats, rounding errors relative to their operands.
    Rewrites make such products of quotients and of powers.
    """
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"{got.dtype} {got.shape} instead of {expected.dtype} {expected.shape}"
    if expected.dtype.kind != "f":
        return "" if np.array_equal(got, expected) else "values differ"
    if exact:
        return "" if np.array_equal(got, expected, equal_nan=True) else "values differ"
    relative = {2: 4e-3, 4: 8e-6, 8: 2e-12}[expected.dtype.itemsize]
    same = np.isclose(got, expected, relative, term.error, equal_nan=True)
    return "" if same.all() else f"values differ by more than {term.error}"


def explained(graph: RandomGraph, problem: str, term: Term | None = None) -> str:
    """Describe a failing graph, with all that is needed to run it again."""
    outputs = [term] if term is not None else graph.outputs
    text = pytensor.dprint([t.variable for t in outputs], file="str", print_type=True)
    inputs = "\n".join(
        f"{v} {v.type} = {value!r}" for v, value in zip(graph.inputs, graph.values, strict=True)
    )
    return f"seed {graph.seed}: {problem}\n{text}\n{inputs}"


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(request.param)


def check_all(seeds: range, every: int) -> None:
    """Check the graphs of some seeds, one in `every` also with rewrites; report all failures."""
    failures = []
    for seed in seeds:
        for rewritten in (False, True) if seed % every == 0 else (False,):
            try:
                check(seed, rewritten)
            except AssertionError as error:
                failures.append(str(error))
    assert not failures, f"{len(failures)} graphs\n" + "\n\n".join(failures)


@pytest.mark.parametrize("first", range(0, QUICK, GROUP))
def test_random_graphs(first: int) -> None:
    torch.set_num_threads(1 + first // GROUP % 2)
    check_all(range(first, first + GROUP), every=5)


@pytest.mark.parametrize("first", range(0, QUICK, 2 * GROUP))
def test_random_updates(first: int) -> None:
    torch.set_num_threads(1 + first // (2 * GROUP) % 2)
    check_updates(range(first, first + 2 * GROUP), every=5)


def check_updates(seeds: range, every: int) -> None:
    """Check the random updates of some seeds; report all failures."""
    failures = []
    for seed in seeds:
        for mode in (PLAIN_DEVICE, DEVICE) if seed % every == 0 else (PLAIN_DEVICE,):
            for cut in (False, True) if seed % 3 == 0 else (False,):
                try:
                    RandomUpdates(seed, cut).check(mode)
                except Exception as error:
                    failures.append(f"updates of seed {seed}, {mode}, {cut=}: {error!r}")
    assert not failures, f"{len(failures)} functions\n" + "\n\n".join(failures)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(QUICK, SLOW, 20 * GROUP))
def test_many_random_graphs(first: int, threads: None) -> None:
    check_all(range(first, first + 20 * GROUP), every=2)
    check_updates(range(first, first + 20 * GROUP), every=2)


def check_regions(seeds: range) -> None:
    """Check random graphs and updates in regions; report all failures."""
    failures = []
    for seed in seeds:
        for part in (lambda s: check(s, True, REGIONS), lambda s: RandomUpdates(s).check(REGIONS)):
            try:
                part(seed)
            except Exception as error:
                failures.append(f"seed {seed}: {error!r}")
    assert not failures, f"{len(failures)} graphs\n" + "\n\n".join(failures)


@pytest.fixture
def by_perform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions are computed by the Ops' own `perform`, which needs no compilation."""

    def compile_region(graph: Any) -> Callable[..., list[np.ndarray]]:
        copy = graph.clone()
        return compile_graph(copy.inputs, copy.outputs, PYTHON)

    monkeypatch.setattr("tandem.backend.regions._compile", compile_region)


@pytest.mark.parametrize("first", range(0, QUICK, GROUP))
def test_regions_of_random_graphs(first: int, by_perform: None) -> None:
    check_regions(range(first, first + GROUP))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(QUICK, 1000 + QUICK, 10 * GROUP))
def test_regions_of_many_random_graphs(first: int, by_perform: None) -> None:
    check_regions(range(first, first + 10 * GROUP))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(0, QUICK, GROUP // 5))
def test_random_graphs_by_numba(first: int) -> None:
    """Each takes seconds to compile, unless Numba's cache has the graph."""
    check_regions(range(first, first + GROUP // 5))


if __name__ == "__main__":
    for number in sys.argv[1:]:
        for rewrites in (False, True):
            check(int(number), rewrites)
