"""One folder for each class, named by its WordNet ID: ``n01440764/n01440764_10026.JPEG``."""

from dataclasses import dataclass

from tandem.errors import InputError
from tandem.preprocessing.sources import SOURCES, Folder, Source
from tandem.validation import printable


@SOURCES.register("class_folders")
@dataclass(frozen=True)
class ClassFolders(Source):
    """Pictures in the folders of their classes."""

    splits = ("train", "val")
    expected = "one folder for each class"
    shuffled = True

    @staticmethod
    def recognises(folder: Folder) -> bool:
        return bool(folder.folders)

    def find(self, folder: Folder) -> tuple[list[str], list[str]]:
        if folder.pictures:
            raise InputError(
                f"{folder.path} ({folder.key}): found the picture"
                f" {printable(folder.pictures[0])} beside the class folders, expected every"
                " picture in the folder of its class"
            )
        names: list[str] = []
        wnids: list[str] = []
        for wnid in folder.folders:
            inner = Folder.scan(folder.path / wnid, folder.key)
            if not inner.pictures:
                raise InputError(
                    f"{inner.path} ({folder.key}): found no picture, expected at least one"
                )
            names += [f"{wnid}/{name}" for name in inner.pictures]
            wnids += [wnid] * len(inner.pictures)
        return names, wnids
