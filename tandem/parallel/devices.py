"""The device of each rank."""

import re
from collections.abc import Sequence
from typing import Any

from tandem.config.hardware import available_cores, cuda_device_count, missing_for_gpus
from tandem.errors import InputError

LEAST_TIMEOUT = 1.0
"""Seconds; processes give four signs of life in each."""

_NAME = re.compile(r"cpu|cuda:\d+")


def choose_devices(
    ranks: int | None, use_gpu: bool | None, devices: Sequence[str] | None
) -> list[str]:
    """Choose the device of each rank.

    Parameters
    ----------
    ranks : int, optional
        By default one for each device that is listed, for each GPU, or for each core.
    use_gpu : bool, optional
        By default whether there are GPUs that can be used.
    devices : sequence of str, optional
        The device of each rank.

    Raises
    ------
    InputError
        There is no such device.
    TypeError
        `devices` is a single name, or `ranks` no integer.
    ValueError
        The numbers of ranks and of devices differ, or there is no rank.
    """
    check_request(ranks, use_gpu, devices)
    chosen = _automatic(ranks, use_gpu) if devices is None else list(devices)
    if not chosen:
        raise ValueError("devices is empty; there is at least one rank, the master")
    for name in chosen:
        if not _NAME.fullmatch(name):
            raise InputError(f"there is no device {name!r}; names are cpu, cuda:0 and so on")
    kinds = {name.partition(":")[0] for name in chosen}
    if len(kinds) > 1:
        raise InputError(f"devices are {', '.join(chosen)}; either all are GPUs or all cpu")
    if kinds == {"cuda"} and (reason := _missing()):
        raise InputError(f"devices are {', '.join(chosen)}; {reason}")
    for name in chosen if kinds == {"cuda"} else ():
        if int(name[5:]) >= (count := cuda_device_count()):
            raise InputError(f"device {name!r} does not exist: this machine has {count} GPUs")
    return chosen


def check_request(ranks: Any, use_gpu: bool | None, devices: Sequence[str] | None) -> None:
    """Check that arguments of `choose_devices` fit each other.

    Raises TypeError or ValueError.
    """
    if ranks is not None:
        _check_integer("n_parallel", ranks)
        if ranks < 1:
            raise ValueError(f"n_parallel is {ranks}; there is at least one rank, the master")
    if isinstance(devices, str):
        raise TypeError(f'devices is a list with one name for each rank, not "{devices}"')
    if devices is not None:
        if ranks not in (None, len(devices)):
            raise ValueError(f"n_parallel is {ranks}, for {len(devices)} devices")
        if use_gpu is not None and any((name != "cpu") != use_gpu for name in devices):
            raise ValueError(f"use_gpu is {use_gpu}, and devices are {', '.join(devices)}")


def check_numbers(ranks: int, master_rank: Any, threads: Any, timeout: Any) -> None:
    """Check numbers that a pool of so many ranks is started with.

    Raises TypeError or ValueError.
    """
    _check_integer("master_rank", master_rank)
    if not 0 <= master_rank < ranks:
        raise ValueError(f"master_rank is {master_rank}; there are {ranks} ranks")
    if threads is not None:
        _check_integer("threads", threads)
        if threads < 1:
            raise ValueError(f"threads is {threads}; each rank has at least one")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout is a number of seconds, not {timeout!r}")
    if not timeout >= LEAST_TIMEOUT:
        raise ValueError(f"timeout is {timeout}; it is at least {LEAST_TIMEOUT:g} s")


def _check_integer(name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} is an integer, not {number!r}")


def _automatic(ranks: int | None, use_gpu: bool | None) -> list[str]:
    reason = _missing()
    if use_gpu and reason:
        raise InputError(f"use_gpu is True; {reason}")
    if use_gpu is False or reason:
        return ["cpu"] * (ranks or len(available_cores()))
    count = cuda_device_count()
    if ranks is not None and ranks > count:
        raise InputError(
            f"n_parallel is {ranks}, and there are {count} GPUs; list devices to have ranks share "
            "them"
        )
    return [f"cuda:{number}" for number in range(ranks or count)]


def _missing() -> str | None:
    """Why no GPU can be used, if so."""
    return missing_for_gpus() if cuda_device_count() else "no GPU was found"
