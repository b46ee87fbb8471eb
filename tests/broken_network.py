"""A network whose graph cannot be built in one trainer: a fault of the program, for the tests."""

import multiprocessing
from typing import Any

from alex_net import AlexNet


class BrokenAlexNet(AlexNet):
    """Fails in trainer 1, when its functions are compiled: in the first step."""

    def logits(self, *arguments: Any) -> Any:
        if multiprocessing.current_process().name == "trainer 1":
            raise ZeroDivisionError("broken on purpose")
        return super().logits(*arguments)
