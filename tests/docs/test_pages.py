"""The pages of docs/: commands that exist, links that lead somewhere, pages that are found."""

import ast
import os
import pkgutil
import re
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from docs.pages import built, included, linked, settings_tables
from tandem.config.schema import Config, make_config
from tandem.preprocessing.settings import Settings
from tandem.validation import parse_yaml, read_yaml
from tests.support.pages import (
    EVERY_PAGE,
    PAGES,
    code_blocks,
    commands,
    dry_run,
    help_of_programs,
    named_programs,
)
from tests.support.tiny import ROOT

SHELL = {"cat", "cd", "cp", "done", "export", "for", "ls", "mkdir", "source", "tail"}


def programs() -> set[tuple[str, str]]:
    """Each program that a page names, and what is said to it."""
    found = set()
    for page in EVERY_PAGE:
        for line in commands(page):
            for command in re.split(r" (?:&&|\|) ", line):
                words = shlex.split(re.sub(r"\$\(.*?\)", "some", command), comments=True)
                words = started(words)
                if words and words[0] not in SHELL and "=" not in words[0]:
                    found.add(divided(words))
    return found


def started(words: list[str]) -> list[str]:
    """The command that mpirun is to start, of a line that exec begins or not."""
    words = words[words[:1] == ["exec"] :]
    return words[words.index("python") :] if words[:1] == ["mpirun"] else words


def divided(words: list[str]) -> tuple[str, str]:
    if words[0] == "tandem":
        words = ["python", "-m", *words]
    if words[:3] == ["python", "-m", "tandem"]:
        return shlex.join(words[:4]), shlex.join(words[4:])
    if words[0] in ("python", "pip"):
        count = 3 if words[1] in ("-m", "-c") else 2
        return shlex.join(words[:count]), shlex.join(words[count:])
    return words[0], shlex.join(words[1:])


def help_of(program: str) -> str:
    """The ``--help`` of a program that a page names."""
    name = program.removeprefix("python ")
    if name == "preprocessing/generate_data.sh":
        name = "preprocessing/make_hkl.py"
    return help_of_programs()[name][1]


@pytest.mark.parametrize("name", sorted(named_programs()))
def test_every_program_that_is_named_starts(name: str) -> None:
    """Pages, Makefile, scripts and docstrings of benchmarks name it."""
    status, text = help_of_programs()[name]
    assert status == 0, text
    assert text.startswith("usage: ")


def test_every_benchmark_is_named_and_every_script_is_a_program() -> None:
    modules = {f"-m benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("*.py")}
    started = {name for name in modules if '__name__ == "__main__"' in source_of(name)}
    assert started - {"-m benchmarks.__main__"} <= named_programs()
    assert {"train.py", "demo/make_digits.py", "-m tests.soak"} <= named_programs()
    for page in (*EVERY_PAGE, ROOT / "Makefile"):
        for name in re.findall(r"\w+/[\w/]+\.sh\b", page.read_text()):
            assert os.access(ROOT / name, os.X_OK), f"{page.name}: {name}"


def source_of(module: str) -> str:
    return (ROOT / f"{module.removeprefix('-m ').replace('.', '/')}.py").read_text()


@pytest.mark.parametrize(("program", "said"), sorted(programs()))
def test_commands_exist_with_their_options(program: str, said: str) -> None:
    if program == "make":
        for target in said.split():
            assert dry_run(target.partition("=")[0]), target
    elif program == "tensorboard":
        assert said == "--logdir runs"
    elif not program.startswith(("python -c", "pip")):
        for option in re.findall(r"(?<!\S)--\w[\w-]*", said):
            assert re.search(rf"{option}\b", help_of(program)), f"{program} has no {option}"


def test_there_are_commands() -> None:
    names = {program for program, _ in programs()}
    wanted = {"train.py", "validate.py", "classify.py", "-m tandem.export", "pretrained/convert.py"}
    assert {f"python {name}" for name in wanted} <= names


def test_the_tutorials_settings_are_settings() -> None:
    (text,) = re.findall(
        r"tutorial\.yaml <<'END'\n(.*?)^END$",
        "\n".join(code_blocks(ROOT / "docs" / "tutorial.md")),
        re.DOTALL | re.MULTILINE,
    )
    assert make_config(parse_yaml(text)).devices == ("cpu", "cpu")


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub and MyST call them in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.name)
def test_code_that_is_named_exists(page: Path) -> None:
    """Files, packages and modules in `backticks`."""
    ours = r"`((?:tandem|tests|benchmarks|examples)(?!/results)[/.][\w/.]+)`"
    for name in re.findall(ours, page.read_text()):
        if "/" in name:
            assert (ROOT / name).exists(), name
        else:
            assert pkgutil.resolve_name(name), name


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One thing\n[a](page.md#one-thing) [b](other.md) [c](#two) [d](https://x.y)\n"
    )
    assert broken_links(page) == ["other.md", "#two"]


def navigation() -> dict[str, list[str]]:
    """The pages of the navigation under the caption of their group."""
    trees = code_blocks(ROOT / "docs" / "index.md", "{toctree}")
    captions = [re.findall(r'^:caption: "?(.*?)"?$', tree, re.MULTILINE)[0] for tree in trees]
    entries = [re.findall(r"^[\w/-]+$", tree, re.MULTILINE) for tree in trees]
    return dict(zip(captions, entries, strict=True))


