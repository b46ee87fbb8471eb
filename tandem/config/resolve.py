"""Settings in relation to each other and to the machine: what contradicts, what ``auto`` means."""

import itertools
import logging
from collections.abc import Sequence

from tandem.compilers import missing_for_triton
from tandem.config.hardware import (
    RankInfo,
    available_cores,
    has_bfloat16,
    have_own_gpus,
    place_devices,
    resolve_devices,
    threads_of,
)
from tandem.config.schema import CHOICES, Config
from tandem.data.order import trainer_shares
from tandem.distributed import RULES, RunFacts
from tandem.errors import InputError
from tandem.layers.choices import metrics_of
from tandem.layers.monitored import check_monitor
from tandem.layers.training_pass import is_below
from tandem.optim import OPTIMIZERS
from tandem.processor import describe_processor, prefers_winograd
from tandem.registry import check

log = logging.getLogger(__name__)

_MOST_LOADER_THREADS = 8  # for one GPU; estimated, not measured on a machine with one


def resolve(config: Config, ranks: Sequence[RankInfo] = ()) -> Config:
    """Check how settings fit together, and replace every ``auto`` but one.

    ``data_on_gpu: auto`` stays, where it is possible: each trainer sees on its GPU whether the
    pictures fit (`tandem.training.kept_pictures`). `ranks` has the trainers if they are ranks that
    were started together. Raises `InputError` if settings contradict each other, or require what
    the trainers do not have.
    """
    if config.exchange == "auto":
        config = config.model_copy(update={"exchange": resolve_exchange(config)})
    check_settings(config)
    if ranks:
        _check_ranks(config, ranks)
        devices = place_devices(config.devices, ranks, config.para_load)
    else:
        devices = resolve_devices(config.devices, config.para_load)
    config = _shared_out(config.model_copy(update={"devices": devices}))
    if (config.min_trainers or 0) > len(devices):
        raise InputError(
            f"min_trainers: found {config.min_trainers}, expected at most {len(devices)}, the "
            "number of devices"
        )
    facts = run_facts(config, ranks)
    settings = dict(config)
    if config.summed_rows and facts.on_gpu:
        raise InputError(
            f"sum_rows is {config.sum_rows} and devices are {facts.listed_devices}: partial sums "
            "lie in the host's memory, so set devices to cpu, or sum_rows to auto"
        )
    for registry in CHOICES:
        check(registry.setting, registry.chosen(settings), facts)
    if config.precision == "tf32" and not facts.on_gpu:
        raise InputError("precision: tf32 is a format of GPUs; on cpu use float32 or bfloat16")
    if config.convolutions == "winograd" and facts.on_gpu:
        raise InputError("convolutions: winograd is for CPUs; on GPUs cuDNN chooses")
    if config.trace == "ops":
        _check_traced_ops(config, facts)
    keeps = _keeps_data(config, facts)
    cores = threads_of(ranks) if ranks else len(available_cores()) // len(devices) or 1
    found = {
        "threads": cores,
        "collective": _collective(config, facts),
        "compile": facts.on_gpu and _compiles(config, ranks),
        "convolutions": _convolutions(facts, ranks),
        "loader_threads": min(cores, _MOST_LOADER_THREADS) if facts.on_gpu else 1,
        "use_data_layer": facts.on_gpu,
        "data_on_gpu": "auto" if keeps else False,
    }
    if config.precision == "auto":
        found["precision"] = _precision(facts, ranks)
    return config.model_copy(
        update={key: value for key, value in found.items() if settings[key] == "auto"}
    )


def run_facts(config: Config, ranks: Sequence[RankInfo] = ()) -> RunFacts:
    """Collect what the requirements of choices look at; `config` has its devices resolved."""
    return RunFacts(
        ranks[0].starter if ranks else None,
        tuple(config.devices),
        tuple(rank.machine for rank in ranks),
        bool(ranks) and have_own_gpus(config.devices, ranks),
        dict(config)["bucket_mb"],
        config.precision,
        config.optimizer,
        OPTIMIZERS[config.optimizer].is_linear,
        RULES[config.rule].is_synchronous,
    )


