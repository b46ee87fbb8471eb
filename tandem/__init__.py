"""The library under the training programs, one package for each subject.

For networks: ``ops`` (the Ops that PyTensor lacks), ``layers`` (graph builders over them),
``optim`` (optimizers and schedules), ``backend`` (the PyTensor mode that runs a graph with
PyTorch's kernels). For runs: ``memory`` (buffers that two processes share), ``data`` (batch files
and the order of an epoch), ``preprocessing``, ``processes`` (workers and their supervision),
``distributed`` (how trainers exchange), ``config``, ``artifacts`` (what a run writes),
``training``, ``launch``. For weights: ``classify``, ``export``, ``convert``, ``plot``.

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

__version__ = "0.3.0"

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
