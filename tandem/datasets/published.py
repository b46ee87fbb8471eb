"""The files of known data sets: in the usual folders, or published, with checksums."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from tandem.datasets import cifar, idx
from tandem.errors import InputError
from tandem.validation import one_line

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Published:
    """Files that are published, with their SHA-256, and where other programs keep them."""

    address: str
    files: dict[str, str]  # SHA-256 by name
    places: tuple[str, ...]  # below the folders of `_roots`


# The SHA-256 are those of TensorFlow Datasets (tensorflow_datasets/url_checksums/*.txt). Those of
# Fashion-MNIST were also computed from Debian's package dataset-fashion-mnist, whose files are the
# published ones without the name and time in the header of gzip.
PUBLISHED = {
    "mnist": Published(
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        {
            "train-images-idx3-ubyte.gz": (
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
            ),
            "train-labels-idx1-ubyte.gz": (
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
            ),
            "t10k-images-idx3-ubyte.gz": (
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
            ),
            "t10k-labels-idx1-ubyte.gz": (
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
            ),
        },
        ("mnist", "mnist.npz", "MNIST/raw"),
    ),
    "fashion_mnist": Published(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        {
            "train-images-idx3-ubyte.gz": (
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"
            ),
            "train-labels-idx1-ubyte.gz": (
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"
            ),
            "t10k-images-idx3-ubyte.gz": (
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"
            ),
            "t10k-labels-idx1-ubyte.gz": (
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"
            ),
        },
        ("fashion_mnist", "fashion-mnist", "FashionMNIST/raw"),
    ),
    "cifar10": Published(
        "https://www.cs.toronto.edu/~kriz/",
        {
            "cifar-10-binary.tar.gz": (
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
            )
        },
        ("cifar10/cifar-10-binary.tar.gz", "cifar-10-binary.tar.gz", "cifar-10-batches-bin"),
    ),
    "cifar100": Published(
        "https://www.cs.toronto.edu/~kriz/",
        {
            "cifar-100-binary.tar.gz": (
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"
            )
        },
        ("cifar100/cifar-100-binary.tar.gz", "cifar-100-binary.tar.gz", "cifar-100-binary"),
    ),
}


def find(name: str) -> Path:
    """The file or folder of a data set: in the usual folders, or else downloaded.

    Raises InputError if it is in none of them and cannot be downloaded.
    """
    if (path := locate(name)) is None:
        return download(name)
    log.info("%s: reading %s", name, path)
    return path


def locate(name: str) -> Path | None:
    """The file or folder of a data set in the usual folders, if it is there."""
    paths = (root / place for root in _roots() for place in PUBLISHED[name].places)
    return next((path for path in paths if _holds(name, path)), None)


def download(name: str) -> Path:
    """Download the files of a data set and check them; return their file or folder.

    Raises InputError if pooch is not installed, there is no network, or a file is another one.
    """
    published, folder = PUBLISHED[name], _cache() / name
    nowhere = f"{name}: found in none of {', '.join(map(str, _roots()))}"
    try:
        import pooch
        import requests  # which pooch requires
    except ImportError:
        raise InputError(
            f"{nowhere}, and pooch, which downloads it, is not installed; expected --source PATH"
            " (in Python source=PATH), or pip install 'tandem-train[datasets]'"
        ) from None
    pooch.get_logger().setLevel(logging.WARNING)
    path = folder
    for file, checksum in published.files.items():
        address = published.address + file
        log.info("%s: downloading %s to %s", name, address, folder)
        try:
            path = Path(pooch.retrieve(address, f"sha256:{checksum}", file, folder))
        except (OSError, ValueError) as error:  # ValueError: another checksum
            lost = isinstance(error, requests.ConnectionError | requests.Timeout)
            reason = "no connection" if lost else one_line(error)
            raise InputError(
                f"{nowhere}, and {address} cannot be downloaded: {reason}; expected --source PATH"
                " (in Python source=PATH), or a network"
            ) from None
    return path if len(published.files) == 1 else folder


def _roots() -> tuple[Path, ...]:
    """Our own downloads, Debian's folder, Keras's, and the one that torchvision's users name."""
    keras = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    return _cache(), Path("/usr/share/datasets"), keras / "datasets", Path("data")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def _holds(name: str, place: Path) -> bool:
    if place.suffix in (".gz", ".npz"):
        return place.is_file()
    if name in cifar.FILES:
        return all((place / file).is_file() for part in cifar.FILES[name] for file in part)
    return all(idx.locate(place, file) for file in idx.FILES)
