"""The list of a split's pictures: its order, and the names that layouts share."""

from pathlib import Path

from tandem.preprocessing.listed import Collector, Listed


def listed(*names: str, split: str = "train") -> Listed:
    collector = Collector(Path("in"), split)
    for name in names:
        collector.add_file(name)
        collector.add(name, name.partition("/")[0])
    return collector.listed()


def test_class_folders_are_in_order_and_each_is_sorted() -> None:
    """Though "-" sorts before "/"."""
    found = listed("n1-a/0.JPEG", "n1/2.JPEG", "n1/1.JPEG")
    assert found.pictures == ("n1/1.JPEG", "n1/2.JPEG", "n1-a/0.JPEG")
    assert [found.place(i).path for i in range(3)] == [f"in/{name}" for name in found.pictures]
    assert [found.wnids[label] for label in found.labels] == ["n1", "n1", "n1-a"]


def test_a_name_is_spelt_as_imagenet_s_if_it_is_of_the_picture_s_class() -> None:
    """Otherwise two pictures of different origin would get one name."""
    found = listed(
        "n01440764/n01440764_7.jpg",
        "n01440764/n01440764_8_n01440764.JPEG",
        "n01440764/n01443537_7.jpg",
    )
    assert found.pictures == (
        "n01440764/n01440764_7.JPEG",
        "n01440764/n01440764_8.JPEG",
        "n01440764/n01443537_7.jpg",
    )
