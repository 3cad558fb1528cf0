"""The archive of a data set: fetched once, unpacked safely, never run."""

import functools
import hashlib
import http.server
import io
import os
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_train_data import run_train
from tests.unit.trainer_process import run, start, wait
from tests.unit.yolo_folder import DATA_YAML, make_yolo_set
from trainer.data import archive, open_dataset
from trainer.data.archive import unpack
from trainer.data.fetch import fetch_missing
from trainer.errors import TrainerError


class Server(http.server.ThreadingHTTPServer):
    """A folder's files on this machine's own network, and what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
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
def test_pictures_come_from_the_address(server, tmp_path, name, root):
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


@pytest.mark.parametrize("spelled", ["../served/pets.zip", "{folder}/pets.zip", "file://{folder}/pets.zip"])
def test_pictures_come_from_a_file(archives, tmp_path, spelled):
    path = data_yaml(tmp_path / "user", spelled.format(folder=archives))
    assert len(open_dataset(str(path), "train", imgsz=64)) == 4
    assert (archives / "pets.zip").is_file()


def test_what_is_there_is_kept_and_what_is_missing_is_added(server, tmp_path):
    path = make_yolo_set(tmp_path / "user")
    path.write_text(DATA_YAML + f"download: {server.address}/pets.zip\n")
    mine = path.parent / "images/val/mine.jpg"
    (path.parent / "images/val/000.jpg").rename(mine)
    for kind in ("images", "labels"):
        for file in (path.parent / kind / "train").iterdir():
            file.unlink()
        (path.parent / kind / "train").rmdir()
    assert fetch_missing(str(path))
    assert mine.is_file()
    assert len(open_dataset(str(path), "train", imgsz=64)) == 4
    assert len(open_dataset(str(path), "val", imgsz=64)) == 3
    assert not fetch_missing(str(path))


def test_processes_that_start_at_once_fetch_once(server, tmp_path):
    path = data_yaml(tmp_path / "user", f"{server.address}/pets.zip")
    program = f"from trainer.data import open_dataset; print(len(open_dataset({str(path)!r}, 'train', imgsz=64)))"
    answers = [each.stdout.splitlines()[-1] for each in wait(start(tmp_path, [{}] * 3, program=("-c", program)))]
    assert answers == ["4", "4", "4"]
    assert server.asked == ["/pets.zip"]


def test_training_fetches_its_pictures(server, tmp_path):
    path = data_yaml(tmp_path / "user", f"{server.address}/pets.zip")
    done = run_train(path, tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    assert f"data: fetching {server.address}/pets.zip" in done.stdout
    assert (tmp_path / "runs/train/best.pt").is_file()


def test_the_command(server, tmp_path):
    path = data_yaml(tmp_path / "user", f"{server.address}/pets.zip")
    done = run(tmp_path, "data", "download", "--data", str(path))
    assert done.stdout.splitlines() == [f"data: fetching {server.address}/pets.zip", f"data: unpacked to {path.parent}"]
    done = run(tmp_path, "data", "download", "--data", str(path))
    assert done.stdout == f"{path}: all pictures are there\n"


def test_the_sum_is_checked(server, archives, tmp_path):
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
        ("nowhere.zip", "neither an http address nor a file: .*nowhere.zip"),
        ("ftp://example.com/pets.zip", "neither an http address nor a file"),
        ("[a, b]", "neither an http address nor a file"),
        ("{server}/other.zip", "the archive has no images/train and images/val, but readme"),
    ],
)
def test_what_cannot_be_had_leaves_nothing(server, archives, tmp_path, download, what):
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


def write_zip(path: Path, name: str, mode: int = 0o100644, content: bytes = b"x") -> None:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("fine.txt", "fine")
        packed.writestr(info, content, zipfile.ZIP_DEFLATED)


def write_tar(path: Path, name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, link, 1 if kind == tarfile.REGTYPE else 0, 0o755
    with tarfile.open(path, "w:gz") as tape:
        tape.addfile(tarfile.TarInfo("fine.txt"))
        tape.addfile(info, io.BytesIO(b"x"))


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/tmp/evil", "a\\..\\evil"])
@pytest.mark.parametrize("write", [write_zip, write_tar])
def test_nothing_is_written_outside(tmp_path, write, name):
    write(tmp_path / "a", name)
    with pytest.raises(TrainerError, match=r"a\.zip: .* would be written outside"):
        unpack(tmp_path / "a", tmp_path / "out/in", "a.zip")
    assert left(tmp_path) == ["a"]
    assert not Path("/tmp/evil").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(tmp_path, kind):
    write_tar(tmp_path / "a", "images", kind, "/etc")
    with pytest.raises(TrainerError, match="'images' is a link or a device"):
        unpack(tmp_path / "a", tmp_path / "out", "a.tgz")
    write_zip(tmp_path / "b", "images", 0o120777, b"/etc")
    with pytest.raises(TrainerError, match="'images' is a link or a device"):
        unpack(tmp_path / "b", tmp_path / "out", "b.zip")
    assert left(tmp_path) == ["a", "b"]


def test_what_would_fill_the_disk_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "_SMALL", 1 << 20)  # a GiB of zeros takes a while
    write_zip(tmp_path / "a", "zeros", content=bytes(8 << 20))
    assert (tmp_path / "a").stat().st_size < 1 << 16
    with pytest.raises(TrainerError, match="bytes would become 8388612"):
        unpack(tmp_path / "a", tmp_path / "out", "a.zip")
    assert left(tmp_path) == ["a"]


def test_files_of_an_archive_are_not_executable(tmp_path):
    write_zip(tmp_path / "a", "run.sh", 0o100755, b"#!/bin/sh\n")
    write_tar(tmp_path / "b", "run.sh")
    for name in ("a", "b"):
        unpack(tmp_path / name, tmp_path / f"out-{name}", name)
        assert not os.access(tmp_path / f"out-{name}/run.sh", os.X_OK)
