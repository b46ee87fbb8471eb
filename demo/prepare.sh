#!/usr/bin/env bash
# Handwritten digits in ImageNet's layout, preprocessed by the programs that a user runs.
set -euo pipefail
cd "$(dirname "$0")/.."

python demo/make_digits.py --out data/demo/pictures
preprocessing/generate_data.sh --train-img-dir data/demo/pictures/train \
    --val-img-dir data/demo/pictures/val --tar-root-dir data/demo --image-size 72
