"""What a trace records, with trainers and groups that do nothing."""

import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tandem.artifacts.checkpoint import RunState
from tandem.artifacts.metrics import Seconds
from tandem.config.resolve import resolve_norm_rows
from tandem.config.schema import make_config
from tandem.data.minibatch import MinibatchRequest
from tandem.distributed import Exchange
from tandem.distributed.buckets import BucketedGradients, divide
from tandem.distributed.rank_vector import HostVector
from tandem.layers.network import NetworkDescription
from tandem.trace.chrome import read_trace
from tandem.trace.recorder import Recorder
from tandem.training import tracing, worker
from tandem.training.input_pipeline import InputPipeline, Loader
from tandem.training.messages import StepVote
from tandem.training.step_timer import StepTimer
from tandem.training.steps_ahead import StepsAhead
from tandem.training.tracing import clock_offset_ns, describe, traced_builder
from tandem.training.trainer import StopAgreed, Trainer
from tests.support.traces import parts_of, spans_in, steps_in

STEPS = 6


def spec(folder: Path, **settings: Any) -> Any:
    """A run of one trainer on a GPU."""
    values = {"trace": "steps", "trace_steps": [2, 4], "weights_dir": str(folder), "print_freq": 3}
    return SimpleNamespace(
        config=make_config({**values, **settings}),
        description=NetworkDescription(227, 10, 1.0, None),
        conditions={"processor": "a processor", "devices": "A GPU"},
        trainers=1,
        job="train",
    )


class FakeLoader(Loader):
    def request(self, request: MinibatchRequest) -> None:
        self._slot = request.slot

    def wait(self) -> int:
        return self._slot

    def close(self) -> None: ...


def requests(*modes: str) -> list[MinibatchRequest]:
    one = np.arange(2)
    return [MinibatchRequest(n % 2, mode, 0, n, one) for n, mode in enumerate(modes)]  # type: ignore[arg-type]


class FakeTrainer(Trainer):
    """Steps on a GPU that take no time."""

    stops_after = STEPS

    def __init__(self, spec: Any, *_: Any) -> None:
        self.notices: list[str] = []
        quiet: Any = SimpleNamespace(
            show=lambda activity: None,
            progress=lambda *_: None,
            notice=self.notices.append,
            folder=None,
        )
        self.spec, self.config, self.rank, self.steps = spec, spec.config, 0, STEPS
        self.group: Any = SimpleNamespace(rank=0, size=1)
        self.group.local = self.group
        self.timer, self.reports = StepTimer(quiet), quiet
        driver = SimpleNamespace(free_memory=lambda: 7)
        self.memory: Any = SimpleNamespace(
            slots=["a", "b"], wait=lambda: None, records=True, driver=driver
        )
        self.pipeline = InputPipeline(requests(*["train"] * STEPS), FakeLoader())
        self.exchange, self.channel = Exchange(), None
        self.agreement: Any = SimpleNamespace(
            vote=lambda: [StepVote(stop=self.state.step + 1 == self.stops_after)]
        )
        self.state, self._seconds = RunState(), Seconds()
        nothing = dict.fromkeys(
            ["compute_gradients", "is_finite", "update", "validate", "validate_crop"]
        )
        self.model: Any = SimpleNamespace(**nothing, step=lambda *_: lambda: True)
        refusals: Any = SimpleNamespace(in_a_row=0)
        self.ahead = StepsAhead(self.model, refusals)

    def train(self) -> None:
        for step in range(STEPS):
            self._train_step(0, step)

    def finish(self) -> None: ...

    def close(self) -> None: ...

    def _rate(self, epoch: int, step: int) -> float:
        return 0.1

    def _report_training(self, epoch: int, rate: float) -> None: ...

    def _save(self) -> None: ...

    def _stop(self) -> Any:
        raise StopAgreed


def trained(spec: Any, monkeypatch: pytest.MonkeyPatch, stops_after: int = STEPS) -> FakeTrainer:
    """Do what the process of a trainer does."""
    made: list[FakeTrainer] = []

    def make(*arguments: Any) -> FakeTrainer:
        made.append(FakeTrainer(*arguments))
        made[0].stops_after = stops_after
        return made[0]

    monkeypatch.setattr(worker, "Trainer", make)
    monkeypatch.setattr(worker, "describe_kept", lambda *_: None)
    worker._train(spec, *[SimpleNamespace()] * 2)  # type: ignore[arg-type]
    return made[0]


