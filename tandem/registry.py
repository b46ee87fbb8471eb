"""Choices by name: each is a frozen dataclass that declares its settings and what it requires.

A setting that chooses, such as ``collective``, takes its words from a registry. The fields of the
chosen dataclass are settings too, with their meaning beside them. What a choice requires of a run
is declared as data and checked in one place, `check`, which writes every refusal.
"""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from tandem.errors import InputError
from tandem.validation import nearest


@dataclass(frozen=True)
class Requirement:
    """A need of a choice, or of a setting of it that is not at its default.

    `otherwise` completes the refusal: what the choice is for, and what to do instead, with names in
    braces filled in from the facts.
    """

    holds: Callable[[Any], bool]  # of the facts of a run
    otherwise: str
    setting: str = ""  # empty: the choice itself has the need


class Choice:
    """Base of a registered dataclass. Subclasses are frozen dataclasses of their settings."""

    name: ClassVar[str]
    requires: ClassVar[tuple[Requirement, ...]] = ()  # the first that does not hold is reported


REMOVED = "tandem.nn.network:GraphNetwork"
"""A network that earlier checkpoints and settings name."""
T = TypeVar("T", bound=Choice)


class Registry(Generic[T]):
    """The choices of one setting, in the order in which they were registered."""

    def __init__(self, setting: str) -> None:
        self.setting = setting
        self._choices: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Class decorator: make a frozen dataclass the choice of this name."""

        def add(choice: type[T]) -> type[T]:
            if name in self._choices:
                raise ValueError(f"{self.setting}: {name} is registered twice")
            if not dataclasses.is_dataclass(choice):
                raise TypeError(f"{self.setting}: {choice.__name__} is not a dataclass")
            choice.name = name
            self._choices[name] = choice
            return choice

        return add

    def __iter__(self) -> Iterator[str]:
        return iter(self._choices)

    def __getitem__(self, name: str) -> type[T]:
        return self._choices[name]

    def make(self, name: str, settings: Mapping[str, Any]) -> T:
        """Make the choice of a name from those of the settings that it declares."""
        choice = self._choices[name]
        declared = {field.name for field in dataclasses.fields(choice)}  # type: ignore[arg-type]
        return choice(**{key: value for key, value in settings.items() if key in declared})

    def chosen(self, settings: Mapping[str, Any]) -> T:
        """Make the choice of a configuration; the first where its key is missing."""
        return self.make(settings.get(self.setting, next(iter(self))), settings)


def setting(
    default: Any,
    meaning: str,
    allowed: str,
    *,
    affects_bits: bool = False,
    omit_default: bool = False,
    **bounds: Any,
) -> Any:
    """Field of a choice that is a key of the configuration.

    `meaning` names the unit; `allowed` completes "it must be ..."; a key that `affects_bits` must
    be the same in a resumed run; with `omit_default` the default is left out where settings are
    saved; `bounds` are those of pydantic's ``Field``, such as ``gt=0``.
    """
    details = {"meaning": meaning, "allowed": allowed, "bounds": bounds}
    flags = {"affects_bits": affects_bits, "omit_default": omit_default}
    metadata = {**details, **flags, "default_value": default}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check(setting: str, choice: Choice, facts: Any) -> None:
    """Refuse a choice, made by the key `setting`, whose requirements the facts do not meet."""
    defaults = type(choice)()
    for requirement in choice.requires:
        key, value = setting, choice.name
        if requirement.setting:
            key, given = requirement.setting, getattr(choice, requirement.setting)
            if given == getattr(defaults, key):
                continue
            value = f"{given:g}" if isinstance(given, float) else str(given)
        if not requirement.holds(facts):
            text = requirement.otherwise.format_map(_Attributes(facts))
            raise InputError(f"{key}: {value} {text}")


class _Attributes(dict):
    """The attributes of an object as a mapping, for `str.format_map`."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self._of = of

    def __missing__(self, name: str) -> Any:
        return getattr(self._of, name)


def check_class(setting: str, name: str) -> None:
    """Refuse a class "module:class" that is not there, by the module's source: nothing is imported.

    A module without a source, or that makes names in ways that the source does not show, is left to
    `find_class`.
    """
    module_name, own_name = _parts(setting, name)
    if (module := sys.modules.get(module_name)) is not None:
        if not hasattr(module, "__getattr__") and not hasattr(module, own_name):
            raise _absent(setting, module_name, "class", own_name, vars(module))
        return
    top, *inner = module_name.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        raise _no_module(setting, top, name)
    files = [Path(spec.origin or "")]
    if inner:  # not by find_spec, which would import the packages around it
        places = [Path(folder, *inner) for folder in spec.submodule_search_locations or ()]
        files = [file for path in places for file in path.parent.glob(f"{path.name}*")]
        if not files:
            raise _no_module(setting, module_name, name)
        files = [file for path in places for file in (path / "__init__.py", Path(f"{path}.py"))]
    source = next((file for file in files if file.suffix == ".py" and file.is_file()), None)
    if source is None:
        return
    try:
        nodes = [*ast.walk(ast.parse(source.read_bytes()))]
    except (OSError, SyntaxError, ValueError):
        return
    names = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    if own_name not in names | bound and not {"*", "__getattr__", "globals"} & (names | bound):
        raise _absent(setting, module_name, "class", own_name, names)


def find_class(setting: str, name: str) -> type:
    """Import the class that a setting names as "module:class".

    Python's module path is searched: the folder of the program first, by the command ``tandem`` the
    current folder last. Raises InputError if there is no such module or class.
    """
    return _find(setting, name, "class", lambda found: isinstance(found, type))


def find_function(setting: str, name: str) -> Callable[..., Any]:
    """Import the function that a setting names as "module:function", as `find_class` does."""
    return _find(setting, name, "function", inspect.isfunction)


def _find(setting: str, name: str, kind: str, is_kind: Callable[[Any], bool]) -> Any:
    module_name, own_name = _parts(setting, name)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The module may be there, and another that it imports may not.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise _no_module(setting, error.name, name) from error
    found = getattr(module, own_name, None)
    if found is not None and not is_kind(found):
        raise InputError(f"{setting}: {name} is of type {type(found).__name__}, expected a {kind}")
    if found is None:
        known = [n for n, value in vars(module).items() if is_kind(value)]
        raise _absent(setting, module_name, kind, own_name, known)
    return found


def _parts(setting: str, name: str) -> tuple[str, str]:
    """Module and name of "module:name"; InputError if it is `REMOVED`."""
    if name == REMOVED:
        raise removed(setting)
    module, _, own_name = name.partition(":")
    return module, own_name


def removed(place: str) -> InputError:
    """The refusal of a checkpoint or setting of the network `REMOVED`."""
    return InputError(
        f"{place}: found the network {REMOVED}, which has been removed: the last commit that reads "
        "it is d1f8416"
    )


def _no_module(setting: str, module: str, name: str) -> InputError:
    return InputError(
        f"{setting}: there is no module {module!r} for {name}: it is looked for in the folder of "
        "the program (by the command `tandem`, in the current one) and in those of PYTHONPATH"
    )


def _absent(setting: str, module: str, kind: str, name: str, known: Iterable[str]) -> InputError:
    meant = nearest(name, known)
    hint = f"; did you mean {module}:{meant}?" if meant else ""
    return InputError(f"{setting}: the module {module} has no {kind} {name!r}{hint}")
