"""The original's published weights: found, downloaded, checked and unpacked."""

import hashlib
import http.client
import json
import logging
import re
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.errors import InputError, explained
from tandem.progress_bar import progress_bar

log = logging.getLogger(__name__)

DATASET = "10864/10911"
HANDLE = f"https://hdl.handle.net/{DATASET}"
FILE = "parameters_releasing.zip"
SHA1 = "58950804f50f8d1a76705e1b28d3546e12ea8a81"
EPOCH = 65

_BY_HAND = (
    f"it can also be downloaded by hand from {HANDLE} (Data & Analysis, {FILE}) and given as "
    "--file FILE"
)
_MOST_JSON = 1 << 24
_MOST_BYTES = 1 << 30  # of all arrays; they have a quarter
_MOST_FILES = 100
_CHUNK = 1 << 20
_SECONDS = 60.0  # without a byte
_MEMBER = re.compile(r"[Wb][01]?_\d+_\d+\.npy")


def download(folder: Path, address: str | None = None) -> Path:
    """Download the archive of the weights into a folder, unless it exists; return its path.

    `address` is http or https; by default it is looked up. An interrupted download continues where
    it was. Raises InputError if it cannot be downloaded, or is another file.
    """
    path, part = folder / FILE, folder / f"{FILE}.part"
    if path.exists():
        verify(path)
        return path
    if address is not None and not re.match("https?://", address, re.IGNORECASE):
        raise InputError(f"--address {address}: expected http://... or https://...")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _receive(_find_address() if address is None else address, part)
        found = _sha1(part)
    except (OSError, http.client.HTTPException) as error:
        raise InputError(
            f"{FILE} could not be downloaded: {_reason(error)}; the same command continues where "
            f"it was, or {_BY_HAND}"
        ) from error
    if found != SHA1:
        part.unlink()
        raise InputError(
            f"{FILE}: what was downloaded is another file: its SHA-1 is {found}, not {SHA1}"
        )
    return part.replace(path)


def verify(path: Path) -> None:
    """Raise InputError unless a file is the published archive, by its checksum."""
    with explained(path, "cannot be read"):
        found = _sha1(path)
    if found != SHA1:
        raise InputError(
            f"{path}: its SHA-1 is {found}, that of the published weights {SHA1}: it is another "
            "file, or is damaged; pretrained/convert.py takes weights of any other run"
        )


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Context manager: a temporary folder with the arrays of an archive.

    Raises InputError if it is not an archive, is damaged, or holds more than weights do.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-weights-") as name:
        folder = Path(name)
        try:
            _unpack(path, folder)
        except InputError:
            raise
        except Exception as error:
            # zipfile raises BadZipFile, zlib.error, NotImplementedError, RuntimeError, and others.
            raise InputError(f"{path}: cannot be unpacked: {_reason(error)}") from error
        yield folder


def _unpack(path: Path, folder: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {Path(info.filename).name: info for info in archive.infolist()}
        wanted = {name: info for name, info in members.items() if _MEMBER.fullmatch(name)}
        size = sum(info.file_size for info in wanted.values())
        if len(wanted) > _MOST_FILES or size > _MOST_BYTES:
            raise InputError(
                f"{path}: holds {len(wanted)} arrays of {size} bytes, more than weights have"
            )
        for name, info in wanted.items():
            with archive.open(info) as source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target, _CHUNK)


def _sha1(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha1").hexdigest()


def _receive(url: str, part: Path) -> None:
    """Complete a file, which stays when the download is interrupted."""
    have = part.stat().st_size if part.exists() else 0
    if have:
        log.info("continuing after %.1f MB", have / 1e6)
    try:
        with _opened(url, {"Range": f"bytes={have}-"} if have else {}) as response:
            _append(response, part, have if response.status == 206 else 0)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # else the file is complete
            raise


def _append(response: Any, part: Path, have: int) -> None:
    length = response.headers.get("Content-Length")
    total = None if length is None else have + int(length)
    with (
        part.open("r+b" if have else "wb") as file,
        progress_bar("MB", None if total is None else total / 1e6, have / 1e6) as advance,
    ):
        file.seek(have)
        while chunk := response.read(_CHUNK):
            file.write(chunk)
            if advance is not None:
                advance(len(chunk) / 1e6)
            have += len(chunk)
            if have > _MOST_BYTES:
                raise OSError("it is larger than the published file")
    if total is not None and have < total:
        raise OSError(f"the connection was closed after {have} of {total} bytes")


def _find_address() -> str:
    """Look the file up in the Dataverse that the handle points to."""
    with _opened(HANDLE, {}) as response:
        landing = urllib.parse.urlsplit(response.url)
    base = f"{landing.scheme}://{landing.netloc}/api"
    with _opened(f"{base}/datasets/:persistentId/?persistentId=hdl:{DATASET}", {}) as response:
        content = response.read(_MOST_JSON)
    try:
        files = json.loads(content)["data"]["latestVersion"]["files"]
        (number,) = (f["dataFile"]["id"] for f in files if f["dataFile"]["filename"] == FILE)
        return f"{base}/access/datafile/{int(number)}"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{base} does not say where {FILE} is; {_BY_HAND}, or its address as --address URL"
        ) from error


def _opened(url: str, headers: dict[str, str]) -> Any:
    request = urllib.request.Request(url, headers={"User-Agent": "tandem", **headers})
    return urllib.request.urlopen(request, timeout=_SECONDS)


def _reason(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or error
    return " ".join(str(reason).split()) or type(error).__name__
