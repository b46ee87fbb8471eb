"""Copies between the host and a device, here the CPU."""

import numpy as np
import torch

from tandem.backend import download, upload


def test_what_is_uploaded_is_a_copy() -> None:
    array = np.arange(6.0).reshape(2, 3)
    tensors = [upload(array, "cpu"), upload(array[:, ::-1], "cpu")]
    array[...] = 7
    assert tensors[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors[1].tolist() == [[2, 1, 0], [5, 4, 3]]


def test_tensors_are_downloaded_and_other_values_stay() -> None:
    other = np.ones(2)
    values = download([torch.arange(3), None, other, torch.tensor(2.5)])
    assert [type(value) for value in values] == [np.ndarray, type(None), np.ndarray, np.ndarray]
    assert values[0].tolist() == [0, 1, 2]
    assert values[2] is other
    assert values[3].shape == ()
