"""What the benchmark of preprocessing compares."""

from pathlib import Path

import pytest
from PIL import Image

from benchmarks import preprocessing
from benchmarks.preprocessing import Sizes, answer, preprocess, write_pictures
from tandem.data.manifest import read_manifest

SIZES = Sizes(pictures=21, different=4, rows=30, columns=40, stored=16)


def test_it_answers_its_question() -> None:
    (comparison,) = answer(2, SIZES)
    assert (comparison.name, comparison.peer) == ("preprocessing", "Pillow alone")
    assert (comparison.kind, comparison.target) == ("speed", 0.95)
    assert comparison.question.startswith("21 JPEGs of 40 x 30, ")
    assert comparison.rounds == 2
    assert comparison.seconds > 0 < comparison.peer_seconds


def test_both_sides_take_every_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_pictures(tmp_path, SIZES)
    preprocess(tmp_path, str(tmp_path / "out"), SIZES.stored)
    splits = read_manifest(tmp_path / "out").splits
    assert [len(splits[name].pictures) for name in ("train", "val")] == [18, 3]
    sizes, resize = [], Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda *a: sizes.append(resize(*a).size))

    class Here:
        def map(self, function: object, chunks: list, chunksize: int) -> None:
            assert sum(map(len, chunks)) == 21
            list(map(function, chunks))

    preprocessing.decode_all(Here(), 16, paths)
    assert sizes == [(16, 16)] * 21
