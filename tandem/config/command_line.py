"""The command line of a run: ``--config FILE`` and an option for every key of `Config`.

A value on the command line wins over the file, which wins over the defaults. ``--config resnet50``
is the recipe of that name, unless there is such a file. Where ``--config`` is not given,
``config.yaml`` in the current folder is read if it exists. A program that reads one checkpoint
takes the ``config.yaml`` beside it first: that of the run, saved with every ``auto`` resolved, of
which `read_run_settings` takes what does not depend on the machine.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.cli import CommandLine, PathOption, option
from tandem.config.hardware import cuda_device_count
from tandem.config.schema import Config, Ranks, Trainers
from tandem.layers.network import KERAS_NETWORK, own_code
from tandem.validation import read_yaml

log = logging.getLogger(__name__)

DEFAULT_FILE = Path("config.yaml")
RECIPES = Path(__file__).parents[1] / "models"

_USE_DEVICES = "use devices, a list with one entry for each trainer, such as devices: [cpu, cpu]"
_NO_PORT = "trainers and loaders are connected by pipes and shared memory, which need no port"
_RANKS = "mpirun or torchrun starts ranks, see docs/clusters.md; on one machine use devices"

RETIRED: Mapping[str, str] = {
    "lib_conv": "convolutions chooses on a CPU (direct or winograd); GPUs use cuDNN",
    **dict.fromkeys(("gpu", "gpu0", "gpu1"), _USE_DEVICES),
    **dict.fromkeys(("sock_data", "sock_data0", "sock_data1", "sock_para", "sock_gpu"), _NO_PORT),
    "dir_head": "use data_folder; the other data folders are relative to it",
    "finetune": "use init_weights, a checkpoint to start from, and freeze or lr_multipliers",
    "name": "network names the network, as module:class; use weights_dir to tell runs apart",
    **dict.fromkeys(
        ("valtxt_filename", "traintxt_filename"),
        "preprocessing writes val.txt and train.txt into tar_root_dir, and training reads labels "
        "from label_folder",
    ),
    "file_batch_size": "the manifest records the pictures per file, and batch_size may differ",
}
"""Keys of the original program that have no meaning any more, and what replaces each."""

_NAMES = {
    "collective": "network_alg",
    "learning_rate": "lr base_lr eta",
    "n_epochs": "epochs num_epochs nepochs max_epochs",
    "batch_size": "b batch bs batchsize train_batch_size per_device_batch_size",
    "momentum": "m mom",
    "use_nesterov_momentum": "nesterov",
    "weight_decay": "wd decay l2",
    "lr_policy": "lr_scheduler scheduler sched lr_schedule",
    "lr_step": "lr_steps lr_step_size step_size stepsize stepvalue milestones",
    "lr_factor": "gamma lr_gamma factor",
    "lr_min": "min_lr",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "rmsprop_decay": "alpha rho",
    "loss": "criterion objective",
    "label_smoothing": "smoothing",
    "stop_patience": "early_stopping early_stop",
    "warmup_epochs": "warmup lr_warmup_epochs",
    "data_folder": "data data_dir data_path dataset root",
    "train_folder": "train_dir traindir",
    "val_folder": "val_dir valdir",
    "crop_size": "input_size image_size img_size imgsz train_crop_size crop",
    "rand_mirror": "mirror flip hflip",
    "network": "a arch model net",
    "devices": "device gpus gpu_id gpu_ids cuda no_cuda cpu",
    "weights_dir": "output output_dir out save_dir save_path log_dir logdir snapshot_prefix",
    "snapshot_freq": "save_every save_freq save_interval snapshot",
    "print_freq": "p log_interval log_every display",
    "seed": "random_seed manual_seed",
}
_SENTENCES = {
    "amp fp16 bf16 half mixed_precision dtype floatx": "use precision, such as precision: bfloat16",
    "resume": "use resume_train: true; load_epoch and weights_dir name the checkpoint",
    "start_epoch": "use resume_train: true; load_epoch names the checkpoint",
    "pretrained weights checkpoint ckpt load load_weights": (
        "use init_weights for the first weights, or resume_train: true to continue a run"
    ),
    "e evaluate eval test test_only": "python validate.py --weights FILE validates a checkpoint",
    "j workers num_workers": (
        "each trainer has a loader process of its own (para_load: true), in which loader_threads "
        "read; threads sets the CPU threads of a trainer"
    ),
    "max_iter max_steps iterations": "the length of a run is counted in epochs: use n_epochs",
    "opt solver": "see optimizer, use_momentum, use_nesterov_momentum and weight_decay",
    "betas": "use adam_beta1 and adam_beta2",
    "eps epsilon": "use adam_epsilon or rmsprop_epsilon",
    "patience": "stop_patience ends training early; lr_patience is that of lr_policy: plateau",
    "global_batch_size": "batch_size counts the images of one trainer",
    "gradient_accumulation_steps accumulate_grad_batches accum_iter": (
        "sum_rows is the images of a pass, global_batch those of a step"
    ),
    "num_classes classes": "the number of classes is that of the manifest in data_folder",
    "world_size rank local_rank dist_url dist_backend multiprocessing_distributed": _RANKS,
    "nnodes nproc_per_node master_addr master_port distributed": _RANKS,
}
ANSWERS: Mapping[str, str] = {
    **{name: key for key, names in _NAMES.items() for name in names.split()},
    **{name: text for names, text in _SENTENCES.items() for name in names.split()},
    **RETIRED,
}
"""Names that people bring from other programs: the key to use, or what there is instead."""


class _WithWeights(Config):
    weights: PathOption = option(..., "checkpoint, or folder of a run", "a path", form="text")
    ten_crops: bool = option(
        False,
        "average over corners, centre and their mirror images: ten times the work",
        "true or false",
    )
    report: PathOption | None = option(
        None,
        "folder for a page and tables: confusions, errors of classes, reliability, mistakes",
        "a folder",
        form="text",
    )


class _WithTrial(Config):
    trial: bool = option(
        False,
        "try a few steps, a checkpoint and its resume, then report time, memory and disk",
        "true or false",
        alias="try",
    )


def load_trial_and_config(
    arguments: Sequence[str] | None = None,
    description: str | None = None,
    program: str | None = None,
) -> tuple[bool, Config]:
    """Read ``--try`` and the configuration, for the program that trains."""
    settings = _line(arguments, description, program).read(_WithTrial, DEFAULT_FILE)
    return settings.trial, Config(**settings.model_dump(exclude={"trial"}))


def load_config(arguments: Sequence[str] | None = None, description: str | None = None) -> Config:
    """Read the configuration alone, as the program that trains does.

    Tests prepare and change runs of their own with it.
    """
    return load_trial_and_config(arguments, description)[1]


def load_weights_and_config(
    arguments: Sequence[str] | None = None,
    description: str | None = None,
    program: str | None = None,
) -> tuple[Path, bool, Path | None, Config]:
    """Read ``--weights``, ``--ten_crops``, ``--report`` and the configuration of a validation."""
    settings = _line(arguments, description, program).read(
        _WithWeights, DEFAULT_FILE, beside=("weights", read_run_settings)
    )
    config = Config(**settings.model_dump(exclude={"weights", "ten_crops", "report"}))
    return settings.weights, settings.ten_crops, settings.report, config


# How a run divided its work among the devices of its machines, which a validation may not have.
_OF_THE_MACHINE = {
    *Trainers.model_fields,
    *Ranks.model_fields,
    "loader_threads",
    "use_data_layer",
    "data_on_gpu",
    "restarts",
    "min_trainers",
} - {"batch_size"}


def read_run_settings(path: Path) -> dict[str, Any]:
    """Read the settings that a run saved, without those that depend on its machine.

    Left out, and so at their defaults again, are devices, threads and how trainers exchange, and
    without a GPU a precision of GPUs. What was taken is logged. As no file that is merely found
    decides what code is run, the network is that of ``config.yaml`` in the current folder, unless
    it is a Keras model, which is data; layers and metrics of the user's own are left out. The
    ``config.yaml`` of the current folder itself is no run's: nothing of it is left out.
    """
    values = read_yaml(path)
    has_own = DEFAULT_FILE.is_file()
    if has_own and path.samefile(DEFAULT_FILE):
        return values
    own = read_yaml(DEFAULT_FILE) if has_own else {}
    left_out = {key for key in values if key in _OF_THE_MACHINE}
    if isinstance(rows := values.get("sum_rows"), int):  # of a pass, whose memory there was
        values["batch_size"] = rows
    if values.get("network") not in (KERAS_NETWORK, own.get("network")):
        left_out.add("network")
    values |= _without_code(values, own)
    if values.get("precision") in ("tf32", "bfloat16") and not cuda_device_count():
        left_out.add("precision")
    log.info(
        "settings are those of %s; %s are chosen anew for this machine",
        path,
        "devices, threads and precision" if "precision" in left_out else "devices and threads",
    )
    return {key: value for key, value in values.items() if key not in left_out}


def _without_code(values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return what changes where settings that `own` does not share name code of the user's own."""
    changes: dict[str, Any] = {}
    options, metrics = values.get("network_options"), values.get("metrics")
    if isinstance(options, Mapping) and options != own.get("network_options") and own_code(options):
        changes["network_options"] = {k: v for k, v in options.items() if k != "layers"}
    if isinstance(metrics, list) and metrics != own.get("metrics"):
        changes["metrics"] = [name for name in metrics if ":" not in str(name)]
    return changes


def _line(
    arguments: Sequence[str] | None, description: str | None, program: str | None
) -> CommandLine:
    return CommandLine(arguments, description, program, ANSWERS, once=True, recipes=RECIPES)
