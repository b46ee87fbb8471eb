"""Preparation of a run: everything is resolved and checked before any process starts."""

import logging
import os
import resource
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.artifacts.checkpoint import CheckpointHeader, read_header
from tandem.artifacts.metrics_log import read_records
from tandem.artifacts.reproducibility import (
    check_exact,
    conditions,
    recorded_norm_rows,
    with_norm_rows,
)
from tandem.artifacts.run_folder import (
    CONFIGURATION,
    RECORD,
    chosen_checkpoint,
    find_checkpoint,
    list_checkpoints,
    neighbouring_runs,
)
from tandem.config.fields import flag
from tandem.config.hardware import RankInfo
from tandem.config.resolve import resolve
from tandem.config.schema import Config, Data, Output, Workers, is_keras_model
from tandem.data.colour import Basis, read_basis
from tandem.data.dataset import open_split
from tandem.data.manifest import ArrayManifest, Manifest, read_any_manifest
from tandem.data.mean_image import read_mean
from tandem.errors import InputError
from tandem.files import existing_folder
from tandem.launch.callbacks import find_callbacks
from tandem.layers.choices import LOSSES, OwnMetric, metrics_of
from tandem.layers.monitored import ERRORS
from tandem.layers.network import (
    ALEXNET,
    KERAS_NETWORK,
    NetworkDescription,
    check_network,
    own_code,
)
from tandem.memory import CLASS_LABEL
from tandem.nested import difference
from tandem.registry import check_class
from tandem.training.run_spec import Job, RunSpec
from tandem.validation import listed, shown, shown_size

# What a validation has nothing of, so that it is not refused for what training would be.
_OF_TRAINING = {
    "rand_colour": 0.0,
    "trace": "off",
    "load_epoch": "latest",
    "average_overwrites": 0,
    "clip_norm": None,
    "clip_global_norm": None,
    "clip_value": None,
    # They may name a metric of the user's own, which the run's file leaves out.
    "keep_monitor": "top1_error",
    "lr_policy": "constant",
    "stop_patience": 0,
    "stop_at": None,
    "freeze": (),
    "lr_multipliers": {},
    "init_weights_skip": (),
    "min_trainers": None,
    "restarts": 0,
    "rule": "bsp",
    "exchange": "auto",
    "bucket_mb": 0.0,
    "error_feedback": False,
}
_LEAST_ADDRESSES = 5 << 28  # bytes; a trainer of a tiny network takes 1.1 GB

log = logging.getLogger(__name__)

# What changes at a resume without a word: the machine, paths, reports, and how it is resumed.
_UNANNOUNCED = {
    *Data.model_fields,
    *Output.model_fields,
    *Workers.model_fields,
    *("devices", "threads", "compile", "convolutions", "collective"),
    *("resume_train", "load_epoch", "exact", "restarts", "min_trainers"),
    *("init_weights", "init_weights_skip"),
}


def prepare_run(
    config: Config,
    job: Job = "train",
    weights: Path | None = None,
    skipped: tuple[tuple[int, int], ...] = (),
    ranks: Sequence[RankInfo] = (),
) -> RunSpec:
    """Check everything that a run needs, and resolve every ``auto``. Nothing is written.

    A validation needs `weights`, and trainers that were started together as ranks need `ranks`.

    Raises
    ------
    InputError
        The first thing that is missing, damaged or does not fit.
    """
    if job == "validate":
        config = config.model_copy(update=_OF_TRAINING)
    config = resolve(config, ranks)
    resumed = None
    if job == "train":
        resumed = _checkpoint_to_resume(config)
        weights = config.init_weights_path if resumed is None else None
        _check_run_folder(config, resumed)
        find_callbacks(config.callbacks)
    weights = weights and chosen_checkpoint(weights)
    path = resumed or weights
    header = None if path is None else read_header(path)
    if header is not None and (resumed is not None or job == "validate"):
        config = _with_graph(config, header.network)
    check_class("network", config.network)
    rows = None
    if resumed is not None and header is not None:
        rows = recorded_norm_rows(resumed, header.conditions)
        if rows is not None and config.norm_rows == "auto":
            config = config.model_copy(update={"norm_rows": rows})
    manifest = read_any_manifest(config.manifest_path)
    if isinstance(manifest, ArrayManifest):
        config = _without_pictures(config)
    folder, labels = config.data_path, config.label_path
    train = validation = open_split(manifest, folder, "val", labels, config.val_path)
    if job == "train":
        train = open_split(manifest, folder, "train", labels, config.train_path)
    colours: Basis = ()
    if isinstance(manifest, Manifest):
        check_crop_size(config, manifest)
        read_mean(config.mean_path, manifest.image_size)
        colours = read_basis(config.covariance_path, config.rand_colour)
    found = conditions(config, ranks)
    spec = RunSpec(
        job,
        config,
        manifest.wnids or None,
        train,
        validation,
        found if rows is None else with_norm_rows(found, config),
        resumed,
        weights,
        header,
        skipped,
        colours,
    )
    _check_limits(spec.trainers)
    _check_data(spec)
    _check_metrics(spec)
    _check_weights(spec)
    return spec


