"""Label cache: one result for all processes, invalidated by every change."""

import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.unit.trainer_process import PIPE, Forked
from tests.unit.yolo_folder import make_yolo_set
from trainer.data.formats.label_cache import FOLDER
from trainer.data.formats.yolo import Yolo
from trainer.data.registry import open_dataset

# Opens a dataset after a line on stdin; prints the number of files opened and of labels, and the cache file.
READER = """
import os, sys
opened = []
sys.addaudithook(lambda event, args: event == "open" and opened.append(str(args[0])))
from trainer.data.formats.yolo import Yolo
input()
data = Yolo(sys.argv[1], "train")
root = os.path.dirname(sys.argv[1])
files = sum(name.startswith(root) and name.endswith((".txt", ".jpg")) for name in opened)
print(files, sum(len(data.labels(k)) for k in range(len(data))), data._scan.file)
"""


def read_at_once(path: Path, *environments: dict[str, str]) -> list[list[str]]:
    """Open the dataset in one process per environment at the same time; return the words that each prints."""
    readers = [
        Forked(
            [sys.executable, "-c", READER, str(path)],
            env={**os.environ, **environment},
            stdin=PIPE,
            stdout=PIPE,
        )
        for environment in environments
    ]
    for reader in readers:
        assert reader.stdin
        reader.stdin.write("\n")
        reader.stdin.flush()
    return [reader.communicate(timeout=240)[0].split() for reader in readers]


def scans(folder: Path) -> list[Path]:
    return list(folder.rglob("labels-*"))


def test_concurrent_processes_read_the_labels_once(tmp_path):
    path = make_yolo_set(tmp_path, train=40)
    answers = read_at_once(path, {}, {}, {})
    files = [int(answer[0]) for answer in answers]
    assert sorted(files) == [
        0,
        0,
        26,
    ]  # label files of the two thirds that have one; other processes decode images
    assert {answer[1] for answer in answers} == {"39"}
    (scan,) = scans(tmp_path)
    assert {answer[2] for answer in answers} == {str(scan)}
    assert not list(tmp_path.rglob(".draft-*"))


def test_concurrent_nodes_share_one_cache_on_a_shared_disk(tmp_path):
    path = make_yolo_set(tmp_path / "shared", train=40)
    machines = []
    for number in range(2):  # locks are per node: another lock folder is another node
        (tmp_path / str(number)).mkdir()
        machines.append({"TMPDIR": str(tmp_path / str(number))})
    answers = read_at_once(path, *machines)
    assert {answer[1] for answer in answers} == {"39"}
    (scan,) = scans(tmp_path)
    assert {answer[2] for answer in answers} == {str(scan)}


