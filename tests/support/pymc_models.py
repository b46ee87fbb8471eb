"""Four models of PyMC, for the test that samples them."""

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


def pymc_or_skip() -> Any:
    """PyMC, or skip the test where it is not installed: it needs Python 3.12."""
    if importlib.util.find_spec("pymc") is None:
        pytest.skip("PyMC 6.0 is not installed")
    with warnings.catch_warnings(action="ignore"):  # of ArviZ, about its own future
        return importlib.import_module("pymc")


def regression(pm: Any) -> Any:
    """1,000 rows of 5 numbers."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 5))
    y = x @ np.arange(5) + 2 + rng.normal(size=1000)
    with pm.Model() as model:
        slopes, shift = pm.Normal("slopes", 0, 10, shape=5), pm.Normal("shift", 0, 10)
        pm.Normal("y", shift + x @ slopes, pm.HalfNormal("noise", 5), observed=y)
    return model


def radon(pm: Any) -> Any:
    """Houses in 85 counties, each of which has its own mean, and a floor."""
    rng = np.random.default_rng(1)
    county, floor = rng.integers(85, size=900), rng.integers(2, size=900)
    y = rng.normal(1.5, 0.3, 85)[county] - 0.7 * floor + rng.normal(0, 0.7, 900)
    with pm.Model() as model:
        mean, spread = pm.Normal("mean", 0, 10), pm.HalfNormal("spread", 1)
        offsets = pm.Normal("offsets", 0, 1, shape=85)
        slope, noise = pm.Normal("slope", 0, 10), pm.HalfNormal("noise", 1)
        pm.Normal("y", (mean + spread * offsets)[county] + slope * floor, noise, observed=y)
    return model


def mixture(pm: Any) -> Any:
    """Three normal distributions, in order."""
    rng = np.random.default_rng(2)
    y = rng.normal(np.array([-4.0, 0.0, 5.0])[rng.integers(3, size=400)], 1)
    with pm.Model() as model:
        shares = pm.Dirichlet("shares", np.ones(3))
        order = pm.distributions.transforms.ordered
        means = pm.Normal("means", 0, 10, shape=3, transform=order, initval=[-3.0, 0.0, 3.0])
        pm.NormalMixture("y", shares, means, sigma=pm.HalfNormal("noise", 2), observed=y)
    return model


def gaussian_process(pm: Any) -> Any:
    """A smooth function of 60 points, with noise."""
    rng = np.random.default_rng(3)
    x = np.linspace(0, 10, 60)[:, np.newaxis]
    y = np.sin(x[:, 0]) + rng.normal(0, 0.2, 60)
    with pm.Model() as model:
        length, height = pm.Gamma("length", 2, 1), pm.HalfNormal("height", 2)
        process = pm.gp.Marginal(cov_func=height**2 * pm.gp.cov.ExpQuad(1, ls=length))
        process.marginal_likelihood("y", X=x, y=y, sigma=pm.HalfNormal("noise", 1))
    return model


MODELS: list[Callable[[Any], Any]] = [regression, radon, mixture, gaussian_process]
