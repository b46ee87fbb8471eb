"""Prediction of the cost of a training step: computing, exchange, overlap and load.

``exchange.py`` is the model of an exchange, ``machine.py`` the rates of a machine, ``steps.py`` the
lines of a trainer's step with their work, ``overlap.py`` the replay of buckets, ``predict.py`` puts
them together, ``tables.py`` and ``drawing.py`` show it, ``calibrate.py`` measures a machine, and
``program.py`` is the verb ``tandem cost``.
"""
