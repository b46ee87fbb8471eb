"""Models of PyMC in our mode: log-probabilities of PyTensor's own mode, and its posteriors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytest

from tandem.backend import device_mode
from tests.support.pymc_models import MODELS, pymc_or_skip

DRAWS = 400  # of each of two chains, after as many to tune


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # of PyMC and Numba
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_posteriors_are_those_of_pytensors_own_mode(make: Callable[[Any], Any]) -> None:
    pm = pymc_or_skip()
    model, found = make(pm), []
    modes = device_mode("cpu", regions=True), pytensor.compile.get_mode("NUMBA")
    points = [model.initial_point(random_seed=seed) for seed in (1, 2)]
    names = [variable.name for variable in model.value_vars]
    functions = [model.compile_fn([model.logp(), model.dlogp()], mode=mode) for mode in modes]
    for point in points:
        given = {name: point[name] for name in names}
        (ours, ours_grad), (theirs, theirs_grad) = (f(given) for f in functions)
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)
        scale = np.abs(theirs_grad).max()
        np.testing.assert_allclose(ours_grad, theirs_grad, rtol=0, atol=1e-10 * scale)
    for mode in modes:
        with model:
            trace = pm.sample(
                DRAWS,
                tune=DRAWS,
                chains=2,
                cores=1,
                random_seed=1,
                progressbar=False,
                compile_kwargs={"mode": mode},
            )
        found.append(trace)
    for variable in model.free_RVs:
        (ours, our_error), (theirs, their_error) = (
            mean_and_error(np.concatenate(trace.posterior[variable.name])) for trace in found
        )
        difference, error = np.abs(ours - theirs), np.hypot(our_error, their_error)
        assert (difference <= 6 * error).all(), (variable.name, ours, theirs, error)


def mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean of draws, (draw, ...), and its error, by the means of batches in their order."""
    means = np.array([batch.mean(axis=0) for batch in np.array_split(values, 16)])
    return means.mean(axis=0), means.std(axis=0, ddof=1) / 4
