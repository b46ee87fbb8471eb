"""Names of the classes of ImageNet."""

import functools
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType


@functools.cache
def imagenet_names() -> Mapping[str, str]:
    """The 1,000 classes of ILSVRC 2012, in the order of their sorted WordNet IDs.

    Returns
    -------
    mapping of str to str
        The names of a class, separated by commas, by its WordNet ID: ``n01440764`` is "tench, Tinca
        tinca". The head of ``imagenet_names.txt`` gives their source.
    """
    text = resources.files("tandem.data").joinpath("imagenet_names.txt").read_text("utf-8")
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    pairs = (line.partition("\t") for line in lines)
    return MappingProxyType({wnid: name for wnid, _, name in pairs})