def files_called(work: Callable[[], object]) -> set[str]:
    """The files whose functions are called meanwhile."""
    found = set()
    sys.setprofile(lambda frame, event, _: found.add(frame.f_code.co_filename))
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def test_without_a_trace_nothing_of_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Path(tracing.__file__).parent
    of_traces = {*map(str, (training.parent / "trace").iterdir())}
    of_traces |= {str(training / f"{name}.py") for name in ("tracing", "op_tracing", "attribution")}
    off = files_called(lambda: trained(spec(tmp_path, trace="off"), monkeypatch))
    on = files_called(lambda: trained(spec(tmp_path), monkeypatch))
    assert any(name.endswith("step_timer.py") for name in off)
    assert not off & of_traces
    names = {"tracing.py", "recorder.py", "chrome.py", "merge.py"}
    assert {Path(name).name for name in on & of_traces} == names


def test_steps_ahead_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained(spec(tmp_path / "run"), monkeypatch)
    path = tmp_path / "run" / "trace-0.json"
    assert trainer.notices == [f"{path}: the trace of steps 2 to 3"]
    found = spans_in(path)
    first, second = steps_in(found)
    ahead = ["wait", "request", "launch", "complete", "vote"]
    assert parts_of(second, found) == [*ahead, "progress"]
    # A report, after every third step, waits for the device.
    reported = [*ahead, "complete", "synchronize", "report", "progress"]
    assert parts_of(first, found) == reported
    counted = [e["args"] for e in read_trace(path).events if e["ph"] == "C"]
    assert [values["free on the GPU"] for values in counted] == [7, 7]


@pytest.mark.parametrize(
    ("stops_after", "recorded", "notices"),
    [
        (2, None, ["trace_steps is [2, 4], and the run ended after 2 steps: no trace is written"]),
        (3, 1, []),
    ],
)
def test_a_run_that_ends_early(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stops_after: int,
    recorded: int | None,
    notices: list[str],
) -> None:
    trainer = trained(spec(tmp_path), monkeypatch, stops_after)
    assert trainer.notices == notices
    names = [path.name for path in tmp_path.iterdir()]
    assert names == ["trace-0.json"] * bool(recorded)
    if recorded:
        assert len(steps_in(spans_in(tmp_path / "trace-0.json"))) == recorded
        assert read_trace(tmp_path / "trace-0.json").processes[0].recorded_steps == recorded


def test_a_trace_that_cannot_be_written_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").write_text("")
    trainer = trained(spec(tmp_path / "run"), monkeypatch)
    assert trainer.state.step == STEPS
    assert trainer.notices == []
    assert "run/trace-0.json: the trace cannot be written: Not a directory" in caplog.text


# Loaders


class FakeBuilder:
    """Fills slots with the number of the minibatch."""

    def fill(self, slot: list[int], request: MinibatchRequest) -> None:
        slot[:] = [request.minibatch]

    def close(self) -> None: ...


def test_a_loader_records_fillings(tmp_path: Path) -> None:
    builder: Any = FakeBuilder()
    builder = pickle.loads(pickle.dumps(traced_builder(builder, spec(tmp_path), 3)))
    modes = ["train", "train", "train", "validation", "train", "train"]
    slot: Any = []
    for request in requests(*modes):
        builder.fill(slot, request)
        assert slot == [request.minibatch]
    builder.close()
    trace = read_trace(tmp_path / "trace-3-loader.json")
    (header,) = trace.processes
    assert (header.process, header.number, header.recorded_steps) == ("loader 3", 7, 2)
    assert [span.name for span in spans_in(tmp_path / "trace-3-loader.json", "loader")] == [
        "fill"
    ] * 3
    flows = [event["id"] for event in trace.events if event["ph"] == "s"]
    assert flows == [(3 << 32) + 2, (3 << 32) + 3]