def test_every_page_is_in_the_navigation_once() -> None:
    groups = navigation()
    levels = dict.fromkeys(group.partition(":")[0] for group in groups)
    assert [*levels] == ["Get started", "Guides", "Reference"]
    found = sorted(page for pages in groups.values() for page in pages)
    assert found == sorted(["library/index", *(p.stem for p in PAGES if p.stem != "index")])


def test_the_readme_names_every_page_in_the_order_of_the_navigation() -> None:
    readme = (ROOT / "README.md").read_text()
    below = readme[readme.index("\n## Pages\n") :]
    listed = re.findall(r"\]\((?:docs/([\w-]+)\.md|([\w./]+))\)", below)
    files = {file.relative_to(ROOT).as_posix(): page for file, page in included().items()}
    named = [page or files.get(other) for page, other in listed if page or other in files]
    wanted = [page for pages in navigation().values() for page in pages if "/" not in page]
    assert named == wanted


def test_each_guide_has_a_picture_of_its_result() -> None:
    guides = [page for group, pages in navigation().items() if "Guides" in group for page in pages]
    assert len(guides) > 20
    for guide in guides:
        text = built((ROOT / "docs" / f"{guide}.md").read_text())
        pictures = re.findall(r"!\[[^]]+\]\(([\w-]+\.\w+)\)", text)
        assert pictures, guide
        for picture in pictures:
            assert (ROOT / "docs" / picture).stat().st_size < 60_000, picture


def test_every_terminal_is_on_its_page() -> None:
    for page in read_yaml(ROOT / "docs" / "terminals.yaml"):
        assert f"]({page}.svg)" in built((ROOT / "docs" / f"{page}.md").read_text())


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200


def test_the_pages_are_short() -> None:
    """Each thing is said once, in the page where a reader looks for it."""
    texts = [page.read_text() for page in (ROOT / "README.md", *PAGES)]
    assert sum(len(text.split()) for text in texts) <= 33_000


def test_a_page_of_a_file_outside_is_nothing_but_its_link() -> None:
    assert included()[ROOT / "README.md"] == "index"
    assert included()[ROOT / "pretrained" / "README.md"] == "pretrained"
    index = built((ROOT / "docs" / "index.md").read_text())
    assert index.startswith("# Tandem\n")
    assert "](tutorial.md)" in index
    assert "](pretrained.md)" in index
    assert "![" in index
    assert "](live-view.svg)" in index
    assert "docs/" not in "".join(re.findall(r"\]\(([^)]*)\)", index))


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[a](docs/tutorial.md#train)", "[a](tutorial.md#train)"),
        ("[a](pretrained/README.md#mean-image)", "[a](pretrained.md#mean-image)"),
        ("![a](docs/curves.png)", "![a](curves.png)"),
        ("[a](#one)", "[a](#one)"),
        ("[a](https://x.y/z.md)", "[a](https://x.y/z.md)"),
        ("[a](config.yaml)", "[a](path:../config.yaml)"),
        ("[a](tests/gpu/README.md), [b](tests)", "a, b"),
        ("```\n[a](docs/tutorial.md)\n```", "```\n[a](docs/tutorial.md)\n```"),
    ],
)
def test_links_are_pointed_to_the_built_pages(link: str, expected: str) -> None:
    assert linked(f"{link}\n", ROOT) == f"{expected}\n"


def test_every_setting_is_on_the_page_of_settings() -> None:
    page = built((ROOT / "docs" / "settings.md").read_text())
    for model in (Config, Settings):
        for key, field in model.model_fields.items():
            (row,) = re.findall(rf"^\| `{key}` \| .*$", settings_tables(model), re.MULTILINE)
            assert row in page
            assert str(field.description)[:20] in row.replace("\\", "")
    assert (
        "| `batch_size` | `128` | images per trainer and step, not global. Allowed: a whole" in page
    )


def texts(file: Path) -> list[str]:
    """The strings of a module, joined where they are one expression, "..." for what varies."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [v.value if isinstance(v, ast.Constant) else "..." for v in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"%[sdg]", "...", node.value))
    return found


def test_messages_on_the_page_of_troubles_are_those_of_the_program() -> None:
    ours = "\n".join(text for file in (ROOT / "tandem").rglob("*.py") for text in texts(file))
    messages = [
        line
        for block in code_blocks(ROOT / "docs" / "troubleshooting.md", "text")
        for line in block.splitlines()
    ]
    assert len(messages) > 12
    for message in messages:
        for part in message.removeprefix("error: ").split("..."):
            assert part.strip(" :;,.") in ours, message


def test_the_glossary_is_in_english_order() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text()
    terms = [term.lower() for term in re.findall(r"^\| ([^|]*) \|", page, re.MULTILINE)[1:]]
    assert len(terms) > 40
    assert terms == sorted(terms, key=lambda term: re.sub(r"[^a-z0-9]", " ", term))


def test_the_glossary_has_each_term_once() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text()
    terms = re.findall(r"^\| ([^|]*) \|", page, re.MULTILINE)[1:]
    names = [re.sub(r" \(.*\)$", "", term) for term in terms]
    settings = [re.findall(r"\(`([a-z_]+)`\)$|^`([a-z_]+)`$", term) for term in terms]
    names += [max(pair) for found in settings for pair in found]
    assert [name for name in {*names} if names.count(name) > 1] == []


def test_the_picture_is_well_formed() -> None:
    root = ElementTree.parse(ROOT / "docs" / "processes.svg").getroot()
    words = " ".join(root.itertext())
    for part in ("launcher", "loader 1", "trainer 1", "slot 1", "barrier", "exchange", "heartbeat"):
        assert part in words
