"""Names of the data sets, of their classes and of their options."""

from collections.abc import Iterable

from tandem.errors import InputError
from tandem.validation import listed

NAMES = ("mnist", "fashion_mnist", "cifar10", "cifar100", "arrays", "synthetic")

OPTIONS = {
    "cifar100": ("labels",),
    "synthetic": ("train", "test", "size", "channels", "classes", "seed"),
}


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CLASSES: dict[str, tuple[str, ...]] = {
    "mnist": tuple("0123456789"),
    "fashion_mnist": (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    "cifar10": _words("airplane automobile bird cat deer dog frog horse ship truck"),
    "cifar100": _words(
        """
        apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
        butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch
        crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house
        kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
        mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree
        plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
        shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table
        tank telephone television tiger tractor train trout tulip turtle wardrobe whale
        willow_tree wolf woman worm
        """
    ),
}

COARSE = _words(
    """
    aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
    household_furniture insects large_carnivores large_man-made_outdoor_things
    large_natural_outdoor_scenes large_omnivores_and_herbivores medium_mammals
    non-insect_invertebrates people reptiles small_mammals trees vehicles_1 vehicles_2
    """
)
"""The 20 coarse classes of CIFAR-100."""


def check_options(name: str, given: Iterable[str], prefix: str = "") -> None:
    """Raise InputError if a data set does not have one of the options."""
    own = OPTIONS.get(name, ())
    for option in given:
        if option not in own:
            owners = [owner for owner, options in OPTIONS.items() if option in options]
            of = f", which {listed(owners)} has" if owners else ""
            raise InputError(
                f"{name}: found the option {prefix}{option}{of}, expected"
                f" {listed([f'{prefix}{each}' for each in own]) if own else 'none'}"
            )
