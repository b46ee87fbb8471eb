"""Outside data, YAML or JSON, checked by pydantic; every fault is a sentence of an `InputError`.

Fields of a model may declare what is allowed, as `tandem.cli.option` and `tandem.registry.setting`
do, to complete "it must be ..." in a message. pydantic is imported only when something is checked,
because a loader imports this module.
"""

import dataclasses
import difflib
import functools
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args
from unicodedata import category

import numpy as np
import yaml

from tandem.errors import InputError, explained

if TYPE_CHECKING:
    from pydantic import ValidationError

T = TypeVar("T")

MOST = 2**31 - 1
"""The largest whole number that a setting takes, where no other bound says more."""

_MOST_DEPTH = 100  # of values in YAML; those of network_options may have 64
_LONGEST = 80  # characters of a value that a message shows


def parse_yaml(text: str | bytes) -> Any:
    """Parse YAML into plain values; a `ValueError` of one line if it is not YAML.

    Aliases, tags, a key that stands twice, and impossible dates are refused too.
    """
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"not YAML: {_yaml_fault(error, text)}") from error


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; a `ValueError` of one line if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {one_line(error)}") from error


def unmasked(values: Any, name: str) -> np.ndarray:
    """Convert to an array; InputError for a masked one."""
    refuse_masked(values, name)
    return np.asarray(values)


def refuse_masked(values: Any, name: str) -> None:
    """Raise InputError for an array with masked numbers: its mask would be ignored."""
    if np.ma.is_masked(values):
        hidden = np.ma.count_masked(values)
        raise InputError(
            f"{name}: found a masked array with {hidden} of {np.size(values)} numbers masked, "
            "expected plain numbers: replace those, as its filled(value) does"
        )


def read_yaml(path: Path, content: str | bytes | None = None) -> dict[str, Any]:
    """Read a YAML file of keys and values; an empty one holds none.

    `content` is what it holds, where it has been read already. Raises `InputError` if it cannot be
    read or is not a mapping.
    """
    values = _read(parse_yaml, path, content)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds {shown(values)}; expected lines of the form 'key: value'")
    return values


def read_json(path: Path, content: str | bytes | None = None) -> Any:
    """Read any value from a JSON file, as `read_yaml` does."""
    return _read(parse_json, path, content)


def validated(
    kind: type[T],
    values: Any,
    labels: Mapping[str, str] | None = None,
    source: object = "",
    answers: Mapping[str, str] | None = None,
) -> T:
    """Check plain values and make an instance of a pydantic model or dataclass of them.

    `labels` are the names of keys that do not come from `source`, such as ``--batch_size``, and
    `answers` those of `unknown`, for the message. An `InputError` has a line for each key that
    cannot be used: its value, what is allowed, and what was probably meant.
    """
    from pydantic import BaseModel, ValidationError

    where = f"{source}: " if str(source) else ""
    if not isinstance(values, Mapping):
        raise InputError(f"{where}holds {shown(values)}; expected keys and their values")
    values = {str(key): value for key, value in values.items()}
    try:
        if issubclass(kind, BaseModel):
            return kind.model_validate(values)
        return cast(T, _adapter(cast(Any, kind)).validate_python(values))
    except ValidationError as error:
        sentences = _sentences(error, kind, values, labels or {}, where, answers or {})
        raise InputError("\n".join(sentences)) from error


def shown(value: Any, quoted: bool = True) -> str:
    """A value as it stands in YAML or JSON, cut where it is long."""
    if isinstance(value, str) and not quoted:
        return value
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def is_printable(name: str) -> bool:
    """Test if all characters of a name print in one line; spaces of any kind do."""
    return name.isprintable() or all(c.isprintable() or category(c) == "Zs" for c in name)


