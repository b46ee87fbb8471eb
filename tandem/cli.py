"""The frame of every program: options from a pydantic model, exit status, logging.

A program declares its options and arguments as fields of a model, made by `option`. Everywhere
``--batch_size 64``, ``--batch-size 64`` and ``--batch_size=64`` are the same, a boolean's name
alone sets it to true, an option is given once, and what is unknown is refused with what was
probably meant.
"""

import argparse
import contextlib
import logging
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from tandem import __version__
from tandem.errors import InputError
from tandem.validation import (
    declared,
    parse_yaml,
    read_yaml,
    shown,
    suggestion,
    unknown,
    validated,
)

log = logging.getLogger(__name__)

_OPTION = re.compile(r"--?[^\W\d]|--$")  # neither a number below 0 nor a lone dash
_ARGUMENTS = ("argument", "arguments")
_MOST_IN_USAGE = 15  # options
_SEVERAL = ("list", "mapping", "arguments")


class Options(BaseModel):
    """Base of a program's options."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


M = TypeVar("M", bound=BaseModel)


def option(
    default: Any, meaning: str, allowed: str, form: str = "value", section: str = "", **bounds: Any
) -> Any:
    """Field of a model that is an option or an argument of a program.

    A default of `...` asks for a value; `meaning` names the unit; `allowed` completes "it must be
    ..."; `bounds` are those of pydantic's ``Field``, such as ``gt=0``. `form` is "value", one YAML
    value; "list", a YAML list or several values; "mapping", ``{key: value}``; "text", taken as it
    stands; "argument" or "arguments": one, or one and more, given without an option.
    """
    details = {"allowed": allowed, "form": form, "section": section}
    return Field(default=default, description=meaning, json_schema_extra=details, **bounds)  # type: ignore[arg-type]


def count(text: str) -> int:
    """Type of an option of argparse, in examples: a number from 1 on."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"found {number}, expected a number from 1 on")
    return number


def to_path(value: Any) -> Any:
    """Make text a path, with ``~`` expanded."""
    if not isinstance(value, str) or not value:
        return value
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise ValueError(f"whose home folder is {value!r}? ({error})") from error


PathOption = Annotated[Path, BeforeValidator(to_path)]


