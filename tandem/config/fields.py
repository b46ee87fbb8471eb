"""Fields of the configuration: their types, what describes them, and fields of registered choices.

A field's description is its unit and meaning. What a value must be is derived from its type and
bounds, so that ``--help``, refusals and the check itself agree.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    create_model,
    model_serializer,
)
from pydantic.fields import FieldInfo

from tandem.cli import Options
from tandem.registry import Registry
from tandem.validation import declared, words_of

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def _number(value: Any) -> Any:
    """Read text such as ``5e-4`` as a number, which YAML 1.1, for lack of a dot, does not."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _numbers(value: Any) -> Any:
    """Read the values of a mapping as `_number` reads one."""
    if not isinstance(value, dict):
        return value
    return {key: _number(each) for key, each in value.items()}


def listed(value: Any) -> Any:
    """Make a list a tuple, and a bare number or text a tuple of one."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, int | float | str) else value


def _home_expanded(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith("~"):
        return value
    try:
        return str(Path(value).expanduser())
    except RuntimeError as error:
        raise ValueError(f"whose home folder is {value!r}? ({error})") from error


def each_once(layers: tuple[str, ...]) -> tuple[str, ...]:
    """Raise ValueError if a word is listed twice."""
    twice = next((layer for layer in layers if layers.count(layer) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is listed twice")
    return layers


PathText = Annotated[
    str, Field(min_length=1, pattern=r"^[^\x00]*$"), BeforeValidator(_home_expanded)
]
Float = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_number)]
Names = Annotated[tuple[str, ...], BeforeValidator(listed)]
Layers = Annotated[tuple[str, ...], AfterValidator(each_once), BeforeValidator(listed)]


def key(
    default: Any,
    meaning: str,
    allowed: str = "",
    *,
    unit: str = "",
    affects_bits: bool = False,
    omit_default: bool = False,
    **bounds: Any,
) -> Any:
    """Make a field of a section, with what `tandem.cli.option` records.

    `allowed` is by default derived from type, bounds and `unit`, which is what is counted, plural.
    With `omit_default` the default is left out where a configuration is saved, as in files of runs
    from before the key existed.
    """
    extra: dict[str, Any] = {"allowed": allowed, "unit": unit}
    extra |= {"affects_bits": affects_bits, "omit_default": omit_default}
    return Field(default=default, description=meaning, json_schema_extra=extra, **bounds)


class Section(Options):
    """Base of the configuration's sections."""

    heading: ClassVar[str] = ""  # in --help and config.yaml

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Complete what the fields of this section record."""
        super().__pydantic_init_subclass__(**kwargs)
        for field in cls.model_fields.values():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and "section" not in extra:
                extra["section"] = cls.heading
                extra["form"] = _form(field.annotation)
                extra["allowed"] = extra["allowed"] or _allowed(field, str(extra["unit"]))

    @model_serializer(mode="wrap")
    def _without_omitted(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {
            name: value
            for name, value in dump(self).items()
            if not (
                flag(field := type(self).model_fields[name], "omit_default")
                and getattr(self, name) == field.default
            )
        }


def flag(field: FieldInfo, name: str) -> bool:
    """Return whether `key` was given ``affects_bits`` or ``omit_default``."""
    return declared(field, name) == "True"


S = TypeVar("S", bound=Section)


def with_choices(
    *registries: Registry[Any], words_only: Sequence[Registry[Any]] = ()
) -> Callable[[type[S]], type[S]]:
    """Class decorator: append the settings of registered choices to a section.

    A field of the section that chooses takes its words from its registry, also from those of
    `words_only`. ``{words}`` in its description becomes their list, without an
    "auto" that the description explains.
    """

    def extend(section: type[S]) -> type[S]:
        fields: dict[str, Any] = {}
        declared: dict[str, Any] = {}
        for registry in (*words_only, *registries):
            if chooser := section.model_fields.get(registry.setting):
                fields[registry.setting] = _choosing(chooser, tuple(registry))
        for registry in registries:
            for choice in (registry[name] for name in registry):
                types = get_type_hints(choice, include_extras=True)
                for setting in dataclasses.fields(choice):
                    if declared.setdefault(setting.name, setting) is not setting:
                        raise TypeError(f"{setting.name} is declared by two choices")
                    fields[setting.name] = _field_of(setting, types[setting.name])
        return create_model(section.__name__, __base__=section, __doc__=section.__doc__, **fields)

    return extend


def _choosing(field: FieldInfo, words: tuple[str, ...]) -> tuple[Any, Any]:
    text = str(field.description)
    listing = _either([word for word in words if f"{word}:" not in text])
    meaning = text.replace("{words}", listing)
    flags = flag(field, "affects_bits"), flag(field, "omit_default")
    extra = key(field.default, meaning, affects_bits=flags[0], omit_default=flags[1])
    return Literal[words], extra


def _field_of(setting: dataclasses.Field, annotation: Any) -> tuple[Any, Any]:
    if annotation is float:
        annotation = Float
    elif _form(annotation) == "list":
        annotation = Annotated[annotation, BeforeValidator(listed)]
    elif _form(annotation) == "mapping":
        annotation = Annotated[annotation, BeforeValidator(_numbers)]
    details = setting.metadata
    return annotation, key(
        details["default_value"],
        details["meaning"],
        details["allowed"],
        omit_default=details["omit_default"],
        **details["bounds"],
    )


def _either(words: Sequence[str]) -> str:
    """List words: "a, b or c"."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _types(annotation: Any) -> set[Any]:
    """The plain types in an annotation."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType, Annotated):
        parts = get_args(annotation)
        return {t for p in (parts[:1] if origin is Annotated else parts) for t in _types(p)}
    return {origin or annotation}


def _form(annotation: Any) -> str:
    forms = {tuple: "list", dict: "mapping", str: "text"}
    return next((forms[t] for t in _types(annotation) if t in forms), "value")


def _allowed(field: FieldInfo, unit: str) -> str:
    types = _types(field.annotation)
    if str in types:
        return "a path or null" if NoneType in types else "a path"
    switch = ["true", "false"] if bool in types else []
    if words := switch + words_of(field.annotation):
        return _either(words)
    texts = {"ge": "of at least", "gt": "above", "lt": "below", "le": "at most"}
    given = {name: getattr(b, name) for name in texts for b in field.metadata if hasattr(b, name)}
    bounds = [f"{texts[name]} {bound}" for name, bound in given.items()]
    if given.keys() == {"ge", "le"}:
        bounds = [f"from {given['ge']} to {given['le']}"]
    number = "a whole number" if field.annotation is int else "a number"
    return " ".join(filter(None, [number, unit and f"of {unit}", " and ".join(bounds)]))
