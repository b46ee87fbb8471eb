"""The library under the training programs. One room each:

``ops`` the Ops that PyTensor lacks, ``layers`` graph builders over them, ``device`` the PyTensor
mode that runs a graph with PyTorch's kernels, ``memory`` buffers that two processes see,
``exchange`` how trainers agree on parameters, ``data`` batch files and the order of an epoch,
``run`` configuration, processes, checkpoints, schedules and records.

Importing ``tandem`` imports nothing else: a loader starts without PyTensor and PyTorch.
"""
