"""What trainer 0 reports while it writes checkpoints."""

from concurrent.futures import Future
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tandem.artifacts.checkpoint import Checkpoint, RunState
from tandem.artifacts.metrics_log import NotFiniteRecord, read_records
from tandem.artifacts.run_folder import RECORD
from tandem.layers.network import NetworkDescription
from tandem.processes.heartbeat import HeartbeatTable, StatusSlot
from tandem.training.reports import Reports


@pytest.mark.parametrize("rank", [0, 1])
def test_a_line_is_made_where_it_is_written(tmp_path: Path, rank: int) -> None:
    """By trainer 0 at once, by another when it completes the record in its place."""
    line, made = NotFiniteRecord(1, 8, 3, "skip", ("picture 5",)), []

    def make() -> NotFiniteRecord:
        made.append(rank)
        return line

    spec = Mock(job="validate", config=Mock(snapshot_minutes=0, weights_path=tmp_path))
    reports = Reports(spec, Mock(rank=rank), RunState(), Mock(), 0)
    reports.folder = Mock(written=Mock(return_value=None)) if rank == 0 else None
    reports.record(make)
    assert len(made) == (rank == 0)
    network = NetworkDescription(67, 5, 1.0)
    state = RunState(epoch=1)
    for _ in range(2):  # the second finds that it has been done
        reports.rescue(Checkpoint({"w": np.zeros(2, np.float32)}, {}, network, state))
    assert made == [rank]
    assert read_records(tmp_path / RECORD) == [line]


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
