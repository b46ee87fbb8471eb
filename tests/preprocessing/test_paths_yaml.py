"""The settings of preprocessing: the file, the command line over it, and what is refused."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from tandem.errors import InputError
from tandem.preprocessing.settings import DEFAULT_CONFIG, Settings, available_cores, read_settings

FOLDERS = "train_img_dir: t\nval_img_dir: v\ntar_root_dir: out\n"


def read(tmp_path: Path, text: str, *options: str) -> Settings:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return read_settings(["--config", str(path), *options], "")


def test_the_file_has_every_key_with_its_default() -> None:
    values = yaml.safe_load(DEFAULT_CONFIG.read_text())
    assert list(values) != []
    assert set(values) == {field.name for field in dataclasses.fields(Settings)}
    for field in dataclasses.fields(Settings):
        if field.default is not dataclasses.MISSING and not field.name.startswith(("val_", "meta")):
            assert values[field.name] == field.default, field.name


def test_without_arguments_it_is_read() -> None:
    settings = read_settings([], "")
    root = DEFAULT_CONFIG.parent.parent
    assert settings.train_img_dir == root / "data" / "ILSVRC2012" / "train"
    assert settings.misc_folder == root / "data" / "imagenet" / "misc"
    assert settings.label_folder == root / "data" / "imagenet" / "labels"
    assert settings.processes == available_cores() >= 1


def test_paths_in_the_file_are_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    settings = read(tmp_path, FOLDERS + "misc_dir: ../misc\nlabel_dir: /labels\n")
    assert settings.train_img_dir == tmp_path / "t"
    assert settings.misc_folder == tmp_path.parent / "misc"
    assert settings.label_folder == Path("/labels")


def test_the_command_line_overrides_each_key(tmp_path: Path) -> None:
    for dash in ("-", "_"):
        for field in dataclasses.fields(Settings):
            value = "c01b" if field.name == "layout" else "7"
            option = f"--{field.name.replace('_', dash)}"
            found = getattr(read(tmp_path, FOLDERS, option, value), field.name)
            assert str(found) == value
            assert type(found) is not str or field.name == "layout"


def refused(tmp_path: Path, text: str, *options: str) -> str:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text, *options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image_sise: 3", "unknown key image_sise; did you mean image_size?"),
        ("zzz: 3", "unknown key zzz; known are train_img_dir"),
        ("1: 3", "unknown key 1; known are"),
        ("image_size: '256'", "image_size: found '256', expected an integer from 1"),
        ("image_size: true", "image_size: found True"),
        ("image_size: 1.5", "image_size: found 1.5"),
        ("image_size: 0", "image_size: found 0"),
        ("seed: -1", "seed: found -1"),
        ("layout: bc01", "layout: found 'bc01', expected b01c or c01b"),
        ("misc_dir: 3", "misc_dir: found 3, expected a path"),
        ("tar_root_dir: ''", "tar_root_dir: found '', expected a path"),
        ("tar_root_dir: null", "tar_root_dir is not set"),
        ("- a", "found list, expected keys and values"),
        ("a: [", "is not YAML"),
        ("!!python/object/apply:os.getcwd []", "is not YAML"),
        ("seed: 2001-99-99", "is not YAML: month must be in 1..12"),
        (f"seed: {'[' * 5_000}", "is not YAML"),
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
    assert "is not YAML: found an alias, expected plain values" in found
    assert len(found) < 1_000


def test_an_empty_or_missing_file(tmp_path: Path) -> None:
    assert "train_img_dir is not set" in refused(tmp_path, "")
    with pytest.raises(InputError, match=r"gone\.yaml: the configuration cannot be read"):
        read_settings(["--config", str(tmp_path / "gone.yaml")], "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--image-sise", "3"), "unknown argument --image-sise; did you mean --image-size?"),
        (("--image", "3"), "unknown argument --image"),
        (("--image-sise=3",), "did you mean --image-size?"),
        (("extra",), "unknown argument extra"),
        (("--image-size", "big"), "found 'big', expected an integer from 1"),
        (("--max-bad", "-1"), "found '-1', expected an integer from 0"),
        (("--layout", "bc01"), "b01c"),
        (("--seed",), "expected one argument"),
    ],
)
def test_a_command_line_that_cannot_be_used(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    assert message in refused(tmp_path, FOLDERS, *options)
