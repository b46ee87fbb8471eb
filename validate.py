"""Loss, top-1 and top-5 error of saved weights over every validation picture.

python validate.py --weights runs/alexnet/epoch-0060.safetensors
python validate.py --weights runs/demo/epoch-0016.safetensors --config demo/config.yaml
"""

from collections.abc import Sequence

from tandem.launch.programs import run_validation


def main(arguments: Sequence[str] | None = None) -> int:
    """Validate saved weights; return the exit status."""
    return run_validation(arguments, description=__doc__)


if __name__ == "__main__":
    raise SystemExit(main())
