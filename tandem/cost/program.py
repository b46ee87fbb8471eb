"""Predict how long a training step takes on this machine or a cluster, and how it scales.

Measure this machine once:   tandem cost --calibrate --machine machine.yaml
One, two, four machines:     tandem cost --machine machine.yaml --ranks 1 2 4 --ranks_each 1
Another network:             tandem cost --config resnet50 --batch_size 16 --ranks 1 2
Rates of a trace with Ops:   tandem cost --from runs/alexnet/trace.json --ranks 1 2 4 8
A faster network, a picture: tandem cost --ranks 1 8 64 --network_bw 1e11 --output cost.png
Without a measured machine:  tandem cost --cpu_speed 4e12 --memory_bw 5e10 --ranks 1 2

All settings of a run count, as for tandem train. Nothing is trained, and no data set is needed.
"""

import json
import logging
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from tandem.cli import CommandLine, PathOption, configure_logging, exit_status, option
from tandem.config.command_line import ANSWERS, DEFAULT_FILE, RECIPES
from tandem.config.resolve import check_settings, resolve_exchange
from tandem.config.schema import Config
from tandem.cost.machine import ASSUMED_BITS, ASSUMED_LATENCY, Machine, Number
from tandem.cost.predict import Exchange, Prediction, Predictor, check_modelled
from tandem.cost.tables import as_row, layers_table, predictions_table
from tandem.errors import InputError, explained
from tandem.validation import counted, shown, shown_size

log = logging.getLogger(__name__)

MACHINE = Path("machine.yaml")
PYDTNN = ("cpu_speed", "memory_bw", "network_bw", "network_lat")
_FLOAT = 4  # bytes
_PATIENCE = 5.0  # seconds before what takes time is reported
_RATE = "a number above 0"
_MOST_EFFICIENT = 1.05  # with room for noise in rates
_TIMED_WITH = ("precision", "threads", "convolutions", "loader_threads")  # settings


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, int) else value


class CostOptions(Config):
    """Options of ``tandem cost``, beside all settings of a run."""

    ranks: Annotated[list[Annotated[int, Field(ge=1)]], BeforeValidator(_listed)] = option(
        [1, 2, 4, 8], "trainers in all", "whole numbers above 0", "list", min_length=1
    )
    ranks_each: int | None = option(
        None,
        "trainers on each machine (default: as many as were measured there)",
        "a whole number above 0",
        ge=1,
    )
    machine: PathOption | None = option(
        None, f"rates of a machine (default: {MACHINE}, if it exists)", "a file, .yaml", "text"
    )
    calibrate: bool = option(
        False, "measure this machine first, and write the file of --machine", "true or false"
    )
    trace_file: PathOption | None = option(
        None,
        "take rates from a trace with Ops",
        "a file, .json, or the folder of a run",
        "text",
        alias="from",
    )
    cpu_speed: Number | None = option(None, "FLOP/s of every Op, in place of rates", _RATE, gt=0)
    memory_bw: Number | None = option(None, "bytes/s of memory, likewise", _RATE, gt=0)
    network_bw: Number | None = option(None, "bit/s between machines, likewise", _RATE, gt=0)
    network_lat: Number | None = option(
        None, "seconds of a message between machines, likewise", "a number of at least 0", ge=0
    )
    classes: int = option(1000, "number of classes", "at least 1", ge=1)
    layers: bool = option(False, "list the layers too, of the first of ranks", "true or false")
    output: PathOption | None = option(
        None, "draw the predictions", "a file, .png, .svg or .pdf", "text"
    )
    as_json: bool = option(False, "print them as JSON", "true or false", alias="json")

    @property
    def machine_file(self) -> Path:
        return self.machine or MACHINE

    @property
    def source(self) -> str:
        """Return where the machine's rates come from."""
        if self.trace_file is not None:
            return str(self.trace_file)
        is_made_up = self.machine is None and not self.calibrate and not MACHINE.exists()
        return "cpu_speed and memory_bw" if is_made_up else str(self.machine_file)

    @property
    def configuration(self) -> Config:
        """The settings of a run alone, with ``auto`` resolved where predictions depend on it."""
        config = Config(**self.model_dump(include=set(Config.model_fields)))
        found = {"exchange": resolve_exchange(config), "precision": "float32"}
        known = {key: value for key, value in found.items() if getattr(config, key) == "auto"}
        config = config.model_copy(update=known)
        check_settings(config)
        return config


