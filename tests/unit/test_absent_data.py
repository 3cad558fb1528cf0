"""Labels and images that exist and cannot be read, or are in the wrong folder: nothing becomes background unsaid."""

import ctypes
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.trainer_process import run
from tests.unit.yolo_folder import make_yolo_set
from trainer.cli import app
from trainer.config.faults import BadData, Fault
from trainer.data.registry import open_datasets

# Of linux/capability.h.
CAPABILITIES_V3 = 0x20080522
CAP_DAC_OVERRIDE = 1 << 1
CAP_DAC_READ_SEARCH = 1 << 2


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The folder of a dataset."""
    folder = tmp_path / "data"
    make_yolo_set(folder)
    return folder


@pytest.fixture
def permissions_apply() -> Iterator[None]:
    """Give up root's right to read everything, if these tests run as root. Another user could not enter this folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0)
    before, rights = (
        (ctypes.c_uint32 * 6)(),
        (ctypes.c_uint32 * 6)(),
    )  # twice: effective, permitted, inheritable
    assert libc.capget(header, before) == libc.capget(header, rights) == 0
    rights[0] &= ~(CAP_DAC_OVERRIDE | CAP_DAC_READ_SEARCH)
    assert libc.capset(header, rights) == 0
    yield
    assert libc.capset(header, before) == 0


def checked(folder: Path) -> tuple[list[str], list[str]]:
    """Return the faults and warnings of `trainer data check`."""
    done = CliRunner().invoke(app, ["data", "check", "--data", str(folder / "data.yaml"), "--json"])
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert done.exit_code == (2 if found["faults"] else 0)
    return tuple([text(Fault(**each)) for each in found[kind]] for kind in ("faults", "warnings"))  # type: ignore[return-value]


def trained(folder: Path) -> tuple[list[str], list[str]]:
    """Return the faults that stop a training, and the warnings and omissions that it prints otherwise."""
    path = str(folder / "data.yaml")
    faults = list[Fault]()
    try:
        open_datasets(path, ["train", "val"], imgsz=64)
    except BadData as error:
        faults = error.faults
    sets = open_datasets(path, ["train", "val"], imgsz=64, allow_bad_labels=True)
    found = dict.fromkeys(fault for each in sets for fault in each.faults)  # type: ignore[attr-defined]
    assert [fault for fault in found if not fault.warning] == faults
    return [text(fault) for fault in faults], [text(fault) for fault in found if fault.warning]


def text(fault: Fault) -> str:
    assert fault.hint
    return str(fault)


def images_of(folder: Path) -> list[str]:
    (dataset,) = open_datasets(str(folder / "data.yaml"), ["train"], imgsz=64, allow_bad_labels=True)
    return [Path(dataset.name(k)).name for k in range(len(dataset))]


def dangling_label(root: Path) -> None:
    (root / "labels/train/001.txt").unlink()
    (root / "labels/train/001.txt").symlink_to("/elsewhere/001.txt")


def looping_label(root: Path) -> None:
    (root / "labels/train/001.txt").unlink()
    (root / "labels/train/001.txt").symlink_to("001.txt")


def label_folder(root: Path) -> None:
    (root / "labels/train/001.txt").unlink()
    (root / "labels/train/001.txt").mkdir()


def label_pipe(root: Path) -> None:
    (root / "labels/train/001.txt").unlink()
    os.mkfifo(root / "labels/train/001.txt")


def capital_label(root: Path) -> None:
    (root / "labels/train/001.txt").rename(root / "labels/train/001.TXT")


def dangling_image(root: Path) -> None:
    (root / "images/train/001.jpg").unlink()
    (root / "images/train/001.jpg").symlink_to("/elsewhere/001.jpg")


def image_pipe(root: Path) -> None:
    (root / "images/train/001.jpg").unlink()
    os.mkfifo(root / "images/train/001.jpg")


@pytest.mark.parametrize(
    ("damage", "name", "what"),
    [
        (
            dangling_label,
            "labels/train/001.txt",
            "is a link to /elsewhere/001.txt, which does not exist here",
        ),
        (looping_label, "labels/train/001.txt", "is a link that leads to itself"),
        (label_folder, "labels/train/001.txt", "is a folder, not a file"),
        (label_pipe, "labels/train/001.txt", "is not a file"),
        (capital_label, "labels/train/001.TXT", "the label file of 001 must end in .txt"),
        (
            dangling_image,
            "images/train/001.jpg",
            "is a link to /elsewhere/001.jpg, which does not exist here",
        ),
        (image_pipe, "images/train/001.jpg", "is not a file"),
    ],
)
def test_what_exists_and_cannot_be_followed_is_a_fault_and_no_background(
    data: Path, damage: Callable[[Path], None], name: str, what: str
) -> None:
    damage(data)
    faults, warnings = checked(data)
    assert faults == [f"{data / name}: {what}"]
    assert trained(data) == (faults, warnings)
    assert images_of(data) == ["000.jpg", "002.jpg", "003.jpg"]


def test_a_link_names_what_a_container_has_to_mount(data: Path) -> None:
    dangling_label(data)
    with pytest.raises(BadData) as caught:
        open_datasets(str(data / "data.yaml"), ["train"], imgsz=64)
    assert "--mount" in caught.value.hint


