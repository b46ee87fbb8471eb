#!/usr/bin/env bash
# ResNet-20 on CIFAR-10 by two trainers, against plain PyTorch on the same minibatches:
#   benchmarks/cifar.sh PICTURES FOLDER      PICTURES has train/ and test/ with a folder per class
# First the losses of 40 steps, then the errors of validation after ten epochs, an hour or two on
# two cores. EPOCHS=2 makes fewer; PYTHON names another interpreter. The batch files, the runs and
# the two comparisons go to FOLDER. The exit status is not 0 where a comparison fails.
set -euo pipefail
test $# -eq 2 || { sed -n '2,6s/^# \?//p' "$0" >&2; exit 2; }
pictures=$1 folder=$2
python=${PYTHON:-python} epochs=${EPOCHS:-10} steps=${STEPS:-40} batch=${BATCH:-64}
export PYTHON=$python

preprocessing/generate_data.sh --train-img-dir "$pictures/train" --val-img-dir "$pictures/test" \
    --tar-root-dir "$folder/data" --image-size 32 --pad 4

train() { # FOLDER OPTIONS...
    "$python" train.py --data_folder "$folder/data" --weights_dir "$1" --devices cpu cpu \
        --network tandem.models.resnet:ResNet20 --crop_size 32 --batch_size "$batch" \
        --shuffle images --weight_decay 0.0001 --tensorboard false "${@:2}"
}

# The rate rises from 0: at 0.1 from the first step any rounding grows a hundredfold in a step.
train "$folder/steps" --n_epochs 1 --print_freq 1 --learning_rate 0.01 --lr_policy step \
    --lr_step 99 --warmup_epochs 1
"$python" -m benchmarks.against_pytorch "$folder/steps" --steps "$steps" | tee "$folder/steps.jsonl"

train "$folder/epochs" --n_epochs "$epochs" --learning_rate 0.1 --lr_policy step --lr_step 6 9
"$python" -m benchmarks.against_pytorch "$folder/epochs" --epochs "$epochs" | tee "$folder/epochs.jsonl"
