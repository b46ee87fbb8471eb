"""The table of a network's layers, as Keras shows it."""

import math
import shutil

from tandem.nn.graph import Graph
from tandem.validation import listed


def summary(graph: Graph, title: str = "", width: int | None = None) -> str:
    """A table of layers, shapes, numbers of parameters and FLOPs, with totals.

    Parameters
    ----------
    graph : Graph
    title : str
        Above the table, such as a model's name.
    width : int, optional
        Of the table, characters; by default that of the terminal, or 100.

    Returns
    -------
    str
        A layer that is called several times has one row. Where calls do not simply follow one
        another, a column names the layers that each is called on. FLOPs are those of a row's
        forward pass, a product and its sum being two.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title) if title else None, box=box.HEAVY_HEAD, title_justify="left")
    is_chain = len(graph.layers) == len(graph.nodes) and all(
        node.inputs == (number,) for number, node in enumerate(graph.nodes[1:])
    )
    table.add_column("Layer (type)", overflow="fold")
    table.add_column("Output Shape", overflow="fold")
    for column in ("Param #", "FLOPs"):
        table.add_column(column, justify="right", overflow="fold")
    if not is_chain:
        table.add_column("Connected to", overflow="fold")
    for row in _rows(graph):
        table.add_row(*row[: 4 + (not is_chain)])
    width = width or shutil.get_terminal_size((100, 24)).columns
    console = Console(width=width, color_system=None, force_jupyter=False, force_terminal=False)
    with console.capture() as captured:
        console.print(table, markup=False, highlight=False)
    return "\n".join([captured.get().rstrip("\n"), *_totals(graph)])


def _rows(graph: Graph) -> list[tuple[str, ...]]:
    numbers = dict.fromkeys(graph.layers, 0)
    for parameter in graph.parameters:
        numbers[parameter.name.rpartition(".")[0]] += math.prod(parameter.shape)
    rows: list[tuple[str, ...]] = []
    for name, layer in graph.layers.items():
        calls = [number for number, node in enumerate(graph.nodes) if node.layer == name]
        sources = [graph.nodes[n].layer for call in calls for n in graph.nodes[call].inputs]
        shape = ", ".join(map(str, ("None", *graph.shapes[calls[0]])))
        flops = sum(graph.node_flops(call) for call in calls)
        rows.append(
            (
                f"{name} ({type(layer).__name__})",
                f"({shape})",
                f"{numbers[name]:,}",
                f"{flops:,}",
                listed(sources) if sources else "-",
            )
        )
    return rows


def _totals(graph: Graph) -> list[str]:
    trained = sum(
        math.prod(parameter.shape)
        for parameter in graph.parameters
        if parameter.trainable and parameter.name.rpartition(".")[0] not in graph.frozen
    )
    total = graph.total_parameters
    return [
        f" Total params: {total:,} ({_size(total)})",
        f" Trainable params: {trained:,} ({_size(trained)})",
        f" Non-trainable params: {total - trained:,} ({_size(total - trained)})",
        f" FLOPs of a row: {graph.flops:,}",
    ]


def _size(numbers: int) -> str:
    """So many float32 numbers as Keras shows them, in KB of 1,024 bytes."""
    size = 4.0 * numbers
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024 or unit == "GB":
            break
        size /= 1024
    return f"{size:.2f} {unit}"