@dataclass(frozen=True)
class CommandLine:
    """The command line of a program."""

    arguments: Sequence[str] | None  # None: those of the process
    description: str | None  # above the options in --help
    program: str | None = None  # such as python -m tandem.plot; None: its file
    answers: Mapping[str, str] = field(default_factory=dict)  # of `tandem.validation.unknown`
    once: bool = False  # refuse an option that is given twice; otherwise the last counts
    recipes: Path | None = None  # folder of files that --config may name without path and suffix

    def read(
        self,
        model: type[M],
        default_file: Path | None = None,
        read_file: Callable[[Path], dict[str, Any]] = read_yaml,
        beside: tuple[str, Callable[[Path], dict[str, Any]]] | None = None,
    ) -> M:
        """Read the options that a model declares, over a file of settings if there is one.

        `default_file` is read if it exists and ``--config FILE`` names no other; with None the
        program has no file of settings. `beside` is an option that names a file, and a function: a
        file of settings beside that file comes before `default_file`, and is read by the function.
        Raises `InputError` if something cannot be used, and `SystemExit` with status 0 after
        ``--help`` and ``--version``.
        """
        fields = {info.alias or key: info for key, info in model.model_fields.items()}
        labels = {key: f"--{key}" for key, info in fields.items() if not _is_argument(info)}
        if default_file is not None:
            where = f" beside the {beside[0]} or in the current folder" if beside else ""
            meaning = f"YAML file of settings (default: {default_file.name}{where}, if it exists)"
            if self.recipes is not None:
                meaning += ", or a recipe of tandem.models, such as resnet50"
            fields = {"config": option(None, meaning, "a path", "text"), **fields}
        values, typed = self._parse(fields)
        source = default_file if default_file is not None and default_file.is_file() else None
        if named := values.pop("config", None):
            source = self._named(named)
        elif (
            default_file is not None
            and beside
            and (found := file_beside(values.get(beside[0]) or "", default_file.name))
        ):
            source, read_file = found, beside[1]
        if source is not None:
            in_file = read_file(source)
            values = in_file | values
            labels = {k: f"{v} (in {source}: {k})" for k, v in labels.items() if k not in in_file}
        return validated(model, values, labels | typed, source or "", self.answers)

    def _named(self, name: str) -> Path:
        """The file of settings that ``--config`` names: a path, or else a recipe."""
        path = Path(name)
        if self.recipes is None or path.name != name or path.suffix or path.is_file():
            return path
        known = sorted(recipe.stem for recipe in self.recipes.glob("*.yaml"))
        if name not in known:
            hint = suggestion(name, known) or f"; recipes are {', '.join(known)}"
            raise InputError(f"--config {name}: there is no such file, and no such recipe{hint}")
        return self.recipes / f"{name}.yaml"

    def _parse(self, fields: Mapping[str, FieldInfo]) -> tuple[dict[str, Any], dict[str, str]]:
        """The values by key, as YAML would hold them, and each option as it was typed."""
        places = [key for key, info in fields.items() if _is_argument(info)]
        values: dict[str, Any] = {}
        typed: dict[str, str] = {}
        loose: list[str] = []
        tokens = deque(sys.argv[1:] if self.arguments is None else self.arguments)
        while tokens:
            token = tokens.popleft()
            if token == "--":
                loose += tokens
                break
            if not _OPTION.match(token):
                loose.append(token)
                continue
            name, equals, value = token.partition("=")
            if name in ("-h", "--help", "--version"):
                version = f"tandem {__version__}\n"
                sys.stdout.write(version if name == "--version" else self._help(fields))
                raise SystemExit(0)
            key = name.removeprefix("--").replace("-", "_")
            if key not in fields or key in places:
                known = [key for key in fields if key not in places]
                raise InputError(unknown(name, known, self.answers, "option"))
            info = fields[key]
            if key in typed and self.once:
                hint = f"; give all values at once: {name} A B" if _form(info) in _SEVERAL else ""
                raise InputError(f"{name} is given twice{hint}")
            # Where arguments may still follow, a list in brackets, or of one value, leaves them.
            ends = bool(loose) or any(map(_OPTION.match, tokens))
            takes_all = not places or (_form(info) in _SEVERAL and ends)
            words = [value] if equals else _words_after(tokens, info, takes_all)
            values[key], typed[key] = _value(name, info, words), name
        return values | _placed(loose, places, fields), typed

    def _help(self, fields: Mapping[str, FieldInfo]) -> str:
        needed = "".join(f"--{key} VALUE " for key, info in fields.items() if info.is_required())
        parser = argparse.ArgumentParser(
            self.program,
            f"%(prog)s {needed}[--key VALUE ...]" if len(fields) > _MOST_IN_USAGE else None,
            self.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--version", action="store_true", help="show the version and exit")
        for heading, keys in sections(fields).items():
            group = parser.add_argument_group(heading) if heading else parser
            for key in keys:
                name, details = _documented(key, fields[key])
                group.add_argument(name, **details)
        return parser.format_help()


def file_beside(file: str | os.PathLike[str], name: str) -> Path | None:
    """Return the file of that name in a folder, or in that of another file, if there is one."""
    with contextlib.suppress(OSError, ValueError):  # it may have no name, or no home folder
        path = Path(to_path(os.fspath(file)))
        found = path / name if path.is_dir() else path.with_name(name)
        return found if found.is_file() else None
    return None


def launch_commands(description: str | None, verb: str, program: str) -> str:
    """A description whose commands start with `program` instead of ``tandem VERB``."""
    return re.sub(rf"\btandem {verb}\b", program, description or "")


def run_program(model: type[M], work: Callable[[M], int | None], line: CommandLine) -> int:
    """Run a program that has no file of settings; return its exit status."""
    configure_logging()
    return exit_status(lambda: work(line.read(model)))


def exit_status(work: Callable[[], int | None], stopped: str = "stopped by SIGINT") -> int:
    """Do the work of a program; return its exit status.

    That is the work's own (None is 0), 2 after an `InputError`, or 130 after Ctrl-C, when `stopped`
    is logged.
    """
    try:
        return work() or 0
    except InputError as error:
        log.error("error: %s", error)
        return 2
    except KeyboardInterrupt:
        log.info(stopped)
        return 130


def configure_logging(prefix: str = "") -> None:
    """Log to stderr, in the form that all programs share."""
    logging.basicConfig(level=logging.WARNING, format=f"{prefix}%(message)s", force=True)
    logging.getLogger("tandem").setLevel(logging.INFO)


def sections(fields: Mapping[str, FieldInfo]) -> dict[str, list[str]]:
    """The keys under each heading, in order."""
    grouped: dict[str, list[str]] = {}
    for key, info in fields.items():
        grouped.setdefault(declared(info, "section"), []).append(key)
    return grouped


def _form(info: FieldInfo) -> str:
    return declared(info, "form")


def _is_argument(info: FieldInfo) -> bool:
    return _form(info) in _ARGUMENTS


def _is_switch(info: FieldInfo) -> bool:
    return info.annotation is bool or bool in get_args(info.annotation)


def _words_after(tokens: deque[str], info: FieldInfo, all_of_them: bool) -> list[str]:
    """Take the values of an option: one where arguments may follow, or a list in brackets."""
    words: list[str] = []
    is_list = _form(info) in _SEVERAL and bool(tokens) and tokens[0][:1] in ("[", "{")
    while tokens and not _OPTION.match(tokens[0]):
        is_open = is_list and bool(words) and words[-1][-1:] not in ("]", "}")
        is_argument = words or (_is_switch(info) and tokens[0] not in ("true", "false"))
        if is_argument and not (all_of_them or is_open):
            break
        words.append(tokens.popleft())
    return words


def _value(name: str, info: FieldInfo, words: Sequence[str]) -> Any:
    """Turn the words after an option into what the same key would hold in a YAML file."""
    form, allowed = _form(info), declared(info, "allowed")
    if not words:
        if _is_switch(info):
            return True
        raise InputError(f"{name}: a value is missing; it must be {allowed}")
    if len(words) > 1 and form not in _SEVERAL:
        raise InputError(f"{name} takes one value; {len(words)} were given: {' '.join(words)}")
    if form == "text":
        return None if words[0] == "null" else words[0]
    whole = " ".join(words)  # of a list or mapping that a shell has split at its spaces
    try:
        if form == "list" and len(words) > 1 and not whole.startswith("["):
            return [parse_yaml(word) for word in words]
        return parse_yaml(whole)
    except ValueError as error:
        raise InputError(f"{name} {whole}: not a YAML value; it must be {allowed}") from error


def _placed(
    loose: list[str], places: Sequence[str], fields: Mapping[str, FieldInfo]
) -> dict[str, Any]:
    """The words without an option by argument, in order; the last may take several."""
    values: dict[str, Any] = {}
    for key in places[: len(loose)]:
        several = _form(fields[key]) == "arguments"
        values[key] = tuple(loose) if several else loose[0]
        loose = [] if several else loose[1:]
    if loose:
        hint = "" if places else "; settings are given as --key value"
        hint += ", a file of settings as --config FILE" * ("config" in fields)
        raise InputError(f"unexpected argument {loose[0]!r}{hint}")
    return values


def _documented(key: str, info: FieldInfo) -> tuple[str, dict[str, Any]]:
    """Return what argparse's ``--help`` takes of an option."""
    allowed, form, meaning = declared(info, "allowed"), _form(info), str(info.description)
    notes = [] if allowed in meaning or _is_argument(info) else [allowed]
    if not info.is_required() and "default" not in meaning:
        default = str(info.default) if isinstance(info.default, Path) else info.default
        notes.append(f"default: {shown(default, quoted=False)}")
    text = f"{meaning} [{'; '.join(notes)}]" if notes else meaning
    is_file = form == "text" and allowed.startswith(("a file", "a path"))
    details: dict[str, Any] = {
        "metavar": "FILE" if is_file else "VALUE",
        "nargs": "+" if form in _SEVERAL else "?" if _is_switch(info) else None,
        "help": text.replace("%", "%%"),
    }
    if _is_argument(info):
        return key, details | {"metavar": key.upper().rstrip("S" if form == "arguments" else "")}
    return f"--{key}", details | {"required": info.is_required()}
