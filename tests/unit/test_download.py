import hashlib
import multiprocessing
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_fetch_data import Handler, Server
from trainer.errors import TrainerError
from trainer.weights import checkpoint_file, download

CONTENT = bytes(range(256)) * 4000
SUM = hashlib.sha256(CONTENT).hexdigest()


class Failing(Handler):
    """Answers with CONTENT; `missing.pt`, `moved.pt` and `cut.pt` are a server's ways to fail."""

    def do_GET(self) -> None:
        if self.path.endswith("missing.pt"):
            self.send_error(404)
        elif self.path.endswith("moved.pt"):
            self.send_response(302)
            self.send_header("Location", "/elsewhere/file.pt")
            self.end_headers()
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT[:1000])
            if not self.path.endswith("cut.pt"):
                time.sleep(0.2)  # long enough for every other rank to come and see the lock
                self.wfile.write(CONTENT[1000:])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path, Failing) as made:
        yield made
        made.shutdown()


@pytest.fixture
def environment(server: Server, tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), download.MIRROR: f"{server.address}/v7.0"}


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


def test_a_name_is_fetched_once(
    server: Server, environment: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = download.locate("yolov5n.pt", environment)
    assert path == tmp_path / "cache" / "clusterctl" / "weights" / "yolov5n.pt"
    assert path.read_bytes() == CONTENT
    assert files(tmp_path) == ["yolov5n.pt"]
    said = capsys.readouterr().out
    assert SUM in said
    assert f"{server.address}/v7.0/yolov5n.pt" in said
    assert download.locate("yolov5n.pt", environment) == path
    assert server.asked == ["/v7.0/yolov5n.pt"]
    assert not capsys.readouterr().out

    path.write_bytes(CONTENT[:-1])
    with pytest.raises(TrainerError, match=f"not {SUM}") as error:
        download.locate(f"yolov5n.pt#sha256={SUM}", environment)
    assert "downloaded again" in error.value.hint


def test_a_file_that_is_there_is_taken(environment: dict[str, str], server: Server, tmp_path: Path) -> None:
    mine = tmp_path / "mine.pt"
    mine.write_bytes(CONTENT)
    assert download.locate(str(mine), environment) == mine
    assert download.locate(f"{mine}#sha256={SUM}", environment) == mine
    with pytest.raises(TrainerError, match=f"has sha256 {SUM}, not 0000"):
        download.locate(f"{mine}#sha256={'0' * 64}", environment)
    with pytest.raises(TrainerError, match="64 hexadecimal digits"):
        download.locate(f"{mine}#sha256=abc", environment)
    by_hand = tmp_path / "cache" / "clusterctl" / "weights" / "yolov5s.pt"
    by_hand.parent.mkdir(parents=True)
    by_hand.write_bytes(CONTENT)
    assert download.locate("yolov5s.pt", environment) == by_hand
    assert server.asked == []


def test_a_job_keeps_weights_in_the_nodes_cache_folder(
    server: Server, environment: dict[str, str], tmp_path: Path
) -> None:
    """Another container of the node, with another home, finds them there."""
    in_job = environment | {"CLUSTER_CACHE_DIR": str(tmp_path / "node")}
    path = download.locate("yolov5n.pt", in_job)
    assert path == tmp_path / "node" / "weights" / "yolov5n.pt"
    assert download.locate("yolov5n.pt", in_job | {"XDG_CACHE_HOME": str(tmp_path / "other")}) == path
    assert server.asked == ["/v7.0/yolov5n.pt"]
    in_image = tmp_path / "cache" / "clusterctl" / "weights" / "yolov5s.pt"
    in_image.parent.mkdir(parents=True)
    in_image.write_bytes(CONTENT)
    assert download.locate("yolov5s.pt", in_job) == in_image
    (tmp_path / "file").touch()
    fallback = download.locate(
        "yolov5m.pt", environment | {"CLUSTER_CACHE_DIR": str(tmp_path / "file" / "cache")}
    )
    assert fallback == in_image.with_name("yolov5m.pt")


def test_an_address_with_a_sum_is_checked_before_it_is_kept(
    server: Server, environment: dict[str, str], tmp_path: Path
) -> None:
    path = download.locate(f"{server.address}/moved.pt#sha256={SUM.upper()}", environment)
    assert path.name == "moved.pt"
    assert path.read_bytes() == CONTENT
    other = download.locate(f"{server.address}/other/moved.pt?version=2#sha256={SUM}", environment)
    assert other.name == "moved.pt"
    assert other != path
    with pytest.raises(TrainerError, match="not kept"):
        download.locate(f"{server.address}/wrong.pt#sha256={'0' * 64}", environment)
    assert files(tmp_path) == ["moved.pt", "moved.pt"]


@pytest.mark.parametrize("name", ["missing.pt", "cut.pt"])
def test_a_failed_fetch_leaves_nothing_and_says_where_the_file_belongs(
    name: str, server: Server, environment: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(TrainerError, match=f"{re.escape(name)}: ") as error:
        download.locate(f"{server.address}/{name}", environment)
    assert str(tmp_path / "cache") in error.value.hint
    assert files(tmp_path) == []


def test_offline_is_an_error_that_names_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(download.MIRROR, "http://127.0.0.1:1")
    with pytest.raises(TrainerError, match=r"cannot be fetched: .*refused") as error:
        checkpoint_file.load("yolov5x6.pt")
    assert str(tmp_path / "clusterctl" / "weights" / "yolov5x6.pt") in error.value.hint
    with pytest.raises(TrainerError, match=r"--weights http://\[bad/x\.pt: .*cannot be fetched"):
        checkpoint_file.load("http://[bad/x.pt")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(TrainerError, match=r"cannot be fetched: .*Not a directory"):
        checkpoint_file.load("yolov5x6.pt")


def test_a_silent_server_has_a_time_limit(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    monkeypatch.setattr(download, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(Failing, "do_GET", lambda self: time.sleep(1))
    with pytest.raises(TrainerError, match=r"timed out"):
        download.locate("yolov5n.pt", environment)


def test_each_size_of_a_family_is_fetched(server: Server, environment: dict[str, str]) -> None:
    for name in ("yolov5x6.pt", "yolov8m.pt", "yolo26s.pt"):
        assert download.locate(name, environment).read_bytes() == CONTENT
    assert server.asked == ["/v7.0/yolov5x6.pt", "/v7.0/yolov8m.pt", "/v7.0/yolo26s.pt"]


def test_an_unknown_name_is_not_downloaded(server: Server, environment: dict[str, str]) -> None:
    assert download.locate("yolov5z.pt", environment) == Path("yolov5z.pt")
    with pytest.raises(TrainerError, match=r"yolov5z.pt: no such file") as error:
        checkpoint_file.load("yolov5z.pt")
    assert "yolov5n.pt, yolov5n6.pt, yolov8n.pt, yolo11n.pt, yolo26n.pt" in error.value.hint
    assert server.asked == []


def fetch_in_process(environment: dict[str, str], found: Any) -> None:
    try:
        found.put(str(download.locate("yolov5m.pt", environment)))
    except TrainerError as error:
        found.put(error.message)


def test_one_of_many_ranks_downloads(server: Server, environment: dict[str, str], tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    ranks = [context.Process(target=fetch_in_process, args=(environment, found)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    answers = [found.get(timeout=120) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert set(answers) == {str(tmp_path / "cache" / "clusterctl" / "weights" / "yolov5m.pt")}
    assert len(server.asked) == 1
