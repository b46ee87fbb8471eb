"""Known data sets as arrays: ``(x_train, y_train), (x_test, y_test) = load("fashion_mnist")``.

They are read from a named file or folder, from the usual folders of the system, or downloaded with
their checksums. Nothing is unpickled, and what a header claims is checked before memory is
reserved. ``tandem datasets NAME --out DIR`` prepares one for training.
"""

import os
from pathlib import Path
from typing import Any

from tandem.datasets.arrays import Data
from tandem.datasets.names import CLASSES, COARSE, NAMES, check_options
from tandem.errors import InputError
from tandem.validation import unknown

__all__ = ["CLASSES", "NAMES", "class_names", "load"]


def load(name: str, source: str | os.PathLike[str] | None = None, **options: Any) -> Data:
    """Read a data set as arrays: ``(x_train, y_train), (x_test, y_test)``.

    Parameters
    ----------
    name : str
        mnist, fashion_mnist, cifar10, cifar100, arrays or synthetic.
    source : path, optional
        Folder or file to read: IDX files of the MNISTs, gzipped or not; the binary version of the
        CIFARs as a folder or an archive; of CIFAR-10 also pictures in ``train/<class>/`` and
        ``test/<class>/``, as a folder or an archive; ``.npz`` with ``x_train``, ``y_train``,
        ``x_test`` and ``y_test``, or ``x`` and ``y``. By default the usual folders are searched,
        and else the files are downloaded, by the package pooch, and kept in ``~/.cache/tandem``.
    **options
        Of cifar100: ``labels``, "fine" or "coarse". Of synthetic: ``train``, ``test``, numbers of
        pictures; ``size``, pixels; ``channels``, 1 or 3; ``classes``; ``seed``.

    Returns
    -------
    tuple of pairs
        Pictures are uint8 (n, row, column), or (n, row, column, RGB), and labels int64 (n,).
        Arrays have the types of their file, but for labels, which become int64, and for other
        targets, which become float32. Without ``x_test`` the second pair has no rows.

    Raises
    ------
    InputError
        The data set is unknown, cannot be found, or is damaged.
    """
    if name not in NAMES:
        raise InputError(unknown(name, NAMES, kind="data set"))
    check_options(name, options)
    if name == "synthetic":
        from tandem.datasets.synthetic import make_pictures

        if source is not None:
            raise InputError(f"synthetic: found the source {source}, expected none")
        return make_pictures(**options)
    from tandem.datasets import arrays, published

    if source is None and name == "arrays":
        raise InputError("arrays: found no source, expected an .npz file: --source FILE.npz")
    path = published.find(name) if source is None else Path(source).expanduser()
    if not path.exists():
        raise InputError(f"{path}: found nothing of that name, expected the data set {name}")
    if name == "arrays":
        return arrays.read(path)
    if path.suffix == ".npz" and name != "cifar100":
        return arrays.checked(arrays.read(path), name, path)
    if name in ("mnist", "fashion_mnist"):
        from tandem.datasets import idx

        return arrays.checked(idx.read(path), name, path)
    from tandem.datasets import cifar

    return arrays.checked(cifar.read(name, path, **options), name, path, **options)


def class_names(name: str, labels: str = "fine") -> tuple[str, ...]:
    """The names of the classes of a data set, in the order of its labels.

    `labels` is "fine" or "coarse", of cifar100. Raises InputError if the data set is unknown, or
    has classes without names.
    """
    if name not in CLASSES:
        raise InputError(unknown(name, CLASSES, kind="data set"))
    return COARSE if name == "cifar100" and labels == "coarse" else CLASSES[name]
