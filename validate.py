"""Loss, top-1 and top-5 error of saved weights over every validation picture.

As the run was configured:  python validate.py --weights runs/demo/epoch-0016.safetensors
Another configuration:      python validate.py --weights FILE --config demo/config.yaml
On chosen devices:          python validate.py --weights FILE --devices cuda:1

The settings are those of the config.yaml beside the weights, which the run saved; devices, threads
and all else that depends on the machine are chosen anew. Without one, such as beside converted
weights, they are those of the config.yaml in the current folder.
"""

from collections.abc import Sequence

from tandem.launch.programs import run_validation


def main(arguments: Sequence[str] | None = None) -> int:
    """Validate saved weights; return the exit status."""
    return run_validation(arguments, description=__doc__)


if __name__ == "__main__":
    raise SystemExit(main())
