"""Processes that decode, on systems where they are not copies of the program."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.picture_files import encoded, write_exact
from tests.support.tiny import python_path

UNGUARDED = """
import sys
from tandem.preprocessing import pool
from tandem.preprocessing.listed import WHOLE, PictureLocation

print("the program runs")
pool.START = pool.SPAWN
with pool.DecodePool(2, 1, 8, "squash") as processes:
    location = PictureLocation(sys.argv[1], 0, WHOLE)
    assert processes.submit(pool.Task((0,), (location,))).result() == [None]
    print(processes.pictures.tobytes().hex())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="pictures are shared by POSIX memory")
def test_a_program_that_preprocesses_needs_no_guard(tmp_path: Path) -> None:
    picture, script = tmp_path / "a.JPEG", tmp_path / "script.py"
    write_exact(picture, encoded("train", "n03", 1))
    script.write_text(UNGUARDED)
    result = subprocess.run(
        [sys.executable, script, picture],
        env={"PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    first, pixels = result.stdout.split("\n")[:2]
    assert first == "the program runs"
    assert bytes.fromhex(pixels) == encoded("train", "n03", 1).tobytes()