def run_cost(
    arguments: Sequence[str] | None, description: str | None, program: str | None = None
) -> int:
    """Predict what a command line asks for; return the exit status."""
    configure_logging()
    line = CommandLine(arguments, description, program, ANSWERS, once=True, recipes=RECIPES)
    return exit_status(lambda: work(line.read(CostOptions, DEFAULT_FILE)))


def work(options: CostOptions) -> None:
    """Print, and draw, what the options ask for."""
    if options.output is not None and options.output.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(
            f"--output: found {options.output}, expected a file whose name ends .png, .svg or .pdf"
        )
    if options.as_json and options.layers:
        raise InputError("--layers is a table, and --json has none; expected one of them")
    report = Report.of(options)
    sys.stdout.write(report.as_json() if options.as_json else report.text(options.layers))
    if options.output is not None:
        from tandem.cost.drawing import draw

        draw(report.title, report.predictions, options.output)
        log.info("drawn in %s", options.output)


def given_machine(options: CostOptions) -> Machine | None:
    """Read the machine; None if it is to be measured.

    Raises InputError if it cannot be used, if none is given, or more than one.
    """
    file = options.machine
    if options.trace_file is not None:
        if options.calibrate or file is not None:
            other = "--calibrate" if options.calibrate else "--machine"
            raise InputError(f"--from and {other} are both given; expected one of them")
        from tandem.cost.traced import machine_of_trace

        return machine_of_trace(options.trace_file, options.configuration, options.classes)
    if options.calibrate:
        _check_writable(options.machine_file)
        return None
    if file is not None or MACHINE.exists():
        return Machine.read(options.machine_file)
    if options.cpu_speed is None or options.memory_bw is None:
        raise InputError(
            f"no machine is given and there is no {MACHINE}: measure this one by --calibrate, or "
            "name --machine FILE or --from trace.json"
        )
    return Machine.of(_pydtnn(options))


def _check_writable(file: Path) -> None:
    """Refuse a file that cannot be written before minutes are spent on its content."""
    folder = file.parent
    if not folder.is_dir():
        raise InputError(f"--machine: there is no folder {folder} for {file.name}")
    with explained(f"--machine: {file}", "cannot be written"), tempfile.TemporaryFile(dir=folder):
        pass


def measured_machine(path: Path) -> Machine:
    """Measure this machine, and write its file."""
    from tandem.cost.calibrate import calibrate

    machine = calibrate()
    machine.save(path)
    log.info("wrote %s", path)
    return machine


def _pydtnn(options: CostOptions) -> dict[str, float]:
    found = {key: getattr(options, key) for key in PYDTNN}
    return {key: value for key, value in found.items() if value is not None}


