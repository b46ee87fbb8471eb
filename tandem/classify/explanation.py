"""A drawing of a classified picture: its probabilities, and what mattered to them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tandem.data.class_names import short_names
from tandem.errors import explained
from tandem.files import make_folder, replacing

if TYPE_CHECKING:
    from tandem.classify.classifier import Classifier, Guess

PATCHES = 8  # on each side


def importance(
    classifier: "Classifier", prepared: npt.NDArray[np.uint8], number: int, at_once: int = PATCHES
) -> npt.NDArray[np.float32]:
    """Compute how much of a class's probability is lost where a patch of the picture is covered.

    A patch is covered by the mean image, as in Zeiler, Fergus 2014, "Visualizing and understanding
    convolutional networks", section 4.2.

    Parameters
    ----------
    classifier : Classifier
    prepared : uint8 (row, column, RGB)
        A picture from `Classifier.prepare`.
    number : int
        Of the class.
    at_once : int
        Pictures to be classified together.

    Returns
    -------
    float32 (PATCHES, PATCHES)
        From the top left; below 0 where the class becomes more probable. The patches divide what
        the network sees of the picture.
    """
    window = classifier.window
    edges = np.linspace(window.start, window.stop, PATCHES + 1).round().astype(int)
    covered = np.repeat(prepared[np.newaxis], PATCHES**2, axis=0)
    for patch, picture in enumerate(covered):
        row, column = divmod(patch, PATCHES)
        place = slice(*edges[row : row + 2]), slice(*edges[column : column + 2])
        picture[place] = classifier.mean_picture[place]
    parts = [prepared[np.newaxis], *np.split(covered, range(at_once, len(covered), at_once))]
    whole, *rest = np.concatenate([classifier.probabilities(part)[:, number] for part in parts])
    return (whole - np.array(rest, np.float32)).reshape(PATCHES, PATCHES)


def draw(
    picture: npt.NDArray[np.uint8], guesses: "Sequence[Guess]", lost: npt.NDArray[np.float32]
) -> Any:
    """Draw a picture, its guesses as bars, and what mattered: a Figure of matplotlib.

    Parameters
    ----------
    picture : uint8 (row, column, RGB)
        What the network sees.
    guesses : sequence of Guess
        The most probable first.
    lost : float32 (PATCHES, PATCHES)
        The `importance` of patches.
    """
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(11, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1.2, 1.2))
    left.imshow(picture)
    names = [name.replace("$", r"\$") for name in short_names(g.wnid or g.name for g in guesses)]
    bars = middle.barh(range(len(names)), [guess.probability for guess in guesses])
    middle.bar_label(bars, [f"{100 * guess.probability:.1f} %" for guess in guesses], padding=3)
    middle.set_yticks(range(len(names)), names)
    middle.set(xlim=(0, 1.2), xticks=[], ylim=(len(names) - 0.5, -0.5))
    middle.spines[["top", "right", "bottom"]].set_visible(False)
    side, most = len(picture), float(np.abs(lost).max()) or 1.0
    right.imshow(picture.mean(axis=2), cmap="gray", vmin=0, vmax=255)
    cover = right.imshow(
        lost, cmap="RdBu_r", alpha=0.6, vmin=-most, vmax=most, extent=(0, side, side, 0)
    )
    figure.colorbar(cover, ax=right, label="probability lost where covered")
    right.set_title(f"What mattered for {names[0]}")
    for axis in (left, right):
        axis.set_axis_off()
    return figure


def write(path: Path, figure: Any) -> None:
    """Write a drawing as PNG, whole or not at all; raises InputError where that is impossible."""
    with explained(path, "cannot be written"):
        make_folder(path.parent)
        with replacing(path) as partial:
            figure.savefig(partial, format="png", dpi=120)
