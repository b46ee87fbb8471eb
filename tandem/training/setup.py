"""The parts of a trainer: network, memory, compiled functions, weights, exchange, input."""

import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tandem.artifacts.checkpoint import RunState, initial_weights, read_checkpoint
from tandem.artifacts.metrics import Sums
from tandem.artifacts.reproducibility import with_norm_rows
from tandem.config.resolve import resolve_norm_rows
from tandem.config.schema import Config
from tandem.data.mean_image import read_mean
from tandem.distributed import Exchange, ExchangeSettings, make_channel, make_exchange
from tandem.distributed.channel import CheckedChannel
from tandem.errors import InputError
from tandem.layers.checks import checked_initial_values
from tandem.layers.network import Network, build_network
from tandem.layers.training_pass import is_below
from tandem.memory.flat import FlatLayout
from tandem.memory.parameters import CudaMemory, HostMemory
from tandem.optim import Optimizer, optimizer_of
from tandem.optim.optimizer import OPTIMIZERS
from tandem.optim.parameter_groups import ParameterGroups, check_layers
from tandem.training.input_pipeline import InputPipeline, minibatch_requests
from tandem.training.kept_pictures import read_kept_pictures
from tandem.training.memory import check_memory, open_loader, open_memory
from tandem.training.run_spec import RunSpec
from tandem.validation import listed

if TYPE_CHECKING:
    from tandem.training.compiled_network import CompiledNetwork
    from tandem.training.division import Division
    from tandem.training.shards import Gathering
    from tandem.training.worker import WorkerArguments

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TrainingSetup:
    """The parts of a trainer."""

    spec: RunSpec  # with `norm_rows` resolved, where the network has averages
    memory: HostMemory | CudaMemory
    model: "CompiledNetwork"  # with the weights of the run's beginning
    state: RunState  # where the run begins
    exchange: Exchange
    pipeline: InputPipeline
    checkpoint_nbytes: int  # of all weights and optimizer states, frozen ones included
    untrained: tuple[str, ...]  # names of the network's arrays that no optimizer steps
    gathering: "Gathering | None"  # of what trainers divide; None: each has all parameters
    channel: CheckedChannel | None  # by which they divide it


def set_up(spec: RunSpec, arguments: "WorkerArguments") -> TrainingSetup:
    """Make a trainer's parts. Collective: when it returns, all trainers have their weights.

    Raises
    ------
    InputError
        The network, a checkpoint or a layer's name cannot be used, or memory does not suffice.
    """
    spec = spec.of_rank(arguments.rank)
    if spec.own_code:
        pickle.loads(spec.own_code)()
    network = build_network(spec.description, spec.config.dtype)
    drawn = _drawn_ahead(spec, network)

    # They import PyTorch, which takes as long as drawing 60 million numbers.
    from tandem.backend import keep_freed_memory, set_threads
    from tandem.training.compiled_network import CompiledNetwork
    from tandem.training.division import divide
    from tandem.training.shards import Gathering

    set_threads(spec.threads)
    if not spec.on_gpu:
        keep_freed_memory()  # results of kernels; a GPU's are kept by PyTorch
    config, group = spec.config, arguments.group
    settings = ExchangeSettings.of(dict(config))
    own_freeze = config.freeze
    if spec.job == "train":
        config = with_frozen(config, network)
        spec = replace(spec, config=config)
    check_input(network, spec)
    untrained = tuple(n for n, p in network.parameters.declared.items() if not p.trainable)
    if untrained and spec.job == "train":
        spec = with_averages(spec)
        config = spec.config
    optimizer = optimizer_of(dict(config))
    division = divide(network, config, spec.trainers, arguments.rank, spec.job)
    memory = _make_memory(spec, arguments, network, optimizer, division)
    read_kept_pictures(spec, memory, arguments.status)
    sends_early = settings.exchange.buckets(memory.layout) and spec.trainers > 1
    channel = None if division is None else make_channel(memory, group)
    model = CompiledNetwork(
        network,
        config,
        optimizer,
        None if spec.train.pictures is None else read_mean(config.mean_path, spec.train.image_size),
        memory,
        (lambda name: exchange.on_gradient_ready(name)) if sends_early else None,
        division,
        channel,
    )
    if isinstance(memory, HostMemory):
        check = partial(check_memory, spec, _nbytes(memory), available=arguments.available)
        check(0)  # before the loader fills its slots
        model.functions.check = check
    state = _load_weights(spec, network, model, drawn)
    sums = sums_by_rank(state, spec.trainers, config.summed_rows is not None)
    model.put_sums("train", sums[arguments.rank])
    exchange = make_exchange(settings, memory, group)
    loader = open_loader(memory, arguments.loader, spec.minibatch_builder())
    pipeline = InputPipeline(minibatch_requests(spec, arguments.rank, state), loader)
    group.barrier()  # shared memory is complete when every trainer has loaded its weights
    nbytes = parameter_layout(network, optimizer).parameters_nbytes
    gathering = None
    if division is not None:
        declared = network.parameters.declared
        gathering = Gathering(division, declared, np.dtype(network.dtype), group)
    # A checkpoint has the settings of the user, not what the network freezes of itself.
    spec = replace(spec, config=spec.config.model_copy(update={"freeze": own_freeze}))
    return TrainingSetup(
        spec, memory, model, state, exchange, pipeline, nbytes, untrained, gathering, channel
    )


