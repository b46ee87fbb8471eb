"""Messages about settings that cannot be used."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.config.command_line import load_config
from tandem.errors import InputError


def refusal(argv: Sequence[str]) -> str:
    with pytest.raises(InputError) as caught:
        load_config(argv)
    return str(caught.value)


def file_refusal(text: str | bytes) -> str:
    """The message about this content of ``mine.yaml``."""
    Path("mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return refusal(["--config", "mine.yaml"])
