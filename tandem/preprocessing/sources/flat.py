"""Training and validation pictures in one folder, as Hugging Face's archives unpack.

Names end in the class: ``n01440764_10026_n01440764.JPEG``, ``ILSVRC2012_val_00000293_n01440764``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import InputError
from tandem.preprocessing.listed import Collector, Listed, class_in
from tandem.preprocessing.sources import SOURCES, Folder, Source
from tandem.validation import printable

_VALIDATION = "ILSVRC2012_val_"


@SOURCES.register("flat")
@dataclass(frozen=True)
class Flat(Source):
    """Pictures side by side whose names say the split and the class."""

    layout = "pictures side by side with the class in their names"
    expected = "n01440764_10026_n01440764.JPEG and ILSVRC2012_val_00000293_n01440764.JPEG, ..."

    source: Path

    @staticmethod
    def recognises(folder: Folder) -> bool:
        return any(map(class_in, folder.pictures))

    def find(self) -> Mapping[str, Listed]:
        folder = Folder.scan(self.source, "source")
        found = {split: Collector(self.source, split) for split in ("train", "val")}
        for name in folder.pictures:
            wnid = class_in(name)
            if wnid is None:
                raise InputError(
                    f"{folder.path} (source): found {printable(name)}, expected a name that ends"
                    " in the class, such as ILSVRC2012_val_00000293_n01440764.JPEG"
                )
            split = found["val" if name.startswith(_VALIDATION) else "train"]
            split.add_file(name)
            split.add(name, wnid)
        return {split: collector.listed() for split, collector in found.items()}