def _make_memory(
    spec: RunSpec,
    arguments: "WorkerArguments",
    network: Network,
    optimizer: Optimizer,
    division: "Division | None",
) -> HostMemory | CudaMemory:
    """Make the flat vectors, and those of what this trainer alone has a part of. Collective."""
    lay_out = partial(
        parameter_layout,
        network,
        optimizer,
        spec.config.parameter_groups,
        channels_last=spec.on_gpu,
    )
    layout = lay_out() if division is None else lay_out(select=division.replicated)
    memory = open_memory(spec, arguments.slots, arguments.group, layout)
    if division is not None and (own := lay_out(select=division.own)).size:
        memory.add_shards(own)
    return memory


def _nbytes(memory: HostMemory) -> int:
    """The bytes of the trainer's slots, and of its parameters, gradients and optimizer states."""
    total = len(memory.slots) * memory.slot_layout.nbytes
    for vectors in filter(None, (memory.vectors, memory.shards)):
        for arrays in (vectors.weights, vectors.gradients, *vectors.states.values()):
            total += sum(array.nbytes for array in arrays.values())
    return total + memory.sums_nbytes


def check_input(network: Network, spec: RunSpec) -> None:
    """Refuse a network that takes other rows than those of the data, with an InputError."""
    found, expected = spec.input_shape, network.shapes.get("input")
    if as_stored := network.takes_stored_rows and spec.train.pictures is None:
        found = spec.train.row.shape
    if expected == found or expected is None:
        return
    rows = "crops" if spec.train.pictures is not None else "rows"
    ours, theirs = (s if as_stored else _channels_last(s) for s in (found, expected))
    raise InputError(
        f"{spec.config.data_folder}: found {rows} of shape {ours}, expected {theirs}, which"
        f" {type(network).__name__} takes"
    )


def _channels_last(shape: tuple[int, ...]) -> str:
    """A shape as data has it, and for images as the network has it."""
    if len(shape) != 3:
        return str(shape)
    channels, *sides = shape
    return f"{(*sides, channels)} (row, column, channel)"


def with_averages(spec: RunSpec) -> RunSpec:
    """The run of a network with averages: `norm_rows` is resolved, and one of its conditions.

    Raises InputError if `norm_rows` does not divide the batch size.
    """
    config = resolve_norm_rows(spec.config)
    return replace(spec, config=config, conditions=with_norm_rows(spec.conditions, config))


def with_frozen(config: Config, network: Network) -> Config:
    """The settings with the layers that a network freezes itself."""
    frozen = tuple(dict.fromkeys((*config.freeze, *network.frozen)))
    return config.model_copy(update={"freeze": frozen})


