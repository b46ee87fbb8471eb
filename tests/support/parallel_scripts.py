"""Scripts that use `tandem.parallel` as users do, without a guard for `__main__`."""

import subprocess
import textwrap
from pathlib import Path

from tests.support.tiny import start_script

_HEAD = """
import os, signal, sys, threading, time
import numpy as np
import pytensor, pytensor.tensor as pt
import tandem.parallel as synk
from tests.support.faulty_ops import *
x = pt.dmatrix("x")
"""


def start_parallel(folder: Path, text: str, *words: object) -> subprocess.Popen[str]:
    """Start a script of this text, behind the imports that all of them need."""
    return start_script(folder, _HEAD + textwrap.dedent(text), *words)
