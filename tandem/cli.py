"""The frame of every program: options from a pydantic model, exit status, logging.

A program declares its options and arguments as fields of a model, made by `option`. Everywhere
``--batch_size 64``, ``--batch-size 64`` and ``--batch_size=64`` are the same, a boolean's name
alone sets it to true, an option is given once, and what is unknown is refused with what was
probably meant.
"""

import importlib.metadata
import logging
import re
import shutil
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from tandem.errors import InputError
from tandem.validation import declared, parse_yaml, shown, unknown, validated

log = logging.getLogger(__name__)

BAD_INPUT = 2
INTERRUPTED = 130

_OPTION = re.compile(r"--?[^\W\d]|--$")  # neither a number below 0 nor a lone dash
_ARGUMENTS = ("argument", "arguments")
_INDENT = 26  # of a meaning in --help


class Options(BaseModel):
    """Base of a program's options."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


M = TypeVar("M", bound=BaseModel)


def option(
    default: Any, meaning: str, allowed: str, form: str = "value", section: str = "", **bounds: Any
) -> Any:
    """Field of a model that is an option or an argument of a program.

    Parameters
    ----------
    default
        In its own type; `...` where a value must be given.
    meaning : str
        What it is, with its unit, for ``--help``.
    allowed : str
        What a value must be, to complete "it must be ...".
    form : {"value", "list", "mapping", "text", "argument", "arguments"}
        One YAML value; a YAML list or several values; ``{key: value}``; text taken as it stands;
        one, or one and more, that are given without an option.
    section : str
        The heading under which ``--help`` lists it.
    **bounds
        As pydantic's ``Field`` takes them, such as ``gt=0``.
    """
    details = {"allowed": allowed, "form": form, "section": section}
    return Field(default=default, description=meaning, json_schema_extra=details, **bounds)  # type: ignore[arg-type]


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
class Given:
    """What a command line gives.

    Attributes
    ----------
    values : dict of str to Any
        By key, as the same keys would hold in a YAML file.
    labels : dict of str to str
        Each of these options as it was typed, for messages.
    """

    values: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


def run_program(
    model: type[M],
    work: Callable[[M], int | None],
    arguments: Sequence[str] | None,
    description: str | None,
    program: str | None = None,
    answers: Mapping[str, str] | None = None,
) -> int:
    """Run a program that has no file of settings: log, read its options, do its work.

    Parameters
    ----------
    model : type of BaseModel
        Its options and arguments, fields made by `option`.
    work : callable
        Called with an instance of the model; its exit status, None is 0.
    arguments, description, program, answers
        As those of `parse`.

    Returns
    -------
    int
        As `exit_status`.
    """
    configure_logging()

    def read_and_work() -> int | None:
        fields = {info.alias or key: info for key, info in model.model_fields.items()}
        given = parse(fields, arguments, description, program, answers)
        labels = {key: f"--{key}" for key, info in fields.items() if not _is_argument(info)}
        return work(validated(model, given.values, {**labels, **given.labels}))

    return exit_status(read_and_work)


def exit_status(work: Callable[[], int | None], stopped: str = "stopped by SIGINT") -> int:
    """Do the work of a program; return its exit status.

    Parameters
    ----------
    work : callable
        Its exit status; None is 0.
    stopped : str
        The message after Ctrl-C.

    Returns
    -------
    int
        That of the work; 2 after an `InputError`, whose message is logged; 130 after Ctrl-C.
    """
    try:
        return work() or 0
    except InputError as error:
        log.error("error: %s", error)
        return BAD_INPUT
    except KeyboardInterrupt:
        log.info(stopped)
        return INTERRUPTED


def configure_logging(prefix: str = "") -> None:
    """Log to stderr, in the form that all programs share."""
    logging.basicConfig(level=logging.WARNING, format=f"{prefix}%(message)s", force=True)
    logging.getLogger("tandem").setLevel(logging.INFO)


def parse(
    fields: Mapping[str, FieldInfo],
    arguments: Sequence[str] | None,
    description: str | None,
    program: str | None = None,
    answers: Mapping[str, str] | None = None,
) -> Given:
    """Split a command line into values by key, which are still to be checked.

    Parameters
    ----------
    fields : mapping of str to FieldInfo
        The options and arguments, made by `option`.
    arguments : sequence of str or None
        The command line; None is the process's own.
    description : str or None
        Stands above the options in ``--help``.
    program : str, optional
        How the program is started, such as ``python -m tandem.plot``; by default its file.
    answers : mapping of str to str, optional
        Names that people bring from elsewhere, see `tandem.validation.unknown`.

    Raises
    ------
    InputError
        There is no such option, it is given twice or without a value, or an argument is too many.
    SystemExit
        With status 0, after ``--help`` and ``--version``.
    """
    places = [key for key, field in fields.items() if _is_argument(field)]
    given = Given()
    loose: list[str] = []
    tokens = deque(sys.argv[1:] if arguments is None else arguments)
    while tokens:
        token = tokens.popleft()
        if token == "--":
            loose += tokens
            break
        if not _OPTION.match(token):
            loose.append(token)
            continue
        name, equals, value = token.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if name in ("-h", "--help", "--version"):
            sys.stdout.write(
                _version() if key == "version" else _help(fields, description, program)
            )
            raise SystemExit(0)
        if key not in fields or key in places:
            known = [key for key in fields if key not in places]
            raise InputError(unknown(name, known, answers, option=True))
        if key in given.values:
            several = _form(fields[key]) in ("list", "mapping")
            hint = f"; give all values at once: {name} A B" if several else ""
            raise InputError(f"{name} is given twice{hint}")
        words = [value] if equals else _words_after(tokens, fields[key], not places)
        given.values[key] = _value(name, fields[key], words)
        given.labels[key] = name
    _place(given, loose, places, fields)
    return given


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
    """Take the values of an option: one where arguments may follow, unless it is a list."""
    words: list[str] = []
    all_of_them = all_of_them or _form(info) in ("list", "mapping")
    while tokens and not _OPTION.match(tokens[0]):
        is_argument = words or (_is_switch(info) and tokens[0] not in ("true", "false"))
        if not all_of_them and is_argument:
            break
        words.append(tokens.popleft())
    return words


def _value(name: str, info: FieldInfo, words: Sequence[str]) -> Any:
    """Turn the words after an option into what the same key would hold in a YAML file."""
    form = _form(info)
    if not words:
        if _is_switch(info):
            return True
        raise InputError(f"{name}: a value is missing; it must be {declared(info, 'allowed')}")
    if form == "list" and len(words) > 1 and not words[0].startswith("["):
        return [_yaml(name, info, word) for word in words]
    if form in ("list", "mapping"):  # which a shell splits at the spaces, unless it is quoted
        return _yaml(name, info, " ".join(words))
    if len(words) > 1:
        raise InputError(f"{name} takes one value; {len(words)} were given: {' '.join(words)}")
    if form == "text":
        return None if words[0] == "null" else words[0]
    return _yaml(name, info, words[0])


def _yaml(name: str, info: FieldInfo, text: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise InputError(
            f"{name} {text}: not a YAML value; it must be {declared(info, 'allowed')}"
        ) from error


def _place(
    given: Given, loose: Sequence[str], places: Sequence[str], fields: Mapping[str, FieldInfo]
) -> None:
    """Give the words without an option to the arguments, in order; the last may take several."""
    rest = [*loose]
    for key in places:
        if not rest:
            break
        several = _form(fields[key]) == "arguments"
        given.values[key] = tuple(rest) if several else rest[0]
        rest = [] if several else rest[1:]
    if rest:
        hint = "" if places else "; settings are given as --key value"
        if "config" in fields:
            hint += ", a file of settings as --config FILE"
        raise InputError(f"unexpected argument {rest[0]!r}{hint}")


def _version() -> str:
    try:
        return f"tandem {importlib.metadata.version('tandem')}\n"
    except importlib.metadata.PackageNotFoundError:
        return "tandem, not installed as a package\n"


def _help(fields: Mapping[str, FieldInfo], description: str | None, program: str | None) -> str:
    needed = [key for key, info in fields.items() if info.is_required()]
    usage = [program or Path(sys.argv[0]).name, *(_usage(key, fields[key]) for key in needed)]
    parts = [f"usage: {' '.join(usage)} [--key VALUE ...]\n", f"{(description or '').strip()}\n"]
    others = ["  -h, --help              show this and exit", "  --version"]
    for heading, keys in sections(fields).items():
        entries = [line for key in keys for line in _entry(key, fields[key])]
        parts.append("\n".join([f"{heading or 'options'}:", *entries, *others, ""]))
        others = []
    return "\n".join(parts)


def _usage(key: str, info: FieldInfo) -> str:
    form = _form(info)
    if form in _ARGUMENTS:
        word = key.upper()
        return word if form == "argument" else f"{word.rstrip('S')} [{word.rstrip('S')} ...]"
    if _is_switch(info) and info.default is False:
        return f"--{key}"
    word = "FILE" if form == "text" else "VALUE"
    return f"--{key} {word} [{word} ...]" if form in ("list", "mapping") else f"--{key} {word}"


def _entry(key: str, info: FieldInfo) -> Iterator[str]:
    """The lines of an option in ``--help``."""
    start = f"  {_usage(key, info)}"
    width = max(40, shutil.get_terminal_size().columns) - _INDENT - 1
    meaning = textwrap.wrap(f"{info.description} {_limits(info)}".strip(), width)
    if len(start) > _INDENT - 2:
        yield start
        start = ""
    yield start.ljust(_INDENT) + meaning[0]
    yield from (" " * _INDENT + line for line in meaning[1:])


def _limits(info: FieldInfo) -> str:
    """What is allowed and the default, in brackets, unless the meaning includes them."""
    if _is_argument(info):
        return ""
    allowed = declared(info, "allowed")
    parts: Iterable[str] = [] if allowed in str(info.description) else [allowed]
    if not info.is_required() and "default" not in str(info.description):
        default = str(info.default) if isinstance(info.default, Path) else info.default
        parts = [*parts, f"default: {shown(default, quoted=False)}"]
    return f"[{'; '.join(parts)}]" if parts else ""
