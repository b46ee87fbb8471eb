"""The settings of preprocessing: the file, the command line over it, and what is refused."""

from pathlib import Path

import pytest
import yaml

from tandem.config.hardware import available_cores
from tandem.errors import InputError
from tandem.preprocessing import settings as preprocessing_settings
from tandem.preprocessing.settings import DEFAULT_CONFIG, Settings, read_settings

FOLDERS = "train_img_dir: t\nval_img_dir: v\ntar_root_dir: out\n"


def read(tmp_path: Path, text: str, *options: str) -> Settings:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return read_settings(["--config", str(path), *options], "")


def test_the_file_has_every_key_with_its_default() -> None:
    values = yaml.safe_load(DEFAULT_CONFIG.read_text())
    assert values.keys() == Settings.model_fields.keys()
    for key, field in Settings.model_fields.items():
        if not key.startswith(("train_", "val_", "meta", "tar_")):
            assert values[key] == field.default, key


def test_without_a_file_the_output_is_below_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the package is installed and no clone is there."""
    monkeypatch.setattr(preprocessing_settings, "DEFAULT_CONFIG", tmp_path / "none.yaml")
    settings = read_settings(["--source", "pictures"], "")
    assert (settings.source, settings.train_img_dir) == (Path("pictures"), None)
    assert settings.tar_root_dir == Path("data/imagenet")


def test_without_arguments_it_is_read() -> None:
    settings = read_settings([], "")
    root = DEFAULT_CONFIG.parent.parent
    assert settings.train_img_dir == root / "data" / "ILSVRC2012" / "train"
    assert settings.misc_folder == root / "data" / "imagenet" / "misc"
    assert settings.label_folder == root / "data" / "imagenet" / "labels"
    assert settings.processes == len(available_cores()) >= 1


def test_paths_in_the_file_are_relative_to_it(tmp_path: Path) -> None:
    settings = read(tmp_path, FOLDERS + "source: s\nmisc_dir: ../misc\nlabel_dir: /labels\n")
    assert settings.source == tmp_path / "s"
    assert settings.train_img_dir == tmp_path / "t"
    assert settings.misc_folder == tmp_path.parent / "misc"
    assert settings.label_folder == Path("/labels")


def test_folders_on_the_command_line_replace_the_source_in_the_file(tmp_path: Path) -> None:
    settings = read(tmp_path, FOLDERS + "source: s\n", "--train-img-dir", "mine")
    assert (settings.source, settings.train_img_dir) == (None, Path("mine"))
    assert settings.val_img_dir == tmp_path / "v"
    settings = read(tmp_path, FOLDERS, "--source", "s")
    assert (settings.source, settings.train_img_dir) == (Path("s"), tmp_path / "t")


def test_a_source_and_folders_on_one_command_line_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--source: found --train_img_dir and --val_img_dir too"):
        read(tmp_path, "", "--source", "s", "--val-img-dir", "v", "--train-img-dir=t")


def test_the_command_line_overrides_each_key(tmp_path: Path) -> None:
    for dash in ("-", "_"):
        for key in Settings.model_fields:
            value = {"layout": "c01b", "resize": "shorter_side"}.get(key, "7")
            option = f"--{key.replace('_', dash)}"
            found = getattr(read(tmp_path, FOLDERS, option, value), key)
            assert str(found) == value
            assert type(found) is not str or key in ("layout", "resize")


def refused(tmp_path: Path, text: str, *options: str) -> str:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text, *options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image_sise: 3", "unknown key image_sise; did you mean image_size?"),
        ("valtxt_filename: val.txt", "there is no key valtxt_filename: tar_root_dir is the folder"),
        ("zzz: 3", "unknown key zzz; known are source"),
        ("1: 3", "unknown key 1; known are"),
        ("image_size: '256'", 'image_size is "256"; it must be a whole number from 1 to'),
        ("image_size: true", "image_size is true"),
        ("image_size: 1.5", "image_size is 1.5"),
        ("image_size: 0", "image_size is 0"),
        ("seed: -1", "seed is -1"),
        ("layout: bc01", 'layout is "bc01"; it must be b01c or c01b'),
        ("misc_dir: 3", "misc_dir is 3; it must be a path or null; put it in quotes"),
        ("tar_root_dir: ''", 'tar_root_dir is ""; it must be a path'),
        ("tar_root_dir: null", "tar_root_dir is null; it must be a path"),
        ("- a", "expected lines of the form 'key: value'"),
        ("a: [", "not YAML: "),
        ("!!python/object/apply:os.getcwd []", "not YAML: "),
        ("seed: 2001-99-99", "not YAML: month must be in 1..12"),
        (f"seed: {'[' * 5_000}", "not YAML: "),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    key = text.partition(":")[0]
    others = "".join(line for line in FOLDERS.splitlines(True) if not line.startswith(f"{key}:"))
    found = refused(tmp_path, text if text[0] in "-a!" else f"{others}{text}\n")
    assert message in found
    assert str(tmp_path / "mine.yaml") in found


DOUBLED = "".join(f"  - &a{n + 1} [*a{n}, *a{n}]\n" for n in range(20))
MERGED = "".join(f"  - &a{n + 1} {{<<: [*a{n}, *a{n}]}}\n" for n in range(20))


@pytest.mark.parametrize(
    "text", [f"seed:\n  - &a0 [1]\n{DOUBLED}", f"seed:\n  - &a0 {{a: 1}}\n{MERGED}"]
)
def test_a_few_lines_cannot_stand_for_a_million(tmp_path: Path, text: str) -> None:
    """Each line doubles the one before it, when it is shown or merged."""
    found = refused(tmp_path, f"{FOLDERS}{text}\n")
    assert "not YAML: found an alias, expected plain values in line 6" in found
    assert len(found) < 1_000


def test_an_empty_or_missing_file(tmp_path: Path) -> None:
    assert read(tmp_path, "").source is None
    with pytest.raises(InputError, match=r"gone\.yaml: cannot be read"):
        read_settings(["--config", str(tmp_path / "gone.yaml")], "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--image-sise", "3"), "unknown option --image-sise; did you mean --image-size?"),
        (("--image", "3"), "unknown option --image"),
        (("--image-sise=3",), "did you mean --image-size?"),
        (("--size", "3"), "did you mean --image_size?"),
        (("--shuffle",), "the list is always shuffled"),
        (("extra",), "--config takes one value; 2 were given"),
        (("--image-size", "big"), '--image-size is "big"; it must be a whole number from 1 to'),
        (("--max-bad", "-1"), "--max-bad is -1; it must be a whole number from 0 to"),
        (("--layout", "bc01"), "it must be b01c or c01b"),
        (("--seed",), "--seed: a value is missing"),
    ],
)
def test_a_command_line_that_cannot_be_used(tmp_path: Path, options, message: str) -> None:
    assert message in refused(tmp_path, FOLDERS, *options)
