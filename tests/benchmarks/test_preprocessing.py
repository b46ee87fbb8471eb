"""What the benchmark of preprocessing compares."""

from pathlib import Path

import pytest

from benchmarks.preprocessing import (
    Sizes,
    answer,
    copy,
    preprocess,
    preprocess_source,
    write_archives,
    write_pictures,
)

SIZES = Sizes(pictures=11, different=2, rows=30, columns=40, stored=16)


@pytest.mark.slow
def test_it_answers_its_questions() -> None:
    comparisons = [*answer(1, SIZES)]
    assert [(c.name, c.peer, c.kind, c.target) for c in comparisons] == [
        ("preprocessing", "Pillow alone", "speed", 0.95),
        ("from archives", "preprocessing", "speed", 0.9),
        ("from parquet, copied", "preprocessing", "speed", 0.9),
        ("the copy of parquet", "preprocessing", "time", None),
    ]
    for comparison in comparisons:
        assert comparison.question.startswith("11 JPEGs of 40 x 30, ")
        assert comparison.rounds == 1
        assert comparison.seconds > 0 < comparison.peer_seconds


@pytest.mark.slow
def test_archives_hold_the_same_pictures(tmp_path: Path) -> None:
    paths = write_pictures(tmp_path, SIZES)
    write_archives(tmp_path, paths)
    copy(tmp_path, tmp_path / "parquet-out")
    preprocess(tmp_path, str(tmp_path / "out"), SIZES.stored)
    for name in ("wds", "parquet"):
        out = tmp_path / f"{name}-out"
        preprocess_source(tmp_path / name, str(out), SIZES.stored)
        for path in (tmp_path / "out").glob("*_hkl/*.hkl"):
            assert (out / path.relative_to(tmp_path / "out")).read_bytes() == path.read_bytes()
