"""`trainer yolo` without the package: its arguments, devices and batches, its checkpoints' headers, and its absence."""

import io
import pickle
import subprocess
import sys
import zipfile

import pytest

from tests.conftest import ROOT
from trainer.errors import TrainerError
from trainer.ultralytics import copies, data, package
from trainer.ultralytics.arguments import check_batch, device_text, parse, wanted_device

DEFAULTS = {"exist_ok": False, "epochs": 100, "data": None, "batch": 16}


def test_words_are_read_as_after_yolo():
    found = parse(
        ["detect", "train", "data=a=b.yaml", "--epochs=3", "exist_ok", "batch=8,", "epochs=4"], DEFAULTS
    )
    assert found.task == "detect"
    assert found.values == {"data": "a=b.yaml", "epochs": "4", "exist_ok": "True", "batch": "8"}
    assert parse(["mode=train", "task=pose"], DEFAULTS).task == "pose"
    assert parse(["train"], DEFAULTS).task == ""


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        ("", "no mode", "yolo detect train"),
        ("detect", "no mode", "yolo detect train"),
        ("detect val model=best.pt", "only `train` runs on several machines", "yolo val model="),
        ("export", "only `train`", "yolo export"),
        ("mode=tune", "no such mode", "yolo detect train"),
        ("semantic train", "yolo semantic train: not a task", "detect, segment, classify, pose and obb"),
        ("train epochs", "epochs has no value", "epochs=VALUE"),
        ("train epochs=", "epochs= has no value", "yolo detect train"),
        ("detct train", "detct: no such argument", "did you mean detect?"),
        ("train = 3", "=", "for example"),
    ],
)
def test_other_words_are_errors(words, what, hint):
    with pytest.raises(TrainerError) as error:
        parse(words.split(), DEFAULTS)
    assert what in error.value.message
    assert hint in error.value.hint


def test_a_batch_is_divided_among_the_ranks():
    for batch, ranks in ((16, 4), (4, 4), (-1, 1), (0.7, 1), (5, 1)):
        check_batch(batch, ranks)
    for batch, hint in (
        (-1, "batch=64"),
        (0.7, "batch=64"),
        (0, "batch=64"),
        (6, "use 4 or 8"),
        (3, "use 4"),
    ):
        with pytest.raises(TrainerError) as error:
            check_batch(batch, 4)
        assert hint in error.value.hint


def test_the_device_is_that_of_the_launch():
    assert wanted_device("", "cuda", 2) == "cuda"
    assert wanted_device("0,1", "cuda", 2) == "0,1"
    assert wanted_device("cpu", "cpu", 2) == "cpu"
    assert wanted_device("1", "", 0) == "1"
    assert [device_text(value) for value in (None, 0, [0, 1], "0, 1", "cpu")] == [
        "",
        "0",
        "0,1",
        "0,1",
        "cpu",
    ]
    for given, launched, what in (
        ("0,1", "cuda", "names 2 GPUs, but this node has 4 ranks"),
        ("0", "cuda", "names 1 GPU, but"),
        ("cpu", "cuda", "was launched with --device cuda"),
        ("0,1,2,3", "cpu", "was launched with --device cpu"),
    ):
        with pytest.raises(TrainerError, match=what):
            wanted_device(given, launched, 4)


@pytest.fixture
def versions(monkeypatch):
    """Return a function that lets a version of the package be installed."""
    return lambda text: monkeypatch.setattr(package.importlib.metadata, "version", lambda _: text)


def test_versions_of_other_lines_are_refused(versions):
    for version in ("8.3.253", "8.3.300", "8.4.0", "8.4.999"):
        versions(version)
        assert package.check_version() == version
    for version in ("8.3.252", "8.2.103", "8.5.0", "9.0.0"):
        versions(version)
        with pytest.raises(TrainerError, match=r"only 8\.3\.253 to 8\.4") as error:
            package.check_version()
        assert "--setup" in error.value.hint


