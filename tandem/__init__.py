"""The library under the training programs, one package for each subject.

================= ==============================================================================
Graphs
------------------------------------------------------------------------------------------------
``ops``           The Ops that PyTensor lacks, each with its gradient.
``layers``        Building blocks of networks over them: parameters, layers, losses, metrics.
``models``        Published networks, stated by their layers, and recipes to train them.
``optim``         Optimizers, learning-rate schedules, and groups of parameters.
``backend``       The PyTensor mode that runs a graph with PyTorch's kernels.
``placement``     Sharded and replicated tensors, with the conversions between them inferred.
``parallel``      Data-parallel functions of any PyTensor program, over several processes.
``keras``         Keras 3's own models, trained by several processes.
Runs
------------------------------------------------------------------------------------------------
``memory``        Buffers that several processes share, on the host and on GPUs.
``data``          Batch files, the order of an epoch, crops and colours.
``preprocessing`` Pictures to batch files, mean image and labels.
``datasets``      Known data sets, as arrays or prepared for training.
``processes``     Workers, their heartbeats and their supervision.
``distributed``   Groups of trainers, how they average vectors, and when.
``config``        The settings of a run: keys, defaults, bounds, and what follows from them.
``training``      Trainer and loader: the processes of a run.
``launch``        The start of a run on one machine or as ranks, and what it shows.
``artifacts``     Checkpoints, the record, and all else that a run writes.
``trace``         What each process of a run did when.
``cost``          Prediction of the time of a step, here or elsewhere.
Weights
------------------------------------------------------------------------------------------------
``classify``      Classification of pictures by saved weights.
``convert``       Conversion from and to weight files of other programs.
``export``        Saved weights as ONNX.
================= ==============================================================================

For scripts and notebooks, here are `train`, `validate` and `Classifier`; see `tandem.launch.api`
and `tandem.classify`.

Importing ``tandem`` imports nothing else: a loader starts without PyTensor and PyTorch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.classify import Classifier
    from tandem.errors import InputError, RunError
    from tandem.launch.api import Result, train, validate

__all__ = ["Classifier", "InputError", "Result", "RunError", "train", "validate"]

__version__ = "0.4.0.dev0"

_PLACES = {
    "Classifier": "tandem.classify",
    "InputError": "tandem.errors",
    "Result": "tandem.launch.api",
    "RunError": "tandem.errors",
    "train": "tandem.launch.api",
    "validate": "tandem.launch.api",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_PLACES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
