"""The loader process. `train.py` and `validate.py` start it with `para_load: true`.

It is not run by hand; see `tandem.training.loader`.
"""

from tandem.training.loader import serve

__all__ = ["serve"]
