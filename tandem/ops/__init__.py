"""The Ops that PyTensor lacks, each with its gradient and a readable `perform`.

The lower-case functions build graphs and document what is computed; a mode lowers the classes.
"""

from tandem.ops.adam import AdamStep, adam_step
from tandem.ops.base import FLOATS
from tandem.ops.batch_norm import (
    BatchNorm,
    BatchNormGrad,
    BatchNormInference,
    batch_norm,
    batch_norm_inference,
    global_batch_norm,
)
from tandem.ops.batch_norm_stages import (
    BatchNormBySums,
    BatchNormBySumsGrad,
    ChannelGradientSums,
    ChannelSums,
)
from tandem.ops.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
    Slice,
    Vary,
    first_token,
)
from tandem.ops.conv import Conv2d, Conv2dBiasGrad, Conv2dInputGrad, Conv2dWeightGrad, conv2d
from tandem.ops.crop import CropMirror, crop_mirror
from tandem.ops.ctc import CTC, ctc
from tandem.ops.dropout import Dropout, DropoutMask, dropout, dropout_mask
from tandem.ops.lrn import LRN, LRNGrad, lrn
from tandem.ops.momentum import MomentumStep, momentum_step
from tandem.ops.pad import Pad2d, pad2d
from tandem.ops.pool import (
    AveragePool2d,
    AveragePool2dGrad,
    MaxPool2d,
    MaxPool2dGrad,
    average_pool2d,
    max_pool2d,
)
from tandem.ops.pool_norm import PoolNorm, PoolNormGrad
from tandem.ops.recurrent import (
    GRUSteps,
    GRUStepsGrad,
    LSTMSteps,
    LSTMStepsGrad,
    gru,
    lstm,
)
from tandem.ops.relu import Relu, ReluGrad, relu

__all__ = [
    "CTC",
    "FLOATS",
    "LRN",
    "AdamStep",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "AveragePool2d",
    "AveragePool2dGrad",
    "BatchNorm",
    "BatchNormBySums",
    "BatchNormBySumsGrad",
    "BatchNormGrad",
    "BatchNormInference",
    "Broadcast",
    "ChannelGradientSums",
    "ChannelSums",
    "Collective",
    "Conv2d",
    "Conv2dBiasGrad",
    "Conv2dInputGrad",
    "Conv2dWeightGrad",
    "CropMirror",
    "Dropout",
    "DropoutMask",
    "GRUSteps",
    "GRUStepsGrad",
    "Gather",
    "LRNGrad",
    "LSTMSteps",
    "LSTMStepsGrad",
    "MaxPool2d",
    "MaxPool2dGrad",
    "MomentumStep",
    "Pad2d",
    "PoolNorm",
    "PoolNormGrad",
    "Reduce",
    "ReduceScatter",
    "Relu",
    "ReluGrad",
    "Scatter",
    "Slice",
    "Vary",
    "adam_step",
    "average_pool2d",
    "batch_norm",
    "batch_norm_inference",
    "conv2d",
    "crop_mirror",
    "ctc",
    "dropout",
    "dropout_mask",
    "first_token",
    "global_batch_norm",
    "gru",
    "lrn",
    "lstm",
    "max_pool2d",
    "momentum_step",
    "pad2d",
    "relu",
]
