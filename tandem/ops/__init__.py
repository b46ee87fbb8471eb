"""The Ops that PyTensor lacks, each with its gradient and a readable `perform`.

The lower-case functions build graphs and document what is computed; a mode lowers the classes.
"""

from tandem.ops.adam import AdamStep, adam_step
from tandem.ops.base import FLOATS
from tandem.ops.conv import Conv2d, Conv2dBiasGrad, Conv2dInputGrad, Conv2dWeightGrad, conv2d
from tandem.ops.crop import CropMirror, crop_mirror
from tandem.ops.dropout import DropoutMask, dropout_mask
from tandem.ops.lrn import LRN, LRNGrad, lrn
from tandem.ops.momentum import MomentumStep, momentum_step
from tandem.ops.pool import MaxPool2d, MaxPool2dGrad, max_pool2d
from tandem.ops.pool_norm import PoolNorm, PoolNormGrad
from tandem.ops.relu import Relu, ReluGrad, relu

__all__ = [
    "FLOATS",
    "LRN",
    "AdamStep",
    "Conv2d",
    "Conv2dBiasGrad",
    "Conv2dInputGrad",
    "Conv2dWeightGrad",
    "CropMirror",
    "DropoutMask",
    "LRNGrad",
    "MaxPool2d",
    "MaxPool2dGrad",
    "MomentumStep",
    "PoolNorm",
    "PoolNormGrad",
    "Relu",
    "ReluGrad",
    "adam_step",
    "conv2d",
    "crop_mirror",
    "dropout_mask",
    "lrn",
    "max_pool2d",
    "momentum_step",
    "relu",
]
