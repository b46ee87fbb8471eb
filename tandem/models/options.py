"""Types of the options of networks, checked where a run or a checkpoint gives them."""

from typing import Annotated

from pydantic import Field

Rate = Annotated[float, Field(ge=0, lt=1)]
"""Probability that a unit is dropped."""

Depth = Annotated[int, Field(ge=1, le=2000)]
"""Number of layers with weights."""
