"""ImageNet in every layout: the same manifest, order and pixels, whichever it is."""

import json
import re
from pathlib import Path

import make_hkl
import pytest

from tests.support import layouts
from tests.support.layouts import LAYOUTS, SIDE
from tests.support.picture_files import contents

_NOT_COMPARED = ("index.npz", "parquet_copy/")


def options(out: Path, *more: str) -> list[str]:
    sizes = ("--image-size", str(SIDE), "--batch-size", "7", "--workers", "1")
    return ["--tar-root-dir", str(out), *sizes, *more]


def output(out: Path) -> dict[str, bytes]:
    """What is the same from every layout."""
    return {k: v for k, v in contents(out).items() if not k.startswith(_NOT_COMPARED)}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Class folders of training pictures and flat validation pictures, named one by one."""
    root = tmp_path_factory.mktemp("named")
    layouts.folders_with_kit(root / "in")
    data = root / "in" / "ILSVRC2012_devkit_t12" / "data"
    named = {
        "train-img-dir": root / "in" / "train",
        "val-img-dir": root / "in" / "val",
        "val-label-file": data / "ILSVRC2012_validation_ground_truth.txt",
        "meta-clsloc-mat": data / "meta.mat",
    }
    arguments = [word for key, path in named.items() for word in (f"--{key}", str(path))]
    assert make_hkl.main(options(root / "out", *arguments)) == 0
    return output(root / "out")


def test_names_are_those_that_imagenet_has(expected: dict[str, bytes]) -> None:
    splits = json.loads(expected["manifest.json"])["splits"]
    train, val = (splits[split]["pictures"] for split in ("train", "val"))
    assert all(re.fullmatch(r"(n\d{8})/\1_\d+\.JPEG", name) for name in train)
    assert train != sorted(train)
    assert val == [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, layouts.VAL + 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_bytes(
    tmp_path: Path, expected: dict[str, bytes], layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    write, what = LAYOUTS[layout]
    write(source)
    arguments = options(out, "--source", str(source))
    assert make_hkl.main(arguments) == 0
    assert output(out) == expected
    found = (
        f"{source}: found {what}: {layouts.TRAIN} training and {layouts.VAL} validation pictures"
        " of 10 classes"
    )
    assert capsys.readouterr().err.splitlines().count(found) == 1
    # A finished run is recognised, and nothing is written.
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert make_hkl.main(arguments) == 0
    assert "everything is there already" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
