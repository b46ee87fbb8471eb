"""What trainer 0 reports while it writes checkpoints."""

from concurrent.futures import Future
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from tandem.artifacts.checkpoint import RunState
from tandem.processes.heartbeat import HeartbeatTable, StatusSlot
from tandem.training.reports import Reports


def test_a_late_callback_leaves_the_mark_of_the_next_checkpoint() -> None:
    """A future wakes who waits for it before it calls back."""
    table = HeartbeatTable.create(("launcher", "trainer 0"), 60)
    status = StatusSlot(table, 1)
    launcher, mine = Pipe()
    spec = Mock(job="validate", config=Mock(snapshot_minutes=0))
    reports = Reports(spec, Mock(rank=0, status=status), RunState(), mine, 0)
    futures: list[Future[Path]] = [Future(), Future()]
    folder: Any = Mock()
    folder.save.side_effect = futures
    reports.folder = folder
    reports.save(Mock())
    reports.save(Mock())
    marks = [table.writing[1]]
    for future in futures:
        future.set_result(Path("a"))
        marks.append(table.writing[1])
    assert marks == [1, 1, 0]
    table.buffer.close()
    launcher.close()
    mine.close()