def printable(name: str) -> str:
    """A name as it is, or, where not every character prints, in quotes and escaped."""
    return name if name.isprintable() else ascii(name)


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names with commas between them, without the middle of many; "nothing" without any."""
    if len(names) > most:
        half = most // 2
        names = [*names[:half], f"{len(names) - 2 * half} more", *names[-half:]]
    return ", ".join(names) or "nothing"


def counted(things: Sized, noun: str) -> str:
    """The number of things and their noun: ``1 file``, ``2 files``."""
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def shown_size(nbytes: float) -> str:
    """A number of bytes in GB or MB."""
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.2f} MB"


_SPELLINGS = {
    "regression_mse": "mse",
    "regression_mae": "mae",
    "mean_squared_error": "mse",
    "mean_absolute_error": "mae",
    "categorical_accuracy": "accuracy",
    "categorical_cross_entropy": "cross_entropy",
    "categorical_crossentropy": "cross_entropy",
    "sparse_categorical_crossentropy": "cross_entropy",
    "sparse_crossentropy": "cross_entropy",
}
"""Words of other programs, and ours."""


def nearest(word: str, words: Iterable[str]) -> str:
    """The word that was probably meant; empty where none is near.

    Another program's word stands for ours. One that has all parts of a word of several, and others
    between them, is nearer than any other; then a long one in which the word ends, whatever its
    underscores.
    """
    lowered = {word.lower(): word for word in words}
    if (ours := _SPELLINGS.get(word.lower())) in lowered:
        return lowered[ours]
    parts = {*word.lower().split("_")}
    if len(parts) > 1 and (whole := [w for w in lowered if parts < {*w.split("_")}]):
        return lowered[min(whole, key=len)]
    bare = word.lower().replace("_", "")
    if ends := [w for w in lowered if len(w) > 7 and bare.endswith(w.replace("_", ""))]:
        return lowered[max(ends, key=len)]
    return next((lowered[w] for w in difflib.get_close_matches(word.lower(), lowered, 1)), "")


def suggestion(word: str, words: Iterable[str]) -> str:
    """The end of a message: ``; did you mean x?``, or nothing where no word is near."""
    found = nearest(word, words)
    return f"; did you mean {found}?" if found else ""


def unknown(
    key: str, known: Iterable[str], answers: Mapping[str, str] | None = None, kind: str = "key"
) -> str:
    """The message about an unknown key or other word, or about an option as it was typed.

    `answers` has names from other programs, and for each the key to use or a sentence.
    """
    name, option = key.lstrip("-").replace("-", "_").lower(), kind == "option"
    answer = (answers or {}).get(name, "")
    known = [*known]
    if answer and answer not in known:
        return f"there is no {kind} {key}: {answer}"
    if meant := answer or nearest(name, known):
        if option:
            meant = f"--{meant.replace('_', '-') if '-' in key.lstrip('-') else meant}"
        return f"unknown {kind} {key}; did you mean {meant}?"
    every = "--help lists all of them" if option else f"known are {shown(', '.join(known), False)}"
    return f"unknown {kind} {key}; {every}"


def declared(field: Any, name: str) -> str:
    """A declaration of a field beside its type: ``allowed``, ``form`` or ``section``."""
    extra = getattr(field, "json_schema_extra", None) or getattr(field, "metadata", None)
    return str(extra.get(name, "")) if isinstance(extra, Mapping) else ""


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def one_line(error: BaseException) -> str:
    """The message of an error, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _read(parse: Any, path: Path, content: str | bytes | None) -> Any:
    try:
        with explained(path, "cannot be read"):
            return parse(path.read_bytes() if content is None else content)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error


def _yaml_fault(error: BaseException, text: str | bytes) -> str:
    """Return what is wrong with a text that is not YAML, in one line, and where."""
    if isinstance(error, yaml.reader.ReaderError):
        place = text[: error.position]
        newline: Any = "\n" if isinstance(place, str) else b"\n"
        return f"{error.reason} in line {place.count(newline) + 1}"
    if not isinstance(error, yaml.MarkedYAMLError):
        return one_line(error)
    parts = (error.problem, error.problem_mark), (error.context, error.context_mark)
    return ", ".join(
        what if mark is None else f"{what} in line {mark.line + 1}, column {mark.column + 1}"
        for what, mark in parts
        if what
    )