@pytest.mark.parametrize("kind", ["dangling", "loop", "file"])
def test_a_label_folder_that_cannot_be_entered_is_one_fault(data: Path, kind: str) -> None:
    folder = data / "labels/val"
    shutil.rmtree(folder)
    if kind == "file":
        folder.write_text("")
    else:
        folder.symlink_to("/elsewhere" if kind == "dangling" else "val")
    (fault,), _ = checked(data)
    assert fault.startswith(f"{folder}: is a ")
    assert fault.endswith(", so the labels of 2 images cannot be read")
    with pytest.raises(BadData) as caught:
        open_datasets(str(data / "data.yaml"), ["train", "val"], imgsz=64)
    assert [str(each) for each in caught.value.faults] == [fault]


def test_the_parent_of_the_label_folders_may_be_what_is_missing(data: Path) -> None:
    (data / "labels").rename(data / "elsewhere")
    (data / "labels").symlink_to("gone")
    faults, _ = checked(data)
    what = f"{data / 'labels'}: is a link to gone, which does not exist here"
    assert faults == [f"{what}, so the labels of {count} images cannot be read" for count in (4, 2)]


@pytest.mark.usefixtures("permissions_apply")
@pytest.mark.parametrize("name", ["labels/train/001.txt"])
def test_a_file_that_may_not_be_read_is_a_fault(data: Path, name: str) -> None:
    (data / name).chmod(0)
    faults, warnings = checked(data)
    assert len(faults) == 1
    assert faults[0].startswith(f"{data / name}: ")
    assert "Permission denied" in faults[0]
    assert trained(data) == (faults, warnings)


@pytest.mark.usefixtures("permissions_apply")
@pytest.mark.parametrize("mode", [0, stat.S_IXUSR, stat.S_IRUSR])
@pytest.mark.parametrize("name", ["labels/train", "images/train"])
def test_a_folder_that_may_not_be_read_is_a_fault(data: Path, name: str, mode: int) -> None:
    (data / name).chmod(mode)
    faults, _ = checked(data)
    assert faults
    with pytest.raises(BadData) as caught:
        open_datasets(str(data / "data.yaml"), ["train", "val"], imgsz=64)
    assert [str(each) for each in caught.value.faults] == faults


def test_images_without_and_labels_in_another_folder_are_counted(data: Path) -> None:
    (data / "labels/train/001.txt").rename(data / "labels/001.txt")
    (data / "labels/train/002.txt").rename(data / "labels/002.txt")
    shutil.copy(data / "labels/001.txt", data / "labels/train/003.txt")
    faults, warnings = checked(data)
    assert faults == []
    assert warnings == [
        f"{data}/labels/001.txt: label without image in {data}/images (the first of 2)",
        f"{data}/images/train/000.jpg: has no label file, so it counts as background (the first of 3)",
        f"{data}/images/val/000.jpg: has no label file, so it counts as background",
    ]
    assert trained(data) == (faults, warnings)


def test_a_set_in_which_every_image_has_a_label_file_has_no_warning(data: Path) -> None:
    for name in ("train/000", "train/003", "val/000"):
        (data / f"labels/{name}.txt").touch()
    assert checked(data) == ([], [])


def test_images_of_other_formats_are_counted(data: Path) -> None:
    for name in ("a.HEIC", "b.gif", "Thumbs.db"):
        (data / "images/train" / name).touch()
    _, warnings = checked(data)
    assert f"{data}/images/train/a.HEIC: not read as an image (the first of 2)" in warnings
    assert trained(data)[1] == warnings


def test_a_link_to_a_missing_folder_of_images_is_a_fault(data: Path) -> None:
    (data / "images/train/more").symlink_to("/elsewhere/more")
    faults, _ = checked(data)
    assert faults == [f"{data}/images/train/more: is a link to /elsewhere/more, which does not exist here"]


def test_links_in_a_circle_are_followed_once(data: Path) -> None:
    (data / "other").mkdir()
    (data / "images/train/a").symlink_to(data / "other")
    (data / "other/b").symlink_to(data / "images/train")
    assert images_of(data) == ["000.jpg", "001.jpg", "002.jpg", "003.jpg"]


def test_a_missing_image_in_a_list_names_its_line(data: Path) -> None:
    dangling_image(data)
    (data / "list.txt").write_text("images/train/002.jpg\nimages/train/001.jpg\nimages/train\n")
    yaml = data / "data.yaml"
    yaml.write_text(yaml.read_text().replace("train: images/train", "train: list.txt"))
    faults, warnings = checked(data)
    assert faults == [
        f"{data}/list.txt:2: {data}/images/train/001.jpg is a link to /elsewhere/001.jpg, which does not exist here",
        f"{data}/list.txt:3: {data}/images/train is a folder, not a file",
    ]
    assert trained(data) == (faults, warnings)


def test_a_training_prints_the_numbers_of_the_check(data: Path) -> None:
    dangling_label(data)
    (data / "labels/val/001.txt").write_text("9 0.5 0.5 0.1 0.1\n0 0.5 0.5 0.1 0.1\n")
    faults, warnings = checked(data)
    assert (len(faults), len(warnings)) == (2, 2)
    options = (
        "train",
        "--data",
        str(data / "data.yaml"),
        "--epochs",
        "1",
        "--imgsz",
        "64",
        "--device",
        "cpu",
    )
    options += ("--batch", "2", "--workers", "0", "--project", str(data / "runs"))
    refused = run(data, *options, code=2)
    assert refused.stderr.startswith(f"error: 2 faults: {'; '.join(faults)}")
    done = run(data, *options, "--allow-bad-labels", code=0)
    said = [line for line in done.stdout.splitlines() if line.startswith(("left out: ", "warning: "))]
    assert said == [f"left out: {fault}" for fault in faults] + [
        f"warning: {warning}" for warning in warnings
    ]
    assert f"{data / 'data.yaml'}: 2 faults, 2 warnings" in done.stdout
