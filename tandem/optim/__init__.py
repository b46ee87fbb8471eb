"""Optimizers, learning-rate schedules, and the groups of parameters that they apply to."""

from tandem.optim.optimizer import OPTIMIZERS, Optimizer
from tandem.optim.schedules import SCHEDULES, Moment, Schedule
from tandem.optim.sgd import SGD

__all__ = ["OPTIMIZERS", "SCHEDULES", "SGD", "Moment", "Optimizer", "Schedule"]