@dataclass(frozen=True)
class Report:
    """Predictions, and what they are of."""

    title: str
    source: str  # of the machine's rates
    predictor: Predictor
    predictions: tuple[Prediction, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, options: CostOptions) -> "Report":
        """Predict a step for every number of ranks."""
        from tandem.cost.steps import trainer_step  # it imports PyTensor and PyTorch

        machine = given_machine(options)
        config = options.configuration
        check_modelled(config, on_gpus=machine is not None and machine.devices > 0)
        with reported("rewriting the graph of %s", config.network):
            step = trainer_step(config, options.classes)
        machine = machine or measured_machine(options.machine_file)
        machine = machine.model_copy(update=_pydtnn(options))
        exchange = Exchange(config.exchange, config.collective, dict(config)["bucket_mb"])
        predictor = Predictor(step, machine, exchange, options.ranks_each or machine.trainers)
        predictions = tuple(predictor.predict(ranks) for ranks in options.ranks)
        title = f"{config.network}, {config.batch_size} images per trainer and step"
        notes = (*_notes(options, predictor), *_doubts(predictions))
        return cls(title, options.source, predictor, predictions, notes)

    def text(self, layers: bool = False) -> str:
        """A table with a line for each number of ranks, notes, and a table of layers."""
        step, exchange = self.predictor.step, self.predictor.exchange
        flops = sum(line.work.flops for line in step.lines)
        strategies = dict.fromkeys(
            exchange.strategy(self.predictor.layout(p.ranks)) for p in self.predictions
        )
        buckets = f" in {counted(step.buckets, 'bucket')}" if step.buckets else ""
        heading = [
            self.title,
            f"{len(step.lines):,} lines, {flops / 1e9:,.1f} GFLOP; rates of {self.source}",
            f"exchange: {exchange.what}, {shown_size(_FLOAT * sum(self.predictor.sizes))}{buckets},"
            f" by {', '.join(strategies)}",
            "",
        ]
        lines = [*heading, *predictions_table(self.predictions), *self.notes]
        if layers:
            speed = self.predictor.speed(self.predictions[0].ranks)
            lines += ["", *layers_table(step, speed)]
        return "\n".join(lines) + "\n"

    def as_json(self) -> str:
        """One JSON object; seconds, and images a second."""
        rows = [as_row(prediction) for prediction in self.predictions]
        about = {"title": self.title, "rates": self.source}
        found = {**about, "predictions": rows, "notes": [*self.notes]}
        return json.dumps(found, indent=1) + "\n"


def _notes(options: CostOptions, predictor: Predictor) -> Iterator[str]:
    """Yield what limits the predictions."""
    machine = predictor.machine
    if machine.load is None:
        yield "note: the machine has no rate of loading, which is left out"
    if machine.fewest > 1:
        yield (
            f"note: the rates are those of {machine.fewest} trainers at once; fewer are predicted "
            "to be no faster, and the speed-up is over one of them"
        )
    yield from _assumptions(predictor.assumptions(options.ranks))
    for key in ("compile", "use_data_layer"):
        if getattr(options, key) is True:
            yield f"note: {key} is true; the lines are those without it"
    for key in () if options.trace_file else _TIMED_WITH:
        if (value := getattr(options, key)) not in ("auto", "float32"):
            yield f"note: {key} is {shown(value, False)}, with which the rates have to be measured"


def _doubts(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yield a note where trainers at once are each faster than one alone, which none can be."""
    found = [each.ranks for each in predictions if each.efficiency > _MOST_EFFICIENT]
    if found:
        yield (
            f"note: {found[0]} ranks are predicted more than {found[0]} times as fast as one, so "
            "something else was computing when the machine was measured: measure it again"
        )


def _assumptions(assumed: Sequence[str]) -> Iterator[str]:
    """Yield what is assumed of an exchange."""
    between = {
        "steps_between": f"{ASSUMED_LATENCY * 1e6:g} us a message",
        "bytes_between": f"{ASSUMED_BITS / 1e9:g} Gbit/s",
    }
    if found := [text for name, text in between.items() if name in assumed]:
        yield f"note: between machines an assumed {' and '.join(found)}, as nothing was measured"
    if within := [name for name in assumed if name not in between]:
        yield (
            f"note: not measured: {', '.join(within)}; assumed from the bandwidth of memory and "
            f"{ASSUMED_LATENCY * 1e6:g} us a message"
        )


@contextmanager
def reported(message: str, *values: object) -> Iterator[None]:
    """Context manager: report what is being done if it takes more than a few seconds."""
    timer = threading.Timer(_PATIENCE, lambda: log.info(f"{message} ...", *values))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
