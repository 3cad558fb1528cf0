"""Download of datasets: once per node, unpacked safely, scripts refused."""

import functools
import hashlib
import http.server
import io
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer_process import run, start, wait
from tests.unit.yolo_folder import DATA_YAML, make_yolo_set
from trainer.data.formats.fetch import fetch_missing, unpack
from trainer.data.registry import open_dataset
from trainer.errors import TrainerError


class Server(http.server.ThreadingHTTPServer):
    """HTTP server of a folder that records the requests."""

    def __init__(self, folder: Path, handler: Callable[..., Any] | None = None) -> None:
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), functools.partial(handler or Handler, directory=str(folder)))
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_request(self, *_: object) -> None:
        assert isinstance(self.server, Server)
        self.server.asked.append(self.path)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    """pets.zip and pets.tgz: the same set, in a folder of its own and at the archive's top."""
    root = make_yolo_set(tmp_path / "made/pets").parent
    folder = tmp_path / "served"
    folder.mkdir()
    with zipfile.ZipFile(folder / "pets.zip", "w") as packed:
        for path in sorted(root.rglob("*")):
            packed.write(path, path.relative_to(root.parent))
    with tarfile.open(folder / "pets.tgz", "w:gz") as tape:
        for path in sorted(root.iterdir()):
            tape.add(path, path.name)
    return folder


@pytest.fixture
def server(archives: Path) -> Iterator[Server]:
    with Server(archives) as made:
        yield made
        made.shutdown()


def data_yaml(folder: Path, download: str, more: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "data.yaml"
    path.write_text(DATA_YAML + f"download: {download}\n{more}")
    return path


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["pets.zip", "pets.tgz"])
@pytest.mark.parametrize("root", [".", "pets", "sets/pets"])
def test_images_are_fetched_over_http(server, tmp_path, monkeypatch, name, root):
    monkeypatch.delattr(tarfile, "data_filter", raising=False)  # Python 3.11.2 has none
    path = data_yaml(tmp_path / "user", f"{server.address}/{name}")
    path.write_text(path.read_text().replace("path: .", f"path: {root}"))
    before = path.read_text()
    data = open_dataset(str(path), "train", imgsz=64)
    assert [len(data.labels(k)) for k in range(len(data))] == [0, 1, 2, 0]
    assert data.image(3).shape == (48, 88, 3)
    assert (path.parent / root / "images/train/003.jpg").is_file()
    assert path.read_text() == before  # the archive has a data.yaml, too
    assert not list(tmp_path.rglob(".download-*"))
    open_dataset(str(path), "val", imgsz=64)
    assert server.asked == [f"/{name}"]


@pytest.mark.parametrize("spelled", ["../served/pets.zip", "{folder}/pets.zip"])
def test_images_are_unpacked_from_a_file(archives, tmp_path, spelled):
    path = data_yaml(tmp_path / "user", spelled.format(folder=archives))
    path.write_text(
        path.read_text().replace("images/train", str(path.parent / "images/train"))
    )  # an absolute path
    assert len(open_dataset(str(path), "train", imgsz=64)) == 4
    assert (archives / "pets.zip").is_file()


def test_existing_files_stay(server, tmp_path):
    path = data_yaml(tmp_path / "user", f"{server.address}/pets.zip")
    mine = path.parent / "labels/train/001.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("1 0.5 0.5 0.1 0.1\n")
    assert fetch_missing(str(path))
    assert mine.read_text() == "1 0.5 0.5 0.1 0.1\n"
    assert (path.parent / "images/val/001.jpg").is_file()
    assert not fetch_missing(str(path))


def test_an_incomplete_folder_is_an_error(server, tmp_path):
    path = data_yaml(tmp_path / "user", f"{server.address}/pets.zip")
    (path.parent / "images/train").mkdir(parents=True)
    with pytest.raises(TrainerError, match="has only some of the archive's folders"):
        fetch_missing(str(path))
    assert left(path.parent / "images") == ["train"]


def test_concurrent_processes_fetch_once(server, tmp_path):
    path = data_yaml(tmp_path / "user", f"{server.address}/pets.zip")
    program = f"from trainer.data.registry import open_dataset; print(len(open_dataset({str(path)!r}, 'train', imgsz=64)))"
    answers = [
        each.stdout.splitlines()[-1] for each in wait(start(tmp_path, [{}] * 3, program=("-c", program)))
    ]
    assert answers == ["4", "4", "4"]
    assert server.asked == ["/pets.zip"]