def check_settings(config: Config) -> None:
    """Refuse settings that contradict each other."""
    settings = dict(config)
    if settings["error_feedback"] and config.collective != "asa16":
        raise InputError(
            f"error_feedback is true while collective is {config.collective}, which rounds "
            "nothing: it is for collective: asa16"
        )
    if config.summed_rows:
        _check_sums(config)
    if not RULES[config.rule].is_synchronous:
        _check_asynchronous(config)
    if divided := divided_by(config):
        _check_divided(config, divided)
    if config.min_trainers is not None:
        _check_fewer(config, divided)
    if config.load_epoch != "latest" and not config.resume_train:
        raise InputError(
            f"load_epoch is {config.load_epoch} and resume_train is false: set it to continue a run"
        )
    if settings["average_overwrites"] and settings["average_weights"] is None:
        raise InputError("average_overwrites is set and average_weights is not: there are none")
    if " " in config.clips:
        raise InputError(
            f"{config.clips} are set, expected one of them: gradients are clipped once"
        )
    if config.clips and (divided or config.exchange != "gradients"):
        found = divided or f"exchange is {config.exchange}"
        raise InputError(
            f"{config.clips} is set and {found}: a norm is of whole gradients, the same at all "
            "trainers, so set exchange to gradients, or leave it at auto, and divide no layers"
        )
    names = [metric.name for metric in metrics_of(config.metrics)]
    if len(set(names)) < len(names):
        raise InputError(f"metrics: found {', '.join(names)}, expected each name once")
    if config.lr_policy == "plateau":
        check_monitor("lr_monitor", settings["lr_monitor"], names)
    if config.stop_patience or config.stop_at is not None:
        check_monitor("stop_monitor", config.stop_monitor, names)
    check_monitor("keep_monitor", config.keep_monitor, names)
    if config.lr_policy == "table" and not settings["lr_table"]:
        raise InputError("lr_table: found {}, expected rates for lr_policy: table")
    if bucket_mb := settings["bucket_mb"]:
        _check_buckets(config, f"bucket_mb is {bucket_mb:g}", settings["error_feedback"])
    if config.norm_before_pool and config.network_options.get("norm_before_pool") is False:
        raise InputError("norm_before_pool is true, and false in network_options")
    if config.init_weights is None:
        if config.init_weights_skip:
            raise InputError("init_weights_skip is set, but init_weights names no checkpoint")
        if config.freeze and not config.resume_train:
            raise InputError(
                "freeze is set, but init_weights names no checkpoint: the layers would keep "
                "their random initial weights"
            )
    _check_frozen(config)


def group_of(batch: int) -> int:
    """Rows that are normalised together in a global minibatch: its largest divisor up to 32.

    That has to be 4 or more, for statistics of fewer rows say little; else it is the whole.
    """
    largest = next(rows for rows in range(min(32, batch), 0, -1) if batch % rows == 0)
    return largest if largest >= 4 else batch


def _shared_out(config: Config) -> Config:
    """The settings with each trainer's `batch_size`, at most, of a `global_batch`.

    With `sum_rows` there is always one, and `batch_size` is what `lr_scaling` compares it with.
    """
    whole, rows, summed = config.global_batch, config.norm_rows, config.summed_rows
    if summed:
        return _summed(config, whole or config.batch_size * len(config.devices), summed)
    if whole is None:
        return config
    divided = divided_by(config) or f"rule is {config.rule}"
    if divided_by(config) or not RULES[config.rule].is_synchronous:
        raise InputError(
            f"global_batch is {whole} and {divided}: shares are then the same for all trainers, so "
            "set batch_size, and global_batch to null"
        )
    group = group_of(whole) if rows == "auto" else int(rows)
    if whole % group:
        raise InputError(f"norm_rows: found {group}, expected a divisor of global_batch {whole}")
    own = trainer_shares(whole, len(config.devices), group)[0]
    return config.model_copy(update={"batch_size": own.stop, "norm_rows": group})


def _summed(config: Config, whole: int, summed: int) -> Config:
    """The settings with a `global_batch` of whole groups of `sum_rows`."""
    group = group_of(summed) if config.norm_rows == "auto" else int(config.norm_rows)
    for name, rows, of, all_rows in (
        ("sum_rows", summed, "global_batch", whole),
        ("norm_rows", group, "sum_rows", summed),
    ):
        if all_rows % rows:
            raise InputError(f"{name}: found {rows}, expected a divisor of {of}, {all_rows}")
    return config.model_copy(update={"global_batch": whole, "norm_rows": group})


def _check_frozen(config: Config) -> None:
    """Refuse frozen layers with random weights, or with a rate that would have no effect."""
    others = {
        "init_weights_skip": config.init_weights_skip,
        "lr_multipliers": config.lr_multipliers,
    }
    for setting, layers in others.items():
        for frozen, layer in itertools.product(config.freeze, layers):
            if layer == frozen:
                raise InputError(f"freeze and {setting} both name {layer}, which contradicts")
            is_within = setting == "init_weights_skip" and is_below(frozen, [layer])
            if is_within or is_below(layer, [frozen]):
                raise InputError(
                    f"freeze names {frozen} and {setting} {layer}, one of which is below the "
                    "other, which contradicts"
                )


