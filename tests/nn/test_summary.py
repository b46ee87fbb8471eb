"""The table of layers: names, shapes, numbers, connections and totals."""

import pytest

from tandem.nn import Input, layers
from tandem.nn.graph import Graph
from tandem.nn.model import Sequential
from tandem.nn.summary import summary
from tests.nn.test_graph import small


def cells(text: str) -> list[list[str]]:
    """The cells of each row of a table."""
    rows = [line.strip("│┃ ") for line in text.splitlines() if line[:1] in "│┃"]
    return [[cell.strip() for cell in row.replace("┃", "│").split("│")] for row in rows]


def test_a_chain_has_the_columns_of_keras_and_flops() -> None:
    graph = Graph.chained(
        [Input((28, 28, 1)), layers.Conv2D(32, 3), layers.Flatten(), layers.Dense(10)]
    )
    text = summary(graph, "mnist", 100)
    assert text.splitlines()[0].strip() == "mnist"
    assert cells(text) == [
        ["Layer (type)", "Output Shape", "Param #", "FLOPs"],
        ["input_layer (InputLayer)", "(None, 28, 28, 1)", "0", "0"],
        ["conv2d (Conv2D)", "(None, 26, 26, 32)", "320", "411,008"],
        ["flatten (Flatten)", "(None, 21632)", "0", "0"],
        ["dense (Dense)", "(None, 10)", "216,330", "432,650"],
    ]
    assert text.splitlines()[-4:] == [
        " Total params: 216,650 (846.29 KB)",
        " Trainable params: 216,650 (846.29 KB)",
        " Non-trainable params: 0 (0.00 B)",
        " FLOPs of a row: 843,658",
    ]


def test_a_graph_has_connections_and_what_is_not_trained() -> None:
    graph = small()
    text = summary(graph, width=140)
    rows = {row[0].partition(" ")[0]: row for row in cells(text)}
    assert rows["add"][4] == "batch_normalization, re_lu"
    assert rows["concatenate"][4] == "max_pooling2d, average_pooling2d"
    assert rows["input_layer"][4] == "-"
    assert rows["batch_normalization"][2] == "16"
    total = graph.total_parameters
    assert f" Trainable params: {total - 16:,} (" in text
    assert " Non-trainable params: 16 (64.00 B)" in text


def test_averages_are_not_trained_and_a_shared_layer_has_one_row() -> None:
    symbol, norm, dense = Input((5,)), layers.BatchNormalization(), layers.Dense(5)
    text = summary(Graph.traced(symbol, dense(dense(norm(symbol)))), width=120)
    assert [row[0] for row in cells(text)[1:]] == [
        "input_layer (InputLayer)",
        "batch_normalization (BatchNormalization)",
        "dense (Dense)",
    ]
    assert cells(text)[-1][4] == "batch_normalization, dense"
    assert " Trainable params: 40 (" in text
    assert " Non-trainable params: 10 (40.00 B)" in text


def test_a_narrow_table_keeps_all_of_a_name() -> None:
    text = summary(Graph.chained([Input((5,)), layers.Dense(5, name="x" * 60)]), width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert sum(line.count("x") for line in text.splitlines()) == 60


def test_a_summary_is_printed_under_the_name_of_the_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Sequential([Input((5,)), layers.Dense(5)], name="net")
    model.summary()
    assert capsys.readouterr().out == summary(model.graph, 'Model: "net"') + "\n"
