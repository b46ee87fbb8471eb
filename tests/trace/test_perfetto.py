"""A merged trace in Perfetto's own page: its processes, threads, spans, flows and counters."""

import subprocess
import sys
from pathlib import Path

from tandem.__main__ import main
from tandem.trace.merge import MERGED
from tests.support.perfetto import perfetto
from tests.support.tiny import ROOT

FLOPS = "select distinct int_value from args where key = 'args.flops'"


def record(run: Path) -> None:
    """Two trainers and their loaders, each a process."""
    command = [sys.executable, "-m", "tests.support.traced_process"]
    processes = []
    for rank in ("0", "1"):
        loader = subprocess.Popen(
            [*command, "loader", rank, str(run)], cwd=ROOT, stdout=subprocess.PIPE
        )
        processes.append(loader)
        processes.append(
            subprocess.Popen([*command, "trainer", rank, str(run)], cwd=ROOT, stdin=loader.stdout)
        )
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0, 0]


def test_perfetto_shows_the_tracks_of_all_processes(tmp_path: Path) -> None:
    record(tmp_path)
    assert main(["trace", str(tmp_path)]) == 0
    with perfetto(tmp_path / MERGED) as shown:
        assert shown.faults() == []
        ranks = 0, 1
        expected = {(f"loader {rank}", "loader", "fill"): 4 for rank in ranks}
        for thread, span, count in (
            ("trainer", "step", 4),
            ("trainer", "wait", 4),
            ("trainer", "gradients", 4),
            ("trainer", "Conv2d", 8),
            ("buckets", "average", 4),
        ):
            expected |= {(f"trainer {rank}", thread, span): count for rank in ranks}
        assert shown.spans() == expected
        assert shown.flows() == {
            ("fill", f"loader {rank}", "gradients", f"trainer {rank}"): 4 for rank in ranks
        }
        assert shown.counters() == {(f"trainer {rank}", "memory resident"): 4 for rank in ranks}
        assert shown.query(FLOPS) == [[7200]]
        shown.expand()
        # Perfetto writes each name with the number of its process or thread.
        names = [
            "trainer 0 0",
            "loader 0 1",
            "trainer 1 2",
            "loader 1 3",
            "buckets 2",
            "buckets 22",
        ]
        for name in (*names, "memory resident"):
            shown.page.get_by_text(name, exact=True).first.wait_for()
        assert shown.page.get_by_text("main thread").count() == 0
