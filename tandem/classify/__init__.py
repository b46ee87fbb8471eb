"""Classification of pictures by the weights that a run has left or that were converted::

    from tandem.classify import Classifier

    classifier = Classifier.load("runs/alexnet/epoch-0060.safetensors")
    for guesses in classifier.classify(["cat.jpg", "dog.png"]):
        print(guesses[0].name, guesses[0].probability)

PyTensor and PyTorch come with the classes; a program's ``--help`` needs neither.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.classify.classifier import Classifier, Guess

__all__ = ["Classifier", "Guess"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tandem.classify import classifier

    return getattr(classifier, name)
