"""ImageNet's names: all there, in class order, with the well-known ones in their places."""

import re

from tandem.data.class_names import imagenet_names


def test_the_thousand_classes_are_in_order() -> None:
    names = imagenet_names()
    assert len(names) == 1000
    assert list(names) == sorted(names)
    assert all(re.fullmatch(r"n\d{8}", wnid) for wnid in names)
    assert all(name and name == name.strip() and "\t" not in name for name in names.values())


def test_known_classes_have_their_number_and_name() -> None:
    numbered = list(imagenet_names().items())
    for number, wnid, name in (
        (0, "n01440764", "tench, Tinca tinca"),
        (207, "n02099601", "golden retriever"),
        (281, "n02123045", "tabby, tabby cat"),
        (497, "n03028079", "church, church building"),
        (701, "n03888257", "parachute, chute"),
        (999, "n15075141", "toilet tissue, toilet paper, bathroom tissue"),
    ):
        assert numbered[number] == (wnid, name)
