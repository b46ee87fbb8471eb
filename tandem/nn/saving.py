"""Models to checkpoints."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.artifacts.checkpoint import Checkpoint, save_checkpoint
from tandem.config.schema import make_config

if TYPE_CHECKING:
    from tandem.nn.model import Model


def save_model(model: Model, path: str | os.PathLike[str]) -> None:
    """Write a model's graph, weights and compilation to a checkpoint, whole or not at all."""
    description = model.trained or model.description(None)
    if model.compilation is not None:  # perhaps another than that of the run
        description = replace(description, options=model.options())
    settings = {"mean_file": None}
    if model.compilation is not None:
        settings |= model.compilation.settings
    save_checkpoint(
        Path(path),
        Checkpoint(
            model.weights,
            {},
            description,
            config=make_config(settings).model_dump(mode="json"),
            untrained=model.graph.untrained,
        ),
    )
