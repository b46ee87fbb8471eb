"""YAML of a user's: plain values, each key once."""

from collections.abc import Hashable
from typing import Any

import yaml


class PlainLoader(yaml.SafeLoader):
    """YAML's safe loader without two of its traps.

    It would take the last of two equal keys without a word; and by aliases a few lines can stand
    for more than memory holds.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse an alias."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(
                None, None, "found an alias, expected plain values", mark
            )
        return super().compose_node(parent, index)

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


def parse_yaml(text: str | bytes) -> Any:
    """The value that a YAML text stands for.

    Raises
    ------
    yaml.YAMLError
        It is not YAML, has aliases or tags of Python's, or has a key twice.
    ValueError
        It is not UTF-8, or has a date or number that is none.
    RecursionError
        It is nested too deeply.
    """
    return yaml.load(text, Loader=PlainLoader)
