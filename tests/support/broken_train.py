"""Train a network of `broken_network`.

python tests/support/broken_train.py NanAlexNet --devices cpu
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tandem.launch.train import run_training

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    network = ["--network", f"tests.support.broken_network:{name}"]
    raise SystemExit(run_training([*network, *arguments], None))