def _sentences(
    error: "ValidationError",
    kind: type,
    values: Mapping[str, Any],
    labels: Mapping[str, str],
    where: str,
    answers: Mapping[str, str],
) -> list[str]:
    """One sentence for each key that was refused, in the order of the fields."""
    found: dict[tuple[str, ...], tuple[Any, ...]] = {}
    for detail in error.errors():
        path, fields, value = _locate(kind, detail["loc"], values)
        # The branches of a union each report; a reason in words says more than "not an integer".
        if path not in found or detail["type"] == "value_error":
            found[path] = detail, fields, value
    sentences = []
    for path, (detail, fields, value) in found.items():
        key = ".".join(path)
        if not path:
            sentences.append(f"{'' if labels else where}{_reason(detail) or detail['msg']}")
        elif detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            inside = "".join(f"{part}: " for part in [".".join(path[:-1])] if part)
            sentences.append(f"{where}{inside}{unknown(path[-1], fields, answers)}")
        else:
            label = labels.get(key, f"{where}{key}")
            sentences.append(f"{label} {_fault(fields.get(path[-1]), value, detail)}")
    return sentences


def _fault(field: Any, value: Any, detail: Any) -> str:
    """Return what is wrong with a value, after its key."""
    allowed = declared(field, "allowed")
    if detail["type"] == "missing":
        return f"is missing; it must be {allowed or 'set'}"
    text, inner = shown(value), detail["input"]
    stands = f"has {shown(inner)}" if text.endswith("...") and inner is not value else f"is {text}"
    if reason := _reason(detail):
        return f"{stands}: {reason}{f' (allowed: {allowed})' if allowed else ''}"
    if not allowed:
        return f"{stands}: {detail['msg'][0].lower()}{detail['msg'][1:]}"
    hint = suggestion(text.strip('"'), words_of(_annotation(field)))
    if declared(field, "form") == "text" and isinstance(value, int | float):
        hint = "; put it in quotes"
    return f"{stands}; it must be {allowed}{hint}"


def _reason(detail: Any) -> str:
    return str(detail["ctx"]["error"]) if detail["type"] == "value_error" else ""


def _locate(
    kind: Any, loc: Iterable[int | str], value: Any
) -> tuple[tuple[str, ...], Mapping[str, Any], Any]:
    """The keys that lead to what was refused, the fields beside the last of them, and its value.

    Where within a value pydantic found the fault is left out.
    """
    path: tuple[str, ...] = ()
    beside: Mapping[str, Any] = {}
    for part in loc:
        model = _model_in(kind)
        if model is None or not isinstance(part, str):
            break
        fields = _fields(model)
        if part in fields:
            beside, kind = fields, _annotation(fields[part])
        elif kind is model:  # an unknown key
            beside, kind = fields, None
        elif isinstance(value, Mapping) and part in value:  # a key of a mapping of models
            kind = model
        else:  # a branch of a union
            continue
        path, value = (*path, part), value.get(part) if isinstance(value, Mapping) else None
    return path, beside, value


def _model_in(annotation: Any) -> Any:
    """The model that an annotation is or contains, such as ``Split`` in ``dict[str, Split]``."""
    if _fields(annotation):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _fields(kind: Any) -> Mapping[str, Any]:
    if found := getattr(kind, "__pydantic_fields__", None):
        return {info.alias or name: info for name, info in found.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return {field.name: field for field in dataclasses.fields(kind)}
    return {}


def _annotation(field: Any) -> Any:
    return getattr(field, "annotation", None) or getattr(field, "type", None)


def words_of(annotation: Any) -> list[str]:
    """The words that a field of type ``Literal[...]``, or of a union with one, allows."""
    found: list[str] = []
    for part in get_args(annotation):
        found += [part] if isinstance(part, str) else words_of(part)
    return found


class _PlainLoader(yaml.SafeLoader):
    """YAML's safe loader, which would take the last of two equal keys and expand aliases."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse an alias: by aliases a few lines can stand for more than memory holds.

        Values deep inside one another are refused too: their time grows with the square.
        """
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(
                None, None, "found an alias, expected plain values", mark
            )
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(
                None, None, f"found values more than {_MOST_DEPTH} deep inside one another", mark
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Name the place of a value that Python cannot make, such as a 13th month."""
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(
                None, None, one_line(error), node.start_mark
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse a key that stands twice."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key_node.value!r} stands twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)
