"""The oracle's own convolution, against SciPy's."""

import numpy as np

from tests.support.lazily import Lazily
from tests.support.slow_networks import true_convolution

signal = Lazily("scipy.signal")


def test_it_convolves() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 7, 7, 1)), rng.normal(size=(2, 3, 3, 4))
    found = true_convolution(x, w, np.zeros(4), stride=2, pad=1)
    for o in range(4):
        whole = sum(signal.convolve2d(x[c, :, :, 0], w[c, :, :, o], mode="same") for c in range(2))
        np.testing.assert_allclose(found[o, :, :, 0], whole[::2, ::2], rtol=1e-12)
