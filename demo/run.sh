#!/usr/bin/env bash
# From handwritten digits to a trained AlexNet, with the programs that a user runs on ImageNet.
set -euo pipefail
cd "$(dirname "$0")/.."

demo/prepare.sh

# Continues an earlier run, or reprints the result of a finished one; `make clean` removes it.
if [ -e runs/demo/config.yaml ]; then
    python train.py --config demo/config.yaml --resume_train true
else
    echo "demo: 16 epochs in a few minutes; in the first three or four the network only guesses"
    python train.py --config demo/config.yaml
fi
python -m tandem.plot runs/demo
weights=$(ls runs/demo/epoch-*.safetensors | tail -n 1)
echo "demo: validating $weights once more, by validate.py"
python validate.py --config demo/config.yaml --weights "$weights" > runs/demo/validation.json
python - <<'PYTHON'
import json
from pathlib import Path

result = json.loads(Path("runs/demo/validation.json").read_text())
print(
    f"demo: top-1 error {100 * result['top1_error']:.2f} %, "
    f"top-5 error {100 * result['top5_error']:.2f} % of {result['images']} validation pictures; "
    "see runs/demo"
)
PYTHON
