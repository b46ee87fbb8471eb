"""A merged trace in Perfetto's own page: its processes, threads, spans, flows and counters."""

import subprocess
import sys
from pathlib import Path

from tandem.__main__ import main
from tandem.trace.merge import MERGED
from tests.support.perfetto import perfetto
from tests.support.tiny import ROOT

SPANS = """
select process.name, thread.name, slice.name, count(*) from slice
join thread_track on slice.track_id = thread_track.id join thread using (utid)
join process using (upid) group by 1, 2, 3 order by 1, 2, 3
"""
FLOWS = """
select a.name, ap.name, b.name, bp.name, count(*) from flow
join slice a on flow.slice_out = a.id join slice b on flow.slice_in = b.id
join thread_track att on a.track_id = att.id join thread ath on att.utid = ath.utid
join process ap on ath.upid = ap.upid
join thread_track btt on b.track_id = btt.id join thread bth on btt.utid = bth.utid
join process bp on bth.upid = bp.upid group by 1, 2, 3, 4 order by 2
"""
COUNTERS = """
select process.name, process_counter_track.name, count(*) from counter
join process_counter_track on counter.track_id = process_counter_track.id
join process using (upid) group by 1, 2 order by 1
"""
FAULTS = "select name, value from stats where severity != 'info' and value != 0"
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
        assert shown.query(FAULTS) == []
        assert shown.query(SPANS) == [
            [f"{kind} {rank}", thread, span, count]
            for kind, threads in (
                ("loader", [("loader", "fill", 4)]),
                (
                    "trainer",
                    [
                        ("buckets", "average", 4),
                        ("trainer", "Conv2d", 8),
                        ("trainer", "gradients", 4),
                        ("trainer", "step", 4),
                        ("trainer", "wait", 4),
                    ],
                ),
            )
            for rank in (0, 1)
            for thread, span, count in threads
        ]
        assert shown.query(FLOWS) == [
            ["fill", f"loader {rank}", "gradients", f"trainer {rank}", 4] for rank in (0, 1)
        ]
        assert shown.query(COUNTERS) == [[f"trainer {n}", "memory resident", 4] for n in (0, 1)]
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