def test_passes_of_one_step_are_filled_in_it(tmp_path: Path) -> None:
    """With `sum_rows`: two passes of each of four steps, the second and third of them recorded."""
    builder: Any = FakeBuilder()
    builder = traced_builder(builder, spec(tmp_path, batch_size=8, sum_rows=4), 0)
    for request in requests(*["train"] * 4):
        builder.fill([], request)
        builder.fill([], request)
    builder.close()
    path = tmp_path / "trace-0-loader.json"
    flows = [event["id"] & 0xFF for event in read_trace(path).events if event["ph"] == "s"]
    assert flows == [2, 2, 3, 3]
    assert read_trace(path).processes[0].recorded_steps == 2


def test_a_trainer_and_its_loader_are_of_one_run(tmp_path: Path) -> None:
    """The trainer has resolved `norm_rows`, where its network has averages."""
    settings = {"network": "tandem.models.resnet:ResNet18", "batch_size": 16}
    for changes in ({}, {"norm_rows": 8}, {"norm_rows": "global"}):
        of_loader = spec(tmp_path, **settings, **changes)
        of_trainer = spec(tmp_path)
        of_trainer.config = resolve_norm_rows(of_loader.config)
        assert describe(of_trainer) == describe(of_loader)


# Exchanges


def test_buckets_that_share_an_all_reduce_are_recorded_apart(tmp_path: Path) -> None:
    vector = HostVector([np.arange(12.0)], is_common=False)
    buckets = divide({"a": 0, "b": 4, "c": 8}, 12, most=4)
    all_reduce: Any = SimpleNamespace(average=lambda part, shares: np.negative(part, out=part))
    exchange = BucketedGradients(buckets, vector, [all_reduce] * 3)
    recorder = Recorder("trainer 0", 0, tmp_path / "trace-0.json", (0, 1), {})
    tracing._record_exchange(exchange, recorder)
    recorder.begin_step()
    exchange.before_gradients((1.0,))
    for name in "cba":
        exchange.on_gradient_ready(name)
    exchange.before_update((1.0,))
    recorder.end_step()
    np.testing.assert_array_equal(vector.own, -np.arange(12.0))
    averages = spans_in(recorder.path, "buckets")
    assert [span.args for span in averages] == [
        {"bucket": number, "bytes": 32, "parameters": [name]} for number, name in enumerate("cba")
    ]
    assert [span.name for span in spans_in(recorder.path)] == ["begin exchange", "exchange"]


# Clocks


class FakeGroup:
    """A group as one of its ranks sees it; clocks of other machines differ by `ahead`."""

    def __init__(self, machines: Sequence[int], rank: int, ahead: Sequence[int]) -> None:
        self.rank, self.size, self._ahead, self._round = rank, len(machines), ahead, 0
        self._machines = machines

    @property
    def local(self) -> Any:
        here = [r for r, m in enumerate(self._machines) if m == self._machines[self.rank]]
        first = lambda own: ((here[0], 1234) if here[0] != self.rank else own,)  # noqa: E731
        return SimpleNamespace(size=len(here), all_gather_object=first)

    def barrier(self) -> None:
        self._round += 1

    def all_gather_object(self, time: int) -> tuple[int, ...]:
        late = 10**9 if self._round % 4 == 0 else 0  # one is held up now and then
        own = self._ahead[self._machines[self.rank]]
        return tuple(
            time - own + self._ahead[m] + late * (r == 0) for r, m in enumerate(self._machines)
        )


@pytest.mark.parametrize(
    ("machines", "rank", "expected"),
    [
        ([0, 0, 0], 2, 0),  # nothing is exchanged
        ([0, 0, 1], 0, 0),
        ([0, 0, 1], 1, 0),
        ([0, 0, 1], 2, -5_000_000),
        ([0, 1, 2], 2, 3_000_000),
        ([0, 1, 1], 2, 1234),  # as the first rank of its machine
    ],
)
def test_clocks_of_other_machines_are_aligned(
    machines: list[int], rank: int, expected: int
) -> None:
    group: Any = FakeGroup(machines, rank, [0, 5_000_000, -3_000_000])
    assert clock_offset_ns(group) == expected