def _with_graph(config: Config, found: NetworkDescription) -> Config:
    """The settings with the graph of a checkpoint, where they name no network of their own."""
    is_own = config.network != ALEXNET and not is_keras_model(config.network)
    if found.network != KERAS_NETWORK or is_own or own_code(found.options):
        return config
    changes = {"network": found.network, "network_options": dict(found.options)}
    sizes = {"crop_size": found.crop_size or config.crop_size, "width": found.width}
    return config.model_copy(update=changes | sizes)


def _without_pictures(config: Config) -> Config:
    """The settings of a run on rows of arrays, which have no mean image and no colours."""
    if config.rand_colour:
        raise InputError(
            f"rand_colour: found {config.rand_colour:g}, expected 0: the data of"
            f" {config.data_folder} are rows of arrays, which have no colours"
        )
    return config.model_copy(update={"mean_file": None})


def _check_limits(trainers: int) -> None:
    """Refuse limits of the system (`ulimit`) under which the processes could not even start."""
    needed = 16 + 8 * trainers  # files that the launcher opens, measured: pipes and shared memory
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise InputError(
                f"a process may open at most {hard} files (ulimit -n), expected at least {needed}"
                f" for {trainers} {'trainer' if trainers == 1 else 'trainers'}"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if addresses != resource.RLIM_INFINITY and addresses < _LEAST_ADDRESSES:
        raise InputError(
            f"a process may have at most {shown_size(addresses)} of virtual memory (ulimit -v),"
            f" expected at least {shown_size(_LEAST_ADDRESSES)}: a trainer's libraries alone take"
            " that"
        )


def _check_data(spec: RunSpec) -> None:
    """Refuse a split without rows where the run needs some."""
    config, where = spec.config, spec.config.manifest_path
    if not spec.train.size:
        split = "training" if spec.job == "train" else "validation"
        raise InputError(f"{where}: found no {split} rows, expected at least one")
    if spec.job == "train":
        _check_minibatch(spec)
    if spec.validation.size:
        return
    needing = {
        "lr_policy": config.lr_policy in ("plateau", "auto"),
        "stop_patience": config.stop_patience > 0,
        "stop_at": config.stop_at is not None,
    }
    for name, needs in needing.items():
        if needs:
            raise InputError(
                f"{name}: found {getattr(config, name)}, which looks at values of the validation,"
                f" and no validation rows in {where}"
            )


def _check_minibatch(spec: RunSpec) -> None:
    """Refuse a global minibatch of more rows than there are."""
    config, rows, trainers = spec.config, spec.train.size, spec.trainers
    if spec.global_batch <= rows:
        return
    name, found, of_trainers, expected = "global_batch", spec.global_batch, "", f"at most {rows}"
    if not config.global_batch:
        name, found = "batch_size", config.batch_size
        of_trainers = f" for each of {trainers} trainers" if trainers > 1 else ""
        expected = f"at most {rows // trainers}" if rows >= trainers else f"at most {rows} trainers"
    raise InputError(
        f"{name}: found {found}{of_trainers}, more than the {rows} training rows in"
        f" {spec.config.manifest_path}; expected {expected}"
    )


def _check_metrics(spec: RunSpec) -> None:
    """Refuse a metric of classes of targets with one value, and a function that is not there."""
    has_classes = spec.train.target == CLASS_LABEL or spec.classes > 1
    if spec.job == "train":
        _check_followed(spec.config, spec.train.target == CLASS_LABEL, spec.classes)
    for metric in metrics_of(spec.config.metrics):
        if isinstance(metric, OwnMetric):
            metric.find()
        if not (metric.of_outputs or has_classes):
            raise InputError(
                f"metrics: found {metric.name}, which is of classes, and targets of one value;"
                " expected one of outputs, such as binary_accuracy or mae"
            )


def _check_followed(config: Config, has_labels: bool, classes: int) -> None:
    """Refuse that a rate or the end of training follows errors of targets that are no classes."""
    settings = dict(config)
    if has_labels or (classes > 1 and LOSSES.chosen(settings).of_classes):
        return
    follows = {
        "lr_monitor": config.lr_policy == "plateau",
        "stop_monitor": config.stop_patience > 0 or config.stop_at is not None,
    }
    followed = [f"{n}: {settings[n]}" for n in follows if follows[n] and settings[n] in ERRORS[1:]]
    followed += ["lr_policy: auto"] * (config.lr_policy == "auto")
    if followed:
        raise InputError(
            f"{followed[0]} follows an error of classes, and the targets are none with loss: "
            f"{config.loss}; expected validation_loss or one of metrics"
        )


def check_crop_size(config: Config, manifest: Manifest) -> None:
    """Refuse a crop that is larger than the pictures."""
    if config.crop_size > manifest.image_size:
        own = manifest.image_size - 2 * manifest.pad
        advice = f"; without their border of {manifest.pad} that is {own}" if manifest.pad else ""
        raise InputError(
            f"crop_size is {config.crop_size}, but the pictures of {config.manifest_path} are "
            f"{manifest.image_size} pixels wide and high; choose a crop_size of at most that"
            + advice
        )


def _checkpoint_to_resume(config: Config) -> Path | None:
    if not config.resume_train:
        return None
    found = find_checkpoint(config.weights_path, config.load_epoch)
    if found is None:
        if config.freeze and config.init_weights is None:
            raise InputError(
                f"{config.weights_path}: there is no checkpoint to resume from, and init_weights "
                "names none: the layers of freeze would keep random weights"
            )
        runs = neighbouring_runs(config.weights_path)
        log.warning(
            "%s: there is no checkpoint to resume from: the run starts from the beginning%s",
            config.weights_path,
            f"; runs beside it are {listed(runs)}" if runs else "",
        )
    return found


def _check_run_folder(config: Config, resumed: Path | None) -> None:
    """Refuse a folder that is not writable, or that holds what the run would overwrite."""
    folder = config.weights_path
    written = {"weights_dir": folder}
    if config.csv_file:
        written["csv_file"] = Path(config.csv_file).parent
    if config.tensorboard and config.tensorboard_dir:
        written["tensorboard_dir"] = Path(config.tensorboard_dir)
    for name, into in written.items():
        existing = existing_folder(into)
        if not existing.is_dir():
            raise InputError(f"{name} {into}: {existing} is a file, not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise InputError(f"{name} {into}: {existing} is not writable")
    checkpoints = list_checkpoints(folder)
    if config.resume_train:
        # Those after the latest sound one are damaged; the run will set them aside.
        later = checkpoints[checkpoints.index(resumed) + 1 :] if resumed else []
        if resumed and later and config.load_epoch != "latest":
            raise InputError(
                f"weights_dir {folder}: {later[0].name} is later than {resumed.name}, from which "
                "the run is to continue; move all later ones away, or use --load_epoch latest"
            )
        if (folder / RECORD).exists():
            read_records(folder / RECORD)
        return
    if checkpoints:
        raise InputError(
            f"weights_dir {folder} holds a run already, up to {checkpoints[-1].name}: continue it "
            "with --resume_train true, or choose another folder"
        )
    if found := [name for name in (RECORD, CONFIGURATION) if (folder / name).exists()]:
        raise InputError(
            f"weights_dir {folder} holds {found[0]} of a run that left no checkpoint: begin it "
            "again with --resume_train true, remove it, or choose another folder"
        )


def _check_weights(spec: RunSpec) -> None:
    path, header = spec.resumed or spec.weights, spec.header
    if path is None or header is None:
        return
    for name in ("resize", "pad"):
        if (theirs := getattr(header.network, name)) != (ours := getattr(spec.description, name)):
            log.warning(
                "%s: this checkpoint is of pictures with %s: %s, those of %s have %s: %s; "
                "expect errors of another size than on pictures like its own",
                path,
                name,
                theirs,
                spec.config.manifest_path,
                name,
                ours,
            )
    if spec.resumed is not None:
        _check_same_network(spec, path, header.network)
        check_continues(spec)
        if spec.config.exact and not spec.is_complete:
            _check_same_optimizer(spec, path, header)
            check_exact(path, header.conditions, spec.conditions)
    elif spec.job == "validate":
        _check_same_network(spec, path, header.network)
    elif spec.config.network != KERAS_NETWORK:
        # Other shapes can be skipped, but filters of one variant mean nothing to another. Graphs
        # differ at least where layers are skipped: of them shapes alone have to fit.
        _check_same(path, header.network.differences(spec.description, sizes=False))


def _check_same_network(spec: RunSpec, path: Path, found: NetworkDescription) -> None:
    config = spec.config
    advice = f"name them in network_options, as --config {path.with_name(CONFIGURATION)} does,"
    check_network(path, found, config.network, own_code(config.options), advice)
    _check_same(path, found.differences(spec.description))
    if found.wnids and spec.wnids and found.wnids != spec.wnids:
        pairs = zip(found.wnids, spec.wnids, strict=True)
        number = next(i for i, pair in enumerate(pairs) if len(set(pair)) > 1)
        raise InputError(
            f"{path}: class {number} of this checkpoint is {found.wnids[number]}, of the pictures "
            f"{spec.wnids[number]}: it was trained on other classes"
        )


def _check_same_optimizer(spec: RunSpec, path: Path, header: CheckpointHeader) -> None:
    if not spec.continues_optimizer:
        before, now = header.config.get("optimizer", "sgd"), spec.config.optimizer
        if before == now:
            raise InputError(
                f"{path}: found the states {listed(header.states)} of {now}, expected those of its "
                "other settings: keep them, or set exact: false (--exact false) to continue with "
                "states of zero"
            )
        raise InputError(
            f"{path}: this checkpoint has the states of optimizer {before}, which mean nothing to "
            f"{now}: use --optimizer {before}, or set exact: false (--exact false) to continue "
            "with states of zero"
        )


def _check_same(path: Path, differences: Iterable[tuple[str, Any, Any]]) -> None:
    for name, *values in differences:
        theirs, ours = (shown(value, quoted=False) for value in values)
        raise InputError(
            f"{path}: this checkpoint is of a network with {name} {theirs}, "
            f"the configuration and the pictures ask for {name} {ours}"
        )


def check_continues(spec: RunSpec) -> None:
    """Refuse to continue an epoch with settings that change its minibatches.

    Between epochs these settings may change; inside one, pictures would be left out or seen twice.
    """
    if spec.header is None or not spec.header.state.step_in_epoch:
        return
    state, before = spec.header.state, spec.header.config
    pairs = {
        "pictures per step over all trainers": (state.global_batch, spec.global_batch),
        "training pictures": (state.train_pictures, spec.train.size),
        "seed": (before.get("seed"), spec.config.seed),
        "shuffle": (before.get("shuffle"), spec.config.shuffle),
    }
    for name, (theirs, ours) in pairs.items():
        if theirs is not None and theirs != ours:
            raise InputError(
                f"{spec.resumed} was saved inside epoch {state.epoch + 1}, which cannot be "
                f"continued with other pictures in its steps: {name}: {theirs} in the checkpoint, "
                f"now {ours}"
            )


def changed_settings(before: Mapping[str, Any], config: Config) -> list[str]:
    """Say how settings that influence training differ from those of a checkpoint.

    `before` is the ``config`` of its header. What it lacks is unknown, unless it is a key that is
    left out at its default.
    """
    now = config.model_dump(mode="json")
    pairs: dict[str, tuple[Any, Any]] = {}
    if isinstance(devices := before.get("devices"), list):
        pairs["trainers"] = len(devices), len(config.devices)
    for name, field in Config.model_fields.items():
        if name not in _UNANNOUNCED and (name in before or flag(field, "omit_default")):
            pairs[name] = before.get(name, field.default), now.get(name, field.default)
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    if "network_options" in differing:  # where a graph may be
        place, *pair = difference("network_options", *differing.pop("network_options"))
        differing[place] = pair[0], pair[1]
    return [
        f"{name} was {shown(theirs, quoted=False)}, now {shown(ours, quoted=False)}"
        for name, (theirs, ours) in differing.items()
    ]