def parameter_layout(
    network: Network,
    optimizer: Optimizer,
    groups: ParameterGroups = ParameterGroups(),  # noqa: B008
    channels_last: bool = False,
    select: Callable[[dict[str, Shape]], dict[str, Shape]] = dict,
) -> FlatLayout:
    """The layout of a network's parameters and optimizer states; frozen layers are left out.

    `select` returns which of them the vectors hold, and of what shape, from their shapes by name.
    """
    declared = network.parameters.declared
    learned, averages = groups.learned(declared), groups.averages(declared)
    return FlatLayout.of(
        select({name: declared[name].shape for name in learned}),
        network.dtype,
        channels_last,
        optimizer.states,
        select({name: declared[name].shape for name in averages}),
    )


def _whole_weights(spec: RunSpec) -> Path | None:
    """Return the checkpoint of a run that is continued or validated."""
    return spec.resumed or (spec.weights if spec.job == "validate" else None)


def _draws(spec: RunSpec) -> bool:
    """Return whether a parameter begins at random."""
    whole = _whole_weights(spec)
    return whole is None and (spec.weights is None or bool(spec.config.init_weights_skip))


def _drawn_ahead(spec: RunSpec, network: Network) -> Future[list[tuple[str, np.ndarray]]] | None:
    """Begin to draw initial values in a thread, where that needs no import of its own."""
    if not _draws(spec) or type(network).initial_values is not Network.initial_values:
        return None
    executor = ThreadPoolExecutor(1)
    try:
        return executor.submit(list, checked_initial_values(network, spec.config.seed))
    finally:
        executor.shutdown(wait=False)


def _load_weights(
    spec: RunSpec,
    network: Network,
    model: "CompiledNetwork",
    drawn: Future[list[tuple[str, np.ndarray]]] | None,
) -> RunState:
    """Load the weights of the run's beginning; return where it begins."""
    shapes = {name: p.shape for name, p in network.parameters.declared.items()}
    begin = RunState(
        global_batch=spec.global_batch, train_pictures=spec.train.size, skipped=spec.skipped
    )
    if (whole := _whole_weights(spec)) is not None:
        checkpoint = read_checkpoint(whole, shapes)
        state = checkpoint.state
        if spec.continues_optimizer and _counts_are_of_all(spec):
            model.load(checkpoint.weights, checkpoint.states)
        else:  # whose states begin at zero
            model.load(checkpoint.weights)
            state = replace(state, updates=0)
        return replace(
            state,
            global_batch=begin.global_batch,
            train_pictures=begin.train_pictures,
            skipped=tuple(dict.fromkeys((*checkpoint.state.skipped, *spec.skipped))),
        )
    if _draws(spec):
        values = drawn.result() if drawn else checked_initial_values(network, spec.config.seed)
        for name, value in values:
            model.load({name: value})
        if drawn:
            drawn.result().clear()  # the last copy of all weights
    if spec.weights is not None:
        skipped = spec.config.init_weights_skip
        check_layers("init_weights_skip", skipped, shapes)
        model.load(initial_weights(spec.weights, shapes, skipped, spec.description))
    return begin


def _counts_are_of_all(spec: RunSpec) -> bool:
    """Return whether the optimizer has counted updates of all parameters that are trained now.

    Raises InputError where layers were frozen before, and the resume is to be exact.
    """
    config = spec.config
    before = () if spec.header is None else spec.header.config.get("freeze", ())
    thawed = [layer for layer in before if not is_below(layer, config.freeze)]
    if spec.job != "train" or not thawed or not OPTIMIZERS.chosen(dict(config)).numbers(0):
        return True
    if config.exact:
        raise InputError(
            f"freeze: found {list(config.freeze)}, expected {listed(thawed)} too, as in"
            f" {spec.resumed}: {config.optimizer} divides its states by what they lack after so"
            " many updates, of which these layers had none; set exact: false (--exact false) to"
            " continue with states of zero for all"
        )
    return False


def sums_by_rank(state: RunState, trainers: int, are_common: bool = False) -> tuple[Sums, ...]:
    """The sums of a checkpoint, which another number of trainers may have written.

    With `sum_rows` they are common: every trainer has those of all.
    """
    sums = state.pending.sums
    if are_common:
        return (sum(sums, Sums()),) * trainers
    if len(sums) != trainers:
        return (sum(sums, Sums()), *[Sums()] * (trainers - 1))
    return sums
