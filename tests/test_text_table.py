"""Tables as lines of text."""

from tandem.text_table import aligned


def test_numbers_stand_right_and_texts_left() -> None:
    rows = [("", "layer", "ms"), ("1", "a", "1,000"), ("12", "conv1", "")]
    assert aligned(rows, left=(1,)) == [
        "    layer     ms",
        " 1  a      1,000",
        "12  conv1",
    ]
