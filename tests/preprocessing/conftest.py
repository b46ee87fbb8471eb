"""The programs are scripts: their folder is where they find their modules."""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
for folder in ("preprocessing", "demo"):
    sys.path.insert(0, str(_ROOT / folder))
