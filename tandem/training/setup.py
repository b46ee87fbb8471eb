"""What a trainer is made of: network, memory, compiled functions, weights, exchange, input."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tandem.artifacts.checkpoint import RunState, initial_weights, read_checkpoint
from tandem.artifacts.metrics import MetricSums
from tandem.data.mean_image import read_mean
from tandem.distributed import Exchange, ExchangeSettings, make_exchange
from tandem.layers.network import Network, build_network
from tandem.memory.flat import FlatLayout
from tandem.memory.parameters import CudaMemory, HostMemory
from tandem.optim import OPTIMIZERS, Optimizer
from tandem.optim.parameter_groups import check_layers, learned_rates, running_averages
from tandem.training.input_pipeline import InputPipeline, minibatch_requests
from tandem.training.memory import open_loader, open_memory
from tandem.training.run_spec import RunSpec

if TYPE_CHECKING:
    from tandem.training.compiled_network import CompiledNetwork
    from tandem.training.worker import WorkerArguments


@dataclass(frozen=True)
class TrainingSetup:
    """The parts of a trainer.

    Attributes
    ----------
    memory : HostMemory or CudaMemory
        Parameters, gradients and slots.
    model : CompiledNetwork
        The network's functions over this memory, with the weights of the run's beginning.
    state : RunState
        Where the run begins.
    exchange : Exchange
        With the other trainers.
    pipeline : InputPipeline
        Its minibatches.
    checkpoint_nbytes : int
        Bytes of all weights and optimizer states, frozen ones included.
    untrained : tuple of str
        Names of the network's arrays that no optimizer steps.
    """

    memory: HostMemory | CudaMemory
    model: "CompiledNetwork"
    state: RunState
    exchange: Exchange
    pipeline: InputPipeline
    checkpoint_nbytes: int
    untrained: tuple[str, ...]


def set_up(spec: RunSpec, arguments: "WorkerArguments") -> TrainingSetup:
    """Make a trainer's parts. Collective: when it returns, all trainers have their weights.

    Parameters
    ----------
    spec : RunSpec
        The run.
    arguments : WorkerArguments
        What the launcher gave the trainer.

    Raises
    ------
    InputError
        The network, a checkpoint or a layer's name cannot be used.
    """
    from tandem.backend import keep_freed_memory, set_threads

    set_threads(spec.threads)
    keep_freed_memory()
    config, group = spec.config, arguments.group
    network = build_network(spec.description, config.dtype)
    optimizer = OPTIMIZERS.chosen(dict(config))
    layout = parameter_layout(network, optimizer, config.freeze, channels_last=spec.on_gpu)
    memory = open_memory(spec, arguments.slots, group, layout)
    model = _compile(
        spec, network, optimizer, memory, lambda name: exchange.on_gradient_ready(name)
    )
    state = _load_weights(spec, network, model)
    _load_sums(model, state, arguments.rank, spec.trainers)
    exchange = make_exchange(ExchangeSettings.of(dict(config)), memory, group)
    loader = open_loader(memory, arguments.loader, spec.filler())
    pipeline = InputPipeline(minibatch_requests(spec, arguments.rank, state), loader)
    group.barrier()  # shared memory is complete when every trainer has loaded its weights
    whole = parameter_layout(network, optimizer)
    return TrainingSetup(
        memory,
        model,
        state,
        exchange,
        pipeline,
        whole.parameters_nbytes,
        tuple(name for name, _ in whole.untrained),
    )


def parameter_layout(
    network: Network,
    optimizer: Optimizer,
    freeze: Collection[str] = (),
    channels_last: bool = False,
) -> FlatLayout:
    """The layout of a network's parameters and optimizer states; frozen layers are left out."""
    declared = network.parameters.declared
    learned, averages = learned_rates(declared, freeze), running_averages(declared, freeze)
    return FlatLayout.of(
        {name: declared[name].shape for name in learned},
        network.dtype,
        channels_last,
        optimizer.states,
        {name: declared[name].shape for name in averages},
    )


def _compile(
    spec: RunSpec,
    network: Network,
    optimizer: Optimizer,
    memory: HostMemory | CudaMemory,
    on_gradient_ready: Callable[[str], None],
) -> "CompiledNetwork":
    from tandem.training.compiled_network import CompiledNetwork

    config = spec.config
    sends_early = dict(config)["bucket_mb"] > 0 and spec.trainers > 1
    return CompiledNetwork(
        network,
        config,
        optimizer,
        read_mean(config.mean_path, spec.train.image_size),
        memory.vectors,
        device=memory.device,
        compile=bool(config.compile),
        device_crops=spec.device_crops,
        records=memory.records,
        updated=memory.updated,
        on_gradient_ready=on_gradient_ready if sends_early else None,
    )


def _load_weights(spec: RunSpec, network: Network, model: "CompiledNetwork") -> RunState:
    """Load the weights of the run's beginning; where it begins."""
    shapes = {name: p.shape for name, p in network.parameters.declared.items()}
    begin = RunState(
        global_batch=spec.global_batch, train_pictures=spec.train.size, skipped=spec.skipped
    )
    whole = spec.resumed or (spec.weights if spec.job == "validate" else None)
    if whole is not None:
        checkpoint = read_checkpoint(whole, shapes)
        model.load(checkpoint.weights, checkpoint.states)
        return replace(
            checkpoint.state,
            global_batch=begin.global_batch,
            train_pictures=begin.train_pictures,
            skipped=tuple(dict.fromkeys((*checkpoint.state.skipped, *spec.skipped))),
        )
    for name, value in network.initial_values(spec.config.seed):
        model.load({name: value})
    if spec.weights is not None:
        skipped = spec.config.init_weights_skip
        check_layers("init_weights_skip", skipped, shapes)
        model.load(initial_weights(spec.weights, shapes, skipped))
    return begin


def _load_sums(model: "CompiledNetwork", state: RunState, rank: int, trainers: int) -> None:
    """Continue the sums of a checkpoint, which another number of trainers may have written."""
    sums = list(state.pending.sums)
    if len(sums) != trainers:
        sums = [sum(sums, MetricSums())] + [MetricSums()] * (trainers - 1)
    model.put_sums("train", sums[rank])
