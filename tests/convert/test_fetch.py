"""The download, from a server that breaks off, ignores ranges or lies; archives that are none."""

import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tandem.convert import fetch
from tandem.convert.fetch import download, unpacked, verify
from tandem.errors import InputError

CONTENT = bytes(range(256)) * 4096


@dataclass
class Site:
    """A small Dataverse, and what it was asked."""

    base: str  # its address
    content: bytes = CONTENT
    cut: int | None = None  # after how many bytes it breaks a download off
    ranges: bool = True  # whether it can begin in the middle
    listing: object = None  # what it says of its files
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path and range


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self, state)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = Site(f"http://127.0.0.1:{server.server_port}")
    files = [{"id": 3, "filename": "readme.txt"}, {"id": 41, "filename": fetch.FILE}]
    state.listing = {"data": {"latestVersion": {"files": [{"dataFile": file} for file in files]}}}
    monkeypatch.setattr(fetch, "HANDLE", f"{state.base}/handle")
    monkeypatch.setattr(fetch, "SHA1", hashlib.sha1(CONTENT).hexdigest())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield state
    server.shutdown()
    server.server_close()


def answer(request: BaseHTTPRequestHandler, site: Site) -> None:
    wanted = request.headers.get("Range")
    site.asked.append((request.path, wanted))
    if request.path == "/handle":
        request.send_response(302)
        request.send_header("Location", "/dataset.xhtml?persistentId=hdl:10864/10911")
        request.end_headers()
    elif request.path.startswith("/dataset.xhtml"):
        send(request, 200, b"<html>")
    elif request.path.startswith("/api/datasets"):
        send(request, 200, json.dumps(site.listing).encode())
    elif request.path == "/api/access/datafile/41":
        begin = int(wanted[6:-1]) if wanted and site.ranges else 0
        if begin and begin >= len(site.content):
            send(request, 416, b"")
            return
        send(request, 206 if begin else 200, site.content[begin:], site.cut)
    else:
        send(request, 404, b"")


def send(request: BaseHTTPRequestHandler, status: int, content: bytes, cut=None) -> None:
    request.send_response(status)
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    request.wfile.write(content[:cut])
    request.close_connection = True


def test_the_file_is_looked_up_downloaded_and_kept(site: Site, tmp_path: Path) -> None:
    path = download(tmp_path / "new")
    assert path.read_bytes() == CONTENT
    about = "?persistentId=hdl:10864/10911"
    pages = ["/handle", f"/dataset.xhtml{about}", f"/api/datasets/:persistentId/{about}"]
    assert [asked for asked, _ in site.asked] == [*pages, "/api/access/datafile/41"]
    site.asked.clear()
    assert download(tmp_path / "new") == path
    assert site.asked == []
    assert [file.name for file in (tmp_path / "new").iterdir()] == [fetch.FILE]


def address(site: Site) -> str:
    return f"{site.base}/api/access/datafile/41"


def test_a_download_that_was_broken_off_goes_on(site: Site, tmp_path: Path) -> None:
    site.cut = 300_000
    for _ in range(2):
        with pytest.raises(InputError, match=r"closed after \d+ of 1048576 bytes; the same"):
            download(tmp_path, address(site))
    assert not (tmp_path / fetch.FILE).exists()
    site.cut = None
    assert download(tmp_path, address(site)).read_bytes() == CONTENT
    ranges = [wanted for _, wanted in site.asked]
    assert ranges == [None, "bytes=300000-", "bytes=600000-"]
    assert [file.name for file in tmp_path.iterdir()] == [fetch.FILE]


@pytest.mark.parametrize(("part", "ranges"), [(b"x" * 2_000_000, False), (CONTENT, True)])
def test_a_server_without_ranges_begins_again_and_a_whole_part_is_kept(
    site: Site, tmp_path: Path, part: bytes, ranges: bool
) -> None:
    (tmp_path / f"{fetch.FILE}.part").write_bytes(part)
    site.ranges = ranges
    assert download(tmp_path, address(site)).read_bytes() == CONTENT