def resolve_norm_rows(config: Config) -> Config:
    """Replace ``norm_rows: auto`` for a network with averages; refuse rows that do not divide."""
    rows, batch = config.group_rows, config.pass_rows
    if rows is None:
        return config
    if batch % rows:
        divisors = [n for n in range(1, batch + 1) if batch % n == 0]
        near = [*[n for n in divisors if n < rows][-1:], *[n for n in divisors if n > rows][:1]]
        batches = [n for n in (batch // rows * rows, -(-batch // rows) * rows) if n]
        raise InputError(
            f"norm_rows: found {rows}, expected a divisor of batch_size {batch}, such as "
            f"{' or '.join(map(str, near))} (or set batch_size to "
            f"{' or '.join(map(str, batches))}): a group of rows that are normalised together "
            "would lie at two trainers, and the number of trainers would change the result"
        )
    return config.model_copy(update={"norm_rows": rows})


def divided_by(config: Config) -> str:
    """The setting by which trainers compute parts of one graph; empty where there is none."""
    if config.fully_connected != "replicated":
        return f"fully_connected is {config.fully_connected}"
    return "norm_rows is global" if config.norm_rows == "global" else ""


def _check_divided(config: Config, divided: str) -> None:
    """Refuse what trainers of one graph cannot do: in it, gradients are sums over all of them."""
    if not RULES[config.rule].is_synchronous:
        raise InputError(
            f"{divided} and rule is {config.rule}: trainers that compute one step together are in "
            "step, so leave rule at bsp"
        )
    if config.exchange != "gradients":
        raise InputError(
            f"{divided} and exchange is {config.exchange}: trainers add up gradients of what each "
            "has a copy of, so set exchange to gradients, or leave it at auto"
        )
    if bucket_mb := dict(config)["bucket_mb"]:
        raise InputError(
            f"{divided} and bucket_mb is {bucket_mb:g}: the backward pass waits for other trainers "
            "by itself, so set bucket_mb to 0"
        )


def _check_sums(config: Config) -> None:
    """Refuse what would add in an order that depends on the number of trainers."""
    divided, given = divided_by(config), f"sum_rows is {config.sum_rows}"
    if divided:
        raise InputError(
            f"{given} and {divided}, whose sums run through all trainers within a pass: set one "
            "of them to its default"
        )
    allowed = {
        "rule": ("bsp",),
        "exchange": ("gradients",),
        "collective": ("auto", "asa"),
        "bucket_mb": (0,),
    }
    for key, values in allowed.items():
        if (found := dict(config)[key]) not in values:
            raise InputError(
                f"{given} and {key} is {found}: trainers exchange partial sums of gradients, in "
                f"a tree's order, so set {key} to {values[-1]}, or sum_rows to auto"
            )


def _check_asynchronous(config: Config) -> None:
    for key, value in {"exchange": "average", "collective": "auto", "check_every": 0}.items():
        if (given := getattr(config, key)) != value:
            raise InputError(
                f"rule: found {config.rule}, by which trainers have weights of their own, expected "
                f"bsp where {key} is {given}; or leave {key} at {value}"
            )
    if config.on_nan == "rollback":
        raise InputError(
            f"on_nan is rollback and rule is {config.rule}: trainers that are not synchronous "
            "cannot go back together; use stop or skip"
        )


def _check_fewer(config: Config, divided: str) -> None:
    """Refuse what fewer trainers cannot continue: the same global minibatch, at the same rate."""
    scales = config.lr_scaling != "none" and not config.summed_rows
    scaled = f"lr_scaling is {config.lr_scaling}" if scales else ""
    own = "" if RULES[config.rule].is_synchronous else f"rule is {config.rule}"
    if hindrance := divided or own or scaled:
        raise InputError(
            f"min_trainers is {config.min_trainers} and {hindrance}: that depends on the number of "
            "trainers, so leave one of both at its default"
        )


def _check_buckets(config: Config, given: str, error_feedback: bool) -> None:
    if config.exchange != "gradients":
        raise InputError(
            f"{given} and exchange is {config.exchange}: only gradients can be sent during the "
            "backward pass, so set exchange to gradients"
        )
    if error_feedback and config.on_nan == "skip":
        raise InputError(
            f"{given}, error_feedback is true and on_nan is skip: the gradients of a skipped "
            "minibatch would have been sent, and their rounding error kept; change one of the three"
        )


def _check_traced_ops(config: Config, facts: RunFacts) -> None:
    """Refuse to trace Ops where a step does not call them one by one."""
    if config.compile is True:
        raise InputError(
            "trace is ops and compile is true, which fuses Ops: set compile to false, or trace to "
            "steps"
        )
    if facts.on_gpu:
        raise InputError(
            f"trace is ops and devices are {', '.join(facts.devices)}, which replay a recorded "
            "step as a whole: set trace to steps"
        )


def _check_ranks(config: Config, ranks: Sequence[RankInfo]) -> None:
    """Refuse what ranks cannot do, however they exchange."""
    starter = ranks[0].starter
    if config.restarts:
        instead = {
            "mpirun": "let the job script start the run again, with --resume_train true",
            "torchrun": f"use torchrun --max-restarts {config.restarts}, with --resume_train true",
        }
        raise InputError(
            f"restarts: {config.restarts} is not possible under {starter}, which ends all ranks "
            f"when one fails: {instead[starter]}"
        )
    if config.min_trainers is not None:
        raise InputError(
            f"min_trainers: found {config.min_trainers}, expected null under {starter}, which ends "
            "all ranks when one fails: set exchange: gradients, by which a rank that is left saves "
            "the last step, and let the job start again with --resume_train true"
        )
    first = ranks[0].software
    for number, rank in enumerate(ranks):
        if rank.software != first:
            raise InputError(
                f"the ranks have different software: rank 0 {', '.join(first)}; rank {number} "
                f"{', '.join(rank.software)}; use the same environment on every machine"
            )


def _compiles(config: Config, ranks: Sequence[RankInfo]) -> bool:
    """Resolve ``compile: auto`` on GPUs, alike for trainers on different machines."""
    found = [(f"rank {n}", rank.missing_for_triton) for n, rank in enumerate(ranks)]
    found = found or [("this machine", missing_for_triton())]
    missing = [f"{who} lacks {what}" for who, what in found if what]
    if missing and config.compile == "auto":
        log.info(
            "compile: auto is false, and layers run without fused kernels: Triton can't compile "
            "for GPUs: %s",
            missing[0],
        )
    return not missing


def _convolutions(facts: RunFacts, ranks: Sequence[RankInfo]) -> str:
    """Resolve ``convolutions: auto``, alike for trainers on different processors."""
    processors = [rank.processor for rank in ranks] or [describe_processor()]
    by_winograd = not facts.on_gpu and all(prefers_winograd(name) for name in processors)
    return "winograd" if by_winograd else "direct"


def _keeps_data(config: Config, facts: RunFacts) -> bool:
    """Test if pictures can be kept on GPUs; refuse ``data_on_gpu: true`` where they cannot."""
    if config.data_on_gpu is True and not facts.on_gpu:
        raise InputError("data_on_gpu: true is for GPUs; on cpu use auto or false")
    if config.data_on_gpu is True and config.use_data_layer is False:
        raise InputError(
            "data_on_gpu is true and use_data_layer is false: a GPU keeps whole pictures, and so "
            "has to crop them; set use_data_layer to true, or data_on_gpu to auto or false"
        )
    return facts.on_gpu and config.use_data_layer is not False


def _precision(facts: RunFacts, ranks: Sequence[RankInfo]) -> str:
    """Resolve ``precision: auto``, alike for trainers on different devices."""
    if not facts.on_gpu:
        return "float32"
    numbers = [int(device.removeprefix("cuda:")) for device in facts.devices]
    if ranks:
        able = all(r.bfloat16[n] for r, n in zip(ranks, numbers, strict=True))
    else:
        able = all(has_bfloat16(number) for number in sorted(set(numbers)))
    return "bfloat16" if able else "float32"


def resolve_exchange(config: Config) -> str:
    """The exchange that ``exchange: auto`` stands for.

    Without synchrony it has no effect, and is named as ever.
    """
    if config.summed_rows:
        return "gradients"
    if not RULES[config.rule].is_synchronous:
        return "average"
    is_linear = OPTIMIZERS[config.optimizer].is_linear and not config.clips
    averages = is_linear and not divided_by(config) and config.min_trainers is None
    return "average" if averages else "gradients"


def _collective(config: Config, facts: RunFacts) -> str:
    """The all-reduce that ``collective: auto`` stands for."""
    if facts.starter is None or not RULES[config.rule].is_synchronous:
        return "auto"
    return "nccl" if facts.has_own_gpus and facts.starter == "torchrun" else "asa"