def test_without_the_package_the_error_says_how_to_install_it(tmp_path):
    words = [sys.executable, "-m", "trainer", "yolo", "train", "data=coco8.yaml"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    first, second = done.stderr.splitlines()
    assert first == "error: yolo: the package ultralytics is not installed here"
    assert "clusterctl launch --setup 'pip install " in second


def test_a_desktops_opencv_that_cannot_be_loaded_gives_way_to_another(tmp_path):
    """As in a slim container image: the first on the path needs libraries that are missing."""
    first = tmp_path / "cv2"
    first.mkdir()
    (first / "__init__.py").write_text(
        "import sys\n"
        "if hasattr(sys, 'OpenCV_LOADER'):\n    raise ImportError('recursion')\n"  # as OpenCV's own loader
        "sys.OpenCV_LOADER = True\n"
        f"sys.path = [path for path in sys.path if path != {str(tmp_path)!r}]\n"
        "raise ImportError('libGL.so.1: cannot open shared object file')\n"
    )
    program = (
        "from trainer.ultralytics.package import load_opencv; load_opencv(); import cv2; print(cv2.imread)"
    )
    words = [sys.executable, "-c", program]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert "built-in function imread" in done.stdout, done.stderr


def write_checkpoint(path, content):
    """Write a file as torch.save does, with any objects."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content))


class Command:
    """An object whose unpickling would run a command."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return io.open, (str(self.path), "w")


def test_the_header_of_a_checkpoint_is_read_without_running_it(tmp_path):
    path = tmp_path / "last.pt"
    table = {"epoch": [1, 2], "time": [0.5, 1.0]}
    write_checkpoint(path, {"epoch": 1, "ema": Command(tmp_path / "ran"), "train_results": table})
    assert copies.header_of(path) == {"epoch": 1, "train_results": table}
    assert not (tmp_path / "ran").exists()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert copies.header_of(path) is None  # torn
    path.write_bytes(whole.replace(b"train_results", b"train_resultz"))
    assert copies.header_of(path) is None  # its checksum is wrong
    write_checkpoint(path, {"epoch": -1})
    assert copies.header_of(path) is None  # of a finished run
    assert copies.header_of(tmp_path / "none.pt") is None


def test_a_run_is_restored_from_the_copies(tmp_path):
    (tmp_path / "last.pt").write_bytes(b"last")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "last.pt").write_bytes(b"torn")
    results = tmp_path / "results.csv"
    header = {"epoch": 1, "train_results": {"epoch": [1, 2], "time": [0.5, 1.0]}}
    copies.restore(tmp_path, results, header)
    assert results.read_text() == "epoch,time\n1,0.5\n2,1.0\n"  # on a machine that is new
    assert (tmp_path / "weights" / "last.pt").read_bytes() == b"last"
    results.write_text(
        "epoch,time\n1,5\n2,6\n3,7\n"
    )  # killed between the table and the checkpoint of epoch 3
    copies.restore(tmp_path, results, header)
    assert results.read_text() == "epoch,time\n1,5\n2,6\n"


def test_a_dataset_that_is_not_on_the_node_is_an_error(tmp_path):
    (tmp_path / "images" / "train").mkdir(parents=True)
    file = tmp_path / "data.yaml"
    file.write_text("path: .\ntrain: images/train\nval: images/val\nnames: [a]\n")
    with pytest.raises(TrainerError, match="the val images are not on this node"):
        data.check(str(file))
    (tmp_path / "images" / "val").mkdir()
    data.check(str(file))
    with data.beside(str(file)):
        assert data.Path.cwd() == tmp_path
    assert data.Path.cwd() != tmp_path
    data.check("coco8.yaml")  # a name, which the package knows
    with pytest.raises(TrainerError, match="no such file or folder on this node"):
        data.check(f"{tmp_path}/none")
