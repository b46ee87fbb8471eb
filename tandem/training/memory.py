"""A trainer's memory, opened where it works: parameters, gradients, slots, and their loader."""

from dataclasses import replace
from multiprocessing.connection import Connection

from tandem.data.minibatch import MinibatchBuilder
from tandem.distributed import ExchangeSettings, Group, open_host_memory
from tandem.errors import InputError
from tandem.memory import HostSlots
from tandem.memory.cuda import CudaSlots, SlotUploader
from tandem.memory.flat import FlatLayout
from tandem.memory.parameters import CudaMemory, HostMemory
from tandem.training.input_pipeline import InProcessLoader, Loader, OrderedLoader, ProcessLoader
from tandem.training.kept_pictures import kept_pictures
from tandem.training.run_spec import RunSpec
from tandem.validation import shown_size

_PROCESS = 400_000_000  # bytes; a trainer that has imported PyTensor and PyTorch


def make_slots(spec: RunSpec, rank: int) -> HostSlots | CudaSlots:
    """Make the slots of a trainer, to be sent to its process and to its loader's."""
    layout = spec.of_rank(rank).slot_layout
    kind, _, number = spec.devices[rank].partition(":")
    if kind == "cpu":
        return HostSlots.create(layout, rank)
    return CudaSlots(int(number), layout, spec.config.para_load)


def open_memory(
    spec: RunSpec, slots: HostSlots | CudaSlots, group: Group, layout: FlatLayout
) -> HostMemory | CudaMemory:
    """Make a trainer's memory, in its process. Collective.

    On a GPU, from now on PyTorch's work in this process goes to one stream of it. Raises InputError
    if the GPU has too little memory.
    """
    if isinstance(slots, HostSlots):
        settings = ExchangeSettings.of(dict(spec.config))
        return open_host_memory(settings, slots, group, layout)
    from tandem.backend import deterministic, give_back_memory, on_stream, use_device

    give_back_memory()  # of a trainer that was in this process before
    deterministic(spec.config.deterministic)
    driver, device = slots.driver(), slots.torch_device
    use_device(device)
    kept = kept_pictures(spec, driver, group)
    if kept:
        slots = replace(slots, layout=slots.layout.without_pictures())
    memory = slots.trainer_memory(layout, driver, lambda stream: on_stream(device, stream.handle))
    for split, shape in kept.items():
        memory.keep_pictures(split, shape, spec.train.row.dtype)
    return memory


def check_memory(spec: RunSpec, nbytes: int, computed: int, available: float) -> None:
    """Refuse a step that needs more memory than there is, with an InputError.

    Beside `nbytes` of arrays, and a process that has imported everything, the results of a step
    take `computed` bytes, and half as much again is for what kernels need and what lies unused
    between them: AlexNet, ResNet-18 and GoogLeNet needed 0.96 to 1.35 times the sum.
    """
    needed = _PROCESS + nbytes + 1.5 * computed
    if needed > available:
        name = "sum_rows" if spec.config.summed_rows else "batch_size"
        raise InputError(
            f"{name}: {spec.config.pass_rows} takes about {shown_size(needed)} of memory in each"
            f" trainer, of which {shown_size(available)} is available; choose a smaller one, or"
            " fewer trainers"
        )


def open_loader(
    memory: HostMemory | CudaMemory, connection: Connection | None, builder: MinibatchBuilder
) -> Loader:
    """Return what fills the slots: the process at the other end, or the trainer itself."""
    if isinstance(memory, HostMemory):
        if connection is None:
            return InProcessLoader(builder, memory.area)
        return ProcessLoader(connection)
    if connection is None:
        uploader = SlotUploader(memory.driver, memory.areas)
        return OrderedLoader(InProcessLoader(builder, uploader), memory.areas, memory.stream)
    handles = tuple(area.handle() for area in memory.areas)
    connection.send((memory.areas[0].layout, handles))
    return OrderedLoader(ProcessLoader(connection), memory.areas, memory.stream)
