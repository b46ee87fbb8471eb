"""Ranks on two machines: network namespaces, joined by a virtual link that all bytes have to cross.

They need the right to make namespaces, which root has, and are skipped with the reason elsewhere.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from ranks import missing, starter
from safetensors.numpy import load_file
from tiny import ROOT, prepare, read_record, run_program, settings

from tandem.run.folder import list_checkpoints

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

HOSTS = ("10.231.7.1", "10.231.7.2")
Runner = Callable[..., "subprocess.CompletedProcess[str]"]

# Called by mpirun as it would call ssh: options, a host, and the words of a command.
ENTER = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec PREFIX-$host sh -c "$*"
"""

PROGRAM = """
import json, numpy as np
from tandem.exchange.mpi import join
engine = join()
vector = np.ones(1_000_000, np.float32)
engine.all_reduce(vector)
neighbours = engine.gather((engine.local.rank, engine.local.size))
if engine.rank == 0:
    print(json.dumps([neighbours, bool((vector == engine.size).all())]))
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Runs this Python as ranks, dealt out over two machines; gives also the names of those."""
    if shutil.which("ip") is None:
        pytest.skip("the command ip (iproute2) is missing")
    prefix = f"tandem-{os.getpid()}"
    names = [f"{prefix}-{host}" for host in HOSTS]
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ip("-n", names[0], "link", "add", "wire", "type", "veth", "peer", "wire", "netns", names[1])
        for name, host in zip(names, HOSTS, strict=True):
            ip("-n", name, "addr", "add", f"{host}/24", "dev", "wire")
            for device in ("wire", "lo"):
                ip("-n", name, "link", "set", device, "up")
        enter = tmp_path_factory.mktemp("machines") / "enter"
        enter.write_text(ENTER.replace("PREFIX", prefix))
        enter.chmod(0o755)
        yield lambda *words, each=1: run(names[0], enter, each, words)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def run(
    first: str, enter: Path, each: int, words: tuple[str, ...]
) -> "subprocess.CompletedProcess[str]":
    # On one kernel, libraries would find a way past the network: they are told to use TCP.
    options = f"-genv UCX_TLS tcp,self -genv FI_PROVIDER tcp -launcher ssh -localhost {HOSTS[0]}"
    hosts = ",".join(f"{host}:{each}" for host in HOSTS)
    start = [str(starter()), *options.split(), "-launcher-exec", str(enter), "-hosts", hosts]
    return subprocess.run(
        ["ip", "netns", "exec", first, *start, "-n", str(2 * each), sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def crossed() -> int:
    """Bytes that the first machine has sent."""
    name = f"tandem-{os.getpid()}-{HOSTS[0]}"
    words = ["ip", "-n", name, "-s", "-j", "link", "show", "wire"]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return int(found[0]["stats64"]["tx"]["bytes"])


def test_ranks_of_two_machines_find_each_other(machines: Runner) -> None:
    before = crossed()
    result = machines("-c", PROGRAM, each=2)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [[[0, 2], [1, 2], [0, 2], [1, 2]], True]
    assert crossed() - before > 4_000_000  # the vector went over the link


@pytest.mark.slow
@pytest.mark.parametrize(
    ("collective", "each"), [("hierarchical", 2), ("asa", 1), ("asa16", 1), ("ar", 1)]
)
def test_two_machines_compute_what_one_trainer_does(
    machines: Runner, tmp_path: Path, collective: str, each: int
) -> None:
    data, double = prepare(tmp_path / "data"), collective != "asa16"
    common = {"n_epochs": 2, "precision": "float64" if double else "float32"}
    result = run_program("train.py", settings(data, tmp_path / "alone", **common, batch_size=4))
    assert result.returncode == 0, result.stderr
    changes = {**common, "batch_size": 4 // (2 * each), "collective": collective}
    arguments = settings(data, tmp_path / "run", **changes, check_every=1)
    result = machines("train.py", *arguments, each=each)
    assert result.returncode == 0, result.stderr
    ours, theirs = (load_file(list_checkpoints(tmp_path / n)[-1]) for n in ("run", "alone"))
    for name, value in ours.items():
        scale = np.abs(theirs[name]).max()
        np.testing.assert_allclose(value, theirs[name], atol=(1e-9 if double else 0.05) * scale)
    counted = [x["images"] for x in read_record(tmp_path / "run") if x["event"] == "validation"]
    assert counted == [7, 7]


@pytest.mark.slow
def test_a_rank_that_raises_ends_both_machines(machines: Runner, tmp_path: Path) -> None:
    data = prepare(tmp_path / "data")
    arguments = ["BrokenAlexNet", *settings(data, tmp_path / "run")]
    result = machines("tests/broken_train.py", *arguments)
    assert result.returncode == 1
    assert "[1] error: the run has ended: trainer 1: ZeroDivisionError" in result.stderr
