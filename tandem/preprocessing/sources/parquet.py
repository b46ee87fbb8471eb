"""ImageNet as Hugging Face has it, ILSVRC/imagenet-1k: parquet files of encoded pictures.

A picture in a parquet file is not at one place in it, so that all are copied once, in webdataset's
form, into the output folder. A stopped copy continues with the file at which it stopped.
"""

import io
import json
import logging
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tandem.data.manifest import MANIFEST_NAME
from tandem.data.safe_io import open_file
from tandem.errors import InputError
from tandem.files import free_bytes, locked, make_folder, remove_partials, replacing, write_text
from tandem.preprocessing.listed import Listed, is_imagenet_name
from tandem.preprocessing.output import batch_bytes, check_space
from tandem.preprocessing.pool import START, follow_parent
from tandem.preprocessing.progress import PROGRESS_NAME
from tandem.preprocessing.sources import SOURCES, Folder, Source
from tandem.preprocessing.sources.webdataset import (
    SPLITS,
    check_numbers,
    find_shards,
    list_shards,
)
from tandem.validation import counted, listed, one_line

log = logging.getLogger(__name__)

T = TypeVar("T")

COPIES_NAME = "parquet_copy"
_RECORD_NAME = "copied.json"
_SHARD = re.compile(r"(train|validation|val)-(\d{1,9})-of-(\d{1,9})\.parquet", re.ASCII)
_ROWS = 32  # pictures in memory at once
_MOST_GROUP = 4 << 30  # bytes of the pictures of a row group; Hugging Face's have 0.1 GB
_DIED = "the process that read it died, perhaps for lack of memory"
_LONGEST = 80  # characters of a name
_MEMBERS = 2  # of a picture in a copy: itself and its class


@SOURCES.register("parquet")
@dataclass(frozen=True)
class Parquet(Source):
    """Parquet files with the columns image (bytes and path) and label."""

    layout = "Hugging Face's parquet files"
    expected = "train-00000-of-00294.parquet and so on, or data/ with them (Hugging Face)"

    source: Path
    tar_root_dir: Path
    image_size: int
    pad: int
    subset: int

    @staticmethod
    def recognises(folder: Folder) -> bool:
        return bool(_folder(folder.path))

    def archives(self) -> tuple[Path, ...]:
        return tuple(path for paths in self._shards().values() for path in paths)

    def copies(self) -> Path:
        return self.tar_root_dir / COPIES_NAME

    def find(self) -> Mapping[str, Listed]:
        copies, paths = self.copies(), self.archives()
        self._check_unused(paths)
        with _Reader() as reader:
            shapes = {path: reader.call(_inspect, path) for path in paths}
            missing = [path for path in paths if not _copy_of(path, copies).exists()]
            if missing:
                self._check_space(shapes, missing)
                make_folder(copies)
                with locked(copies):
                    remove_partials(copies)
                    write_text(copies / _RECORD_NAME, _record(paths))
                    for number, path in enumerate(missing, 1):
                        reader.call(_copy, path, _copy_of(path, copies))
                        log.info("%s: copied, %d of %d", path.name, number, len(missing))
        return list_shards(copies, find_shards(copies))

    def _shards(self) -> dict[str, list[Path]]:
        """The files of each split in order; raises InputError if one of them is missing."""
        folder = _folder(self.source) or self.source
        where = f"{folder} (source)"
        found: dict[str, dict[int, str]] = {"train": {}, "val": {}}
        for name in Folder.scan(folder, "source").others:
            if match := _SHARD.fullmatch(name):
                numbers, total = found[SPLITS[match[1]]], int(match[3])
                numbers[int(match[2])] = name
                numbers.setdefault(total - 1, "")  # the last, which may be missing
        for split, numbers in found.items():
            there = {number: name for number, name in numbers.items() if name}
            if len({name.rpartition("-of-")[2] for name in there.values()}) > 1:
                raise InputError(
                    f"{where}: found {listed(sorted(there.values()))}, expected {split} files of"
                    " one number (-of-) of files"
                )
            check_numbers(where, split, there)
            if gone := set(range(max(numbers) + 1)) - there.keys():
                raise InputError(
                    f"{where}: found {counted(there, 'file')} of {split} pictures without number"
                    f" {min(gone)}, expected {max(numbers) + 1} files as their names say"
                )
        return {
            split: [folder / numbers[number] for number in sorted(numbers)]
            for split, numbers in found.items()
        }

    def _check_unused(self, paths: tuple[Path, ...]) -> None:
        """Refuse to copy into the folder of another run, or among copies of other files."""
        record, copies = self.copies() / _RECORD_NAME, self.copies()
        if record.exists():
            # Compared as text, whatever it holds.
            if record.read_bytes() == _record(paths).encode():
                return
            raise InputError(
                f"{record}: found copies of other files than those of {self.source} (source);"
                f" delete {copies}, or choose another tar_root_dir"
            )
        for path in (self.tar_root_dir / MANIFEST_NAME, self.tar_root_dir / PROGRESS_NAME):
            if path.exists():
                raise InputError(
                    f"{path}: found a run whose copies of pictures are not in {copies}: it is of"
                    f" other pictures than those of {self.source} (source), or they were deleted;"
                    " choose another tar_root_dir, or delete what this one holds to start over"
                )
        # A run that was killed before it recorded anything leaves a temporary file at most.
        if copies.exists() and any(not path.name.startswith(".") for path in copies.iterdir()):
            raise InputError(
                f"{copies}: found a folder that no run recorded, expected none; delete it, or"
                " choose another tar_root_dir"
            )

    def _check_space(self, shapes: Mapping[Path, "_Shape"], missing: list[Path]) -> None:
        """Refuse a disk without room for the copies that are missing, and for batch files."""
        needed, free = sum(shapes[path].copied for path in missing), free_bytes(self.tar_root_dir)
        log.info(
            "%s: %d of %d files are copied to %s once, which needs %.1f GB; %.1f GB are free",
            *(self.source, len(missing), len(shapes), self.copies(), needed / 1e9, free / 1e9),
        )
        purpose = "the copies of the pictures"
        # A stopped run, whose copies are gone, has written some of the batch files.
        if not (self.tar_root_dir / PROGRESS_NAME).exists():
            purpose += " and the batch files"
            side = self.image_size + 2 * self.pad
            for paths in self._shards().values():
                rows = sum(shapes[path].rows for path in paths)
                needed += batch_bytes(min(rows, self.subset or rows), side)
        check_space(self.tar_root_dir, needed, purpose)