def test_the_command(server, tmp_path):
    path = data_yaml(tmp_path / "user", f"{server.address}/pets.zip")
    done = run(tmp_path, "data", "download", "--data", str(path))
    assert done.stdout.splitlines() == [
        f"data: fetching {server.address}/pets.zip",
        f"data: unpacked to {path.parent}",
    ]
    done = run(tmp_path, "data", "download", "--data", str(path))
    assert done.stdout == f"{path}: all images exist\n"


def test_the_sha256_is_verified(server, archives, tmp_path):
    good = hashlib.sha256((archives / "pets.zip").read_bytes()).hexdigest()
    for address in (f"{server.address}/pets.zip", str(archives / "pets.zip")):
        folder = tmp_path / f"user{len(address)}"
        with pytest.raises(TrainerError, match=f"has sha256 {good}, not 0000"):
            fetch_missing(str(data_yaml(folder, address, f"sha256: '{'0' * 64}'\n")))
        assert left(folder) == ["data.yaml"]
        assert fetch_missing(str(data_yaml(folder, address, f"sha256: {good}\n")))
    with pytest.raises(TrainerError, match=r"data\.yaml:7: `sha256` must have 64"):
        fetch_missing(str(data_yaml(tmp_path / "other", server.address, "sha256: abc\n")))


@pytest.mark.parametrize(
    ("download", "what"),
    [
        ("{server}/missing.zip", r"missing\.zip: 404"),
        ("http://127.0.0.1:1/pets.zip", "cannot be fetched: .*refused"),
        ("http://no-such-host.invalid/pets.zip", "cannot be fetched"),
        ("{server}/broken.zip", "cannot be unpacked"),
        ("{server}/half.zip", "cannot be unpacked"),
        ("{server}/half.tgz", "cannot be unpacked"),
        ("nowhere.zip", "neither an http address nor a file"),
        ("ftp://example.com/pets.zip", "neither an http address nor a file"),
        ("[a, b]", "neither an http address nor a file"),
        ("{server}/other.zip", "the archive has no images/train and images/val, but readme"),
    ],
)
def test_a_failed_download_leaves_no_files(server, archives, tmp_path, download, what):
    (archives / "broken.zip").write_text("<html>please log in</html>")
    for name in ("pets.zip", "pets.tgz"):
        whole = (archives / name).read_bytes()
        (archives / name.replace("pets", "half")).write_bytes(whole[: len(whole) // 2])
    with zipfile.ZipFile(archives / "other.zip", "w") as packed:
        packed.writestr("readme", "x")
    path = data_yaml(tmp_path / "user", download.format(server=server.address))
    with pytest.raises(TrainerError, match=what) as caught:
        open_dataset(str(path), "train", imgsz=64)
    assert str(path) in caught.value.message
    assert caught.value.hint
    assert left(path.parent) == ["data.yaml"]


@pytest.mark.parametrize(
    ("name", "kind", "link"),
    [
        ("../evil", tarfile.REGTYPE, ""),
        ("a/../../evil", tarfile.REGTYPE, ""),
        ("images", tarfile.SYMTYPE, "/etc"),
        ("images", tarfile.LNKTYPE, "../evil"),
        ("images", tarfile.FIFOTYPE, ""),
        ("images", tarfile.CHRTYPE, ""),
    ],
)
def test_a_tar_with_paths_or_links_outside_or_devices_is_refused(tmp_path, name, kind, link):
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    info.size = 1 if kind == tarfile.REGTYPE else 0
    with tarfile.open(tmp_path / "a", "w:gz") as tape:
        tape.addfile(info, io.BytesIO(b"x"))
    with pytest.raises(TrainerError, match=r"a\.tgz: cannot be unpacked: "):
        unpack(tmp_path / "a", tmp_path / "out/in", "a.tgz")
    assert left(tmp_path) == ["a", "out"]
    assert left(tmp_path / "out") == ["in"]
    assert not left(tmp_path / "out/in")


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/tmp/evil", "a\\..\\evil"])
def test_a_zip_is_unpacked_below_its_folder_without_links(tmp_path, name):
    info = zipfile.ZipInfo("images")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a", "w") as packed:
        packed.writestr(name, "x")
        packed.writestr(info, "/etc")
    unpack(tmp_path / "a", tmp_path / "out/in", "a.zip")
    assert left(tmp_path) == ["a", "out"]
    assert left(tmp_path / "out") == ["in"]
    assert not Path("/tmp/evil").exists()
    assert (tmp_path / "out/in/images").read_text() == "/etc"
    assert not (tmp_path / "out/in/images").is_symlink()
