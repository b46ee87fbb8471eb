"""Optimizers, learning-rate schedules, and the groups of parameters that they apply to.

Every module of this package is imported with it, so a new optimizer registers by being there.
"""

import importlib
import pkgutil

from tandem.optim.averaged import optimizer_of
from tandem.optim.optimizer import OPTIMIZERS, Optimizer
from tandem.optim.schedules import SCHEDULES, Moment, Schedule
from tandem.optim.sgd import SGD

__all__ = ["OPTIMIZERS", "SCHEDULES", "SGD", "Moment", "Optimizer", "Schedule", "optimizer_of"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
