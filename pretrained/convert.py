"""Convert the weights of other programs, or ours for the original.

The original's folder:   python pretrained/convert.py weights_folder alexnet.safetensors --epoch 65
Back to such a folder:   python pretrained/convert.py alexnet.safetensors weights_folder
Its published archive:   python pretrained/convert.py parameters_releasing.zip alexnet.safetensors
Caffe's network:         python pretrained/convert.py bvlc_alexnet.caffemodel caffe.safetensors
Caffe's mean image:      python pretrained/convert.py imagenet_mean.binaryproto caffe_mean.npy
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tandem.convert.cli import run_conversion


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert weights; return the exit status."""
    return run_conversion(arguments, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
