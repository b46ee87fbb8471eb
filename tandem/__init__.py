"""The library under the training programs, one package for each subject.

For networks: ``ops`` (the Ops that PyTensor lacks), ``layers`` (graph builders over them),
``optim`` (optimizers and schedules), ``backend`` (the PyTensor mode that runs a graph with
PyTorch's kernels). For runs: ``memory`` (buffers that two processes share), ``data`` (batch files
and the order of an epoch), ``preprocessing``, ``processes`` (workers and their supervision),
``distributed`` (how trainers exchange), ``config``, ``artifacts`` (what a run writes),
``training``, ``launch``. For weights: ``classify``, ``export``, ``convert``, ``plot``.

Importing ``tandem`` imports nothing else: a loader starts without PyTensor and PyTorch.
"""

__version__ = "0.3.0"