def test_another_file_is_refused_and_begun_again(site: Site, tmp_path: Path) -> None:
    site.content = CONTENT[:-1] + b"?"
    with pytest.raises(InputError, match="what was downloaded is another file"):
        download(tmp_path, address(site))
    assert list(tmp_path.iterdir()) == []
    site.content = CONTENT
    assert download(tmp_path, address(site)).read_bytes() == CONTENT


def test_a_file_that_is_larger_than_can_be(site: Site, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(fetch, "_MOST_BYTES", 1000)
    with pytest.raises(InputError, match="larger than the published file"):
        download(tmp_path, address(site))


@pytest.mark.parametrize(
    "listing", [None, [], {"data": {}}, {"data": {"latestVersion": {"files": [{"dataFile": {}}]}}}]
)
def test_a_repository_without_the_files_address(site: Site, tmp_path: Path, listing) -> None:
    site.listing = listing
    with pytest.raises(InputError, match=r"does not say where .* by hand .* --file"):
        download(tmp_path)


def test_no_server_and_no_address(site: Site, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(InputError, match="expected http"):
        download(tmp_path, "file:///etc/passwd")
    with pytest.raises(InputError, match=r"could not be downloaded: .*404|Not Found"):
        download(tmp_path, f"{site.base}/nowhere")
    monkeypatch.setattr(fetch, "HANDLE", "http://127.0.0.1:1/handle")
    with pytest.raises(InputError, match=r"refused; the same command .* --file FILE"):
        download(tmp_path)


def test_a_file_that_is_there_is_checked(site: Site, tmp_path: Path) -> None:
    path = tmp_path / fetch.FILE
    path.write_bytes(CONTENT)
    verify(path)
    path.write_bytes(CONTENT[:-1])
    for check in (lambda: verify(path), lambda: download(tmp_path)):
        with pytest.raises(InputError, match=r"its SHA-1 is .* is another file, or is damaged"):
            check()
    with pytest.raises(InputError, match="cannot be read"):
        verify(tmp_path / "none")


# Archives


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def test_arrays_alone_are_unpacked_wherever_they_lie(tmp_path: Path) -> None:
    members = {
        "parameters_releasing/W_0_65.npy": b"one",
        "../../b_0_65.npy": b"two",
        "/etc/W1_3_65.npy": b"three",
        "parameters_releasing/readme.txt": b"not an array",
        "mom_0_65.npy": b"not a weight",
    }
    with unpacked(archive(tmp_path / "a.zip", members)) as folder:
        found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found == {"W_0_65.npy": b"one", "b_0_65.npy": b"two", "W1_3_65.npy": b"three"}
    assert not folder.exists()


def test_archives_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    content = archive(path, {"W_0_65.npy": CONTENT}).read_bytes()
    damaged = bytearray(content)
    damaged[60] ^= 255
    encrypted = bytearray(content)
    encrypted[6] |= 1
    encrypted[content.index(b"PK\1\2") + 8] |= 1
    for spoilt in (b"", b"junk", content[:-10], bytes(damaged), bytes(encrypted)):
        path.write_bytes(spoilt)
        with pytest.raises(InputError, match=r"a\.zip: cannot be unpacked"), unpacked(path):
            pass


def test_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(tmp_path / "a.zip", {f"W_{i}_65.npy": b"" for i in range(101)})
    with pytest.raises(InputError, match="101 arrays"), unpacked(path):
        pass
    monkeypatch.setattr(fetch, "_MOST_BYTES", 1_000_000)
    path = archive(tmp_path / "b.zip", {"W_0_65.npy": bytes(2_000_000)})
    assert path.stat().st_size < 10_000
    with pytest.raises(InputError, match="of 2000000 bytes"), unpacked(path):
        pass
    claimed, size = (number.to_bytes(4, "little") for number in (1, 2_000_000))
    path.write_bytes(path.read_bytes().replace(size, claimed))
    with pytest.raises(InputError, match="cannot be unpacked"), unpacked(path):
        pass
