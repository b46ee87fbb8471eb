"""Convert a model of Keras to a checkpoint, in a process of its own.

python -m tandem.keras.conversion model.keras model.safetensors '{}'
"""

import json
import sys
from pathlib import Path

import tandem.keras  # noqa: F401 - it chooses the backend
from tandem.errors import InputError


def main(source: str, target: str, options: str) -> int:
    """Convert; a sentence to standard error and status 2 say what cannot be."""
    from tandem.keras.loading import write_checkpoint

    try:
        write_checkpoint(source, Path(target), json.loads(options))
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