def test_the_cache_is_invalidated_by_a_changed_label(tmp_path):
    path = make_yolo_set(tmp_path)
    assert len(open_dataset(str(path), "train", imgsz=64).labels(1)) == 1
    label = tmp_path / "labels/train/001.txt"
    assert read_at_once(path, {})[0][0] == "0"
    before = label.stat()
    label.write_text("1 0.3 0.5 0.2 0.4\n")  # of the same size
    os.utime(label, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert open_dataset(str(path), "train", imgsz=64).labels(1)[0, 0] == 1
    label.unlink()
    assert len(open_dataset(str(path), "train", imgsz=64).labels(1)) == 0
    (tmp_path / "images/train/003.jpg").unlink()
    assert len(open_dataset(str(path), "train", imgsz=64)) == 3


def test_the_number_of_classes_invalidates_the_cache(tmp_path):
    path = make_yolo_set(tmp_path)
    (tmp_path / "labels/train/001.txt").write_text("2 0.5 0.5 0.1 0.1\n")
    assert len(Yolo(str(path), "train", allow_bad_labels=True).labels(1)) == 0
    path.write_text(path.read_text().replace("[cat, dog]", "[cat, dog, eel]").replace("nc: 2", "nc: 3"))
    assert len(Yolo(str(path), "train").labels(1)) == 1


def test_faults_are_cached(tmp_path):
    path = make_yolo_set(tmp_path)
    (tmp_path / "labels/train/001.txt").write_text(
        "9 0.5 0.5 0.1 0.1\n0 0.5 0.5 0.1 0.1\n0 0.5 0.5 0.1 0.1\n"
    )
    first = Yolo(str(path), "train", allow_bad_labels=True).faults
    assert [(fault.line, fault.warning) for fault in first if fault.line] == [(1, False), (3, True)]
    assert Yolo(str(path), "train", allow_bad_labels=True).faults == first


def test_a_damaged_cache_is_rebuilt(tmp_path):
    path = make_yolo_set(tmp_path)
    open_dataset(str(path), "train", imgsz=64)
    (scan,) = scans(tmp_path)
    scan.write_bytes(scan.read_bytes()[:100])
    assert len(open_dataset(str(path), "train", imgsz=64).labels(2)) == 2
    assert scans(tmp_path) == [scan]
    assert scan.stat().st_size > 100


def blocked(root: Path) -> Path:
    """A dataset in a folder where even root cannot create a cache: a file has its name."""
    path = make_yolo_set(root / "set")
    (root / "set" / FOLDER).write_text("")
    return path


def read_only(root: Path) -> Path:
    """A dataset in a folder without write bits."""
    path = make_yolo_set(root / "set")
    path.parent.chmod(0o555)
    return path


@pytest.mark.parametrize("make", [blocked, read_only])
def test_a_read_only_dataset_is_cached_in_the_users_folder(make, monkeypatch, tmp_path):
    path = make(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    open_dataset(str(path), "train", imgsz=64)
    (scan,) = scans(tmp_path)
    assert scan.is_relative_to(tmp_path / "cache/clusterctl")
    assert read_at_once(path, {})[0] == ["0", "3", str(scan)]
    path.parent.chmod(0o755)


def test_a_job_caches_a_read_only_dataset_in_the_folder_of_the_node(monkeypatch, tmp_path):
    """Where it outlives the container, and serves the next job."""
    path = read_only(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for job in ("first", "second"):
        monkeypatch.setenv("CLUSTER_RUN_DIR", str(tmp_path / "runs" / job))
        monkeypatch.setenv("CLUSTER_CACHE_DIR", str(tmp_path / "runs/.cache"))
        open_dataset(str(path), "train", imgsz=64)
        (scan,) = scans(tmp_path)
        assert scan.is_relative_to(tmp_path / "runs/.cache")
    path.parent.chmod(0o755)


def test_a_dataset_opens_without_a_writable_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").write_text("")
    data = open_dataset(str(blocked(tmp_path)), "train", imgsz=64)
    assert len(data.labels(2)) == 2
    assert len(pickle.loads(pickle.dumps(data)).labels(2)) == 2


def test_a_worker_maps_the_labels_instead_of_copying_them(tmp_path):
    data = open_dataset(str(make_yolo_set(tmp_path, train=300)), "train", imgsz=64)
    sent = pickle.dumps(data)
    assert len(sent) < 1000
    other = pickle.loads(sent)
    np.testing.assert_array_equal(other.labels(2), data.labels(2))
    assert Path(other.name(299)) == Path(data.name(299))
    with pytest.raises(ValueError, match="read-only"):
        other.labels(2)[0, 0] = 7


def test_a_dataset_can_be_moved_with_its_cache(tmp_path):
    make_yolo_set(tmp_path / "a")
    open_dataset(str(tmp_path / "a/data.yaml"), "train", imgsz=64)
    (tmp_path / "a").rename(tmp_path / "b")
    (scan,) = scans(tmp_path)
    assert read_at_once(tmp_path / "b/data.yaml", {})[0] == ["0", "3", str(scan)]
    assert open_dataset(str(tmp_path / "b/data.yaml"), "train", imgsz=64).image(2).shape == (48, 80, 3)


def test_old_scans_are_removed(tmp_path):
    path = make_yolo_set(tmp_path)
    label = tmp_path / "labels/train/001.txt"
    for k in range(12):
        label.write_text(f"0 0.5 0.5 0.{k + 10} 0.1\n")
        open_dataset(str(path), "train", imgsz=64)
    assert len(scans(tmp_path)) == 8
    assert open_dataset(str(path), "train", imgsz=64).labels(1)[0, 3] == np.float32(0.21)
