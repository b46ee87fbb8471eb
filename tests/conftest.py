"""Tests marked `gpu` are skipped, with the reason, where there is no GPU to be used."""

import pytest

from tandem.run.devices import cuda_device_count, missing_for_gpus


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    if not cuda_device_count():
        pytest.skip("no GPU was found")
    if missing := missing_for_gpus():
        pytest.skip(missing)
