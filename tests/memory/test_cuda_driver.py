"""What the driver makes of PyCUDA's errors, by a PyCUDA that only refuses."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tandem.errors import InputError
from tandem.memory import SlotLayout
from tandem.memory.cuda import CudaDriver, CudaSlot

_INTERPROCESS = 4


class LogicError(Exception):
    """PyCUDA's error of a call that is not permitted."""


def refusing_pycuda(refused: str) -> ModuleType:
    """What `CudaDriver` needs of ``pycuda.driver``, where one call is refused."""

    def allocate(nbytes: int) -> int:
        if refused == "cuMemAlloc":
            raise MemoryError("cuMemAlloc failed: out of memory")
        return nbytes

    def call(name: str, result: Any = None) -> Any:
        if name == refused:
            raise LogicError(f"{name} failed: operation not supported")
        return result

    class Event:
        def __init__(self, flags: int) -> None:
            if flags & _INTERPROCESS:
                call("cuEventCreate")

        def ipc_handle(self) -> bytearray:
            return call("cuIpcGetEventHandle", bytearray(64))

        @staticmethod
        def from_ipc_handle(data: bytearray) -> "Event":
            return call("cuIpcOpenEventHandle", Event(0))

    module: Any = ModuleType("pycuda.driver")
    context = SimpleNamespace(push=int, pop=int, synchronize=int)
    module.Error, module.MemoryError, module.Event = LogicError, MemoryError, Event
    module.event_flags = SimpleNamespace(DISABLE_TIMING=2, INTERPROCESS=_INTERPROCESS)
    module.Context, module.init = context, int
    module.Device = lambda number: SimpleNamespace(retain_primary_context=lambda: context)
    module.mem_get_info = lambda: (1 << 20, 2 << 20)
    module.mem_alloc, module.memset_d8 = allocate, lambda *_: None
    module.mem_get_ipc_handle = lambda address: call("cuIpcGetMemHandle", bytearray(64))
    module.IPCMemoryHandle = lambda data: call("cuIpcOpenMemHandle", 1)
    return module


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], CudaDriver]:
    def make(refused: str) -> CudaDriver:
        module = refusing_pycuda(refused)
        monkeypatch.setattr("tandem.memory.cuda.driver.import_pycuda", lambda: module)
        monkeypatch.setattr("tandem.memory.cuda.driver.gpu_identity", lambda number: "GPU 3")
        return CudaDriver(3)

    return make


def test_a_shortage_names_what_needs_less(driver: Callable[[str], CudaDriver]) -> None:
    with pytest.raises(InputError) as caught:
        driver("cuMemAlloc").allocate(4 << 20)
    assert str(caught.value) == (
        "cuda:3 has too little memory: 4 MiB are needed, 1 of its 2 MiB are free; a smaller "
        "batch_size or width, or data_on_gpu: false, needs less"
    )


def make_and_open(driver: CudaDriver) -> None:
    """All that a trainer does for its loader, and then the loader."""
    layout = SlotLayout.of_pictures(batch_size=4, picture_size=3)
    handle = CudaSlot.create(driver, layout).handle()
    driver.process += 1
    CudaSlot.open(driver, layout, handle)


@pytest.mark.parametrize(
    ("refused", "what"),
    [
        ("cuEventCreate", "events"),
        ("cuIpcGetEventHandle", "events"),
        ("cuIpcOpenEventHandle", "events"),
        ("cuIpcGetMemHandle", "memory"),
        ("cuIpcOpenMemHandle", "memory"),
    ],
)
def test_a_system_that_forbids_sharing_is_named(
    driver: Callable[[str], CudaDriver], refused: str, what: str
) -> None:
    make_and_open(driver("nothing"))
    said = rf"{what} of cuda:3 can't be shared .*: {refused} failed: .*para_load: false needs none"
    with pytest.raises(InputError, match=said):
        make_and_open(driver(refused))


def test_a_trainer_without_a_loader_needs_no_sharing(driver: Callable[[str], CudaDriver]) -> None:
    CudaSlot.create(driver("cuEventCreate"), SlotLayout.of_pictures(4, 3), shared=False)
