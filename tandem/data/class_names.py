"""Names of the classes of ImageNet."""

import functools
from collections.abc import Iterable, Mapping
from importlib import resources
from types import MappingProxyType


@functools.cache
def imagenet_names() -> Mapping[str, str]:
    """The names of ILSVRC 2012's 1,000 classes by WordNet ID, sorted by ID.

    ``n01440764`` is "tench, Tinca tinca". The head of ``imagenet_names.txt`` gives their source.
    """
    text = resources.files("tandem.data").joinpath("imagenet_names.txt").read_text("utf-8")
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    pairs = (line.partition("\t") for line in lines)
    return MappingProxyType({wnid: name for wnid, _, name in pairs})


def short_names(wnids: Iterable[str]) -> list[str]:
    """The first of ImageNet's names of each class, or else the name of its folder."""
    known = imagenet_names()
    return [known[wnid].partition(",")[0] if wnid in known else wnid for wnid in wnids]