class _Shape(NamedTuple):
    """The numbers of pictures and of their bytes in a file."""

    rows: int
    size: int

    @property
    def copied(self) -> int:
        """Bytes of its copy: a header and an unfilled block for each member, and the end."""
        blocks = 2 * _MEMBERS * tarfile.BLOCKSIZE
        return self.size + self.rows * blocks + tarfile.RECORDSIZE


class _Reader:
    """A process that reads parquet files: pyarrow ends a process over some damaged ones."""

    def __enter__(self) -> "_Reader":
        self._executor = ProcessPoolExecutor(1, START, initializer=follow_parent)
        return self

    def __exit__(self, *failure: object) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def call(self, function: Callable[..., T], path: Path, *arguments: object) -> T:
        """Call a function of a parquet file; raises InputError if the process ends over it."""
        try:
            return self._executor.submit(function, path, *arguments).result()
        except BrokenProcessPool:
            raise _unreadable(path, RuntimeError(_DIED)) from None


class _Row(NamedTuple):
    content: bytes
    path: str
    label: int


def _folder(source: Path) -> Path | None:
    """The folder of the files: the source, or data/ in it."""
    for folder in (source, source / "data"):
        if any(_SHARD.fullmatch(path.name) for path in folder.glob("*.parquet")):
            return folder
    return None


def _copy_of(path: Path, copies: Path) -> Path:
    return copies / f"{path.stem}.tar"


def _record(paths: tuple[Path, ...]) -> str:
    about = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    return json.dumps({"copied from": about}) + "\n"


def _open(path: Path) -> Any:
    """Open a parquet file, and check its columns."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            f"{path} (source): a parquet file is read by pyarrow, which is not installed; expected"
            " it: pip install pyarrow, or the extra parquet of this package"
        ) from None
    types = pyarrow.types
    texts = (types.is_string, types.is_large_string)
    try:
        open_file(path).close()  # pyarrow would wait for a pipe
        # Pages are read one by one, by this thread; otherwise a whole row group at once.
        file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
        schema = file.schema_arrow
    except Exception as error:
        # pyarrow raises many types of exceptions for files that are damaged.
        raise _unreadable(path, error) from None
    fields = {name: schema.field(name).type for name in ("image", "label") if name in schema.names}
    image, label = fields.get("image"), fields.get("label")
    inner = {} if image is None or not types.is_struct(image) else {f.name: f.type for f in image}
    content = inner.get("bytes")
    if (
        content is None
        or not (types.is_binary(content) or types.is_large_binary(content))
        or not ("path" not in inner or any(is_kind(inner["path"]) for is_kind in texts))
        or label is None
        or not types.is_integer(label)
    ):
        columns = [f"{name}: {one_line(ValueError(kind))}" for name, kind in _columns(schema)]
        raise InputError(
            f"{path} (source): found the columns {listed(columns)}, expected image (a struct of"
            " bytes and path) and label (an integer)"
        )
    return file


def _columns(schema: Any) -> Iterator[tuple[str, str]]:
    return ((name, str(schema.field(i).type)) for i, name in enumerate(schema.names))


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(
        f"{path} (source): cannot be read: {one_line(error)[:200]}; expected a whole parquet file:"
        " copy or download it again"
    )


def _inspect(path: Path) -> _Shape:
    with _open(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        sizes = [group.total_byte_size for group in groups]
        if any(not 0 <= size <= _MOST_GROUP for size in sizes):
            raise _unreadable(path, ValueError(f"a row group of {max(sizes)} bytes"))
        return _Shape(file.metadata.num_rows, sum(sizes))


def _rows(path: Path) -> Iterator[_Row]:
    with _open(path) as file:
        batches = file.iter_batches(_ROWS, columns=["image", "label"], use_threads=False)
        row = 0
        while True:
            try:
                batch = next(batches, None)
                if batch is None:
                    return
                found = batch.to_pylist()
            except Exception as error:
                raise _unreadable(path, error) from None
            for values in found:
                image, label = values["image"] or {}, values["label"]
                content = image.get("bytes")
                if content is None or label is None or label < 0:
                    raise InputError(
                        f"{path} (source): row {row}: found no picture or no class, expected both"
                    )
                yield _Row(content, image.get("path") or "", label)
                row += 1


def _copy(path: Path, copy: Path) -> None:
    """Write the pictures of a file and their classes into an archive, whole or not at all."""
    with (
        replacing(copy) as partial,
        tarfile.open(partial, "w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for number, row in enumerate(_rows(path)):
            name = row.path.rpartition("/")[2].partition(".")[0]
            if not is_imagenet_name(name) or len(name) > _LONGEST:
                name = f"{path.stem}-{number:06d}"
            for suffix, content in (("jpg", row.content), ("cls", str(row.label).encode())):
                member = tarfile.TarInfo(f"{name}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
