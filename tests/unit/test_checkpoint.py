import dataclasses
import errno
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer import contract
from trainer.config import Settings
from trainer.engine import checkpoints
from trainer.errors import TrainerError
from trainer.models.yolo import build_yolo, load_cfg
from trainer.weights import checkpoint_file

CONTENT: dict[str, Any] = {
    "format": checkpoint_file.FORMAT,
    "epoch": 3,
    "step": 30,
    "names": ["a", "b"],
    "imgsz": 64,
}
CONTENT |= {
    "model": {"w": torch.ones(2)},
    "ema": {"w": torch.zeros(2)},
    "hyp": {"lr0": 0.01},
    "cfg": {"nc": 2},
}
CONTENT["optimizer"] = {"state": {}, "param_groups": []}


class Trap:
    """Writes a file when it is unpickled the careless way."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("sprung",))


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    checkpoint_file.save(path, CONTENT)
    back = checkpoint_file.load(str(path))
    assert (back["epoch"], back["names"], back["model"]["w"].tolist()) == (3, ["a", "b"], [1, 1])
    with pytest.raises((AttributeError, pickle.PicklingError, TypeError)):
        checkpoint_file.save(path, {**CONTENT, "extra": lambda: None})
    assert checkpoint_file.load(str(path))["epoch"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


@pytest.fixture
def before_each_file_operation() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Calls a function before each rename, link, copy, open and removal of a file, until the test ends."""
    called: list[Callable[[], None]] = []

    def hook(event: str, _arguments: tuple[Any, ...]) -> None:
        if called and event in ("open", "os.rename", "os.link", "os.remove", "shutil.copyfile"):
            function = called.pop()  # which opens files, too
            function()
            called.append(function)

    sys.addaudithook(hook)  # for the life of the process
    yield called.append
    called.clear()


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_reader_finds_whole_checkpoints_at_every_moment_of_a_save(
    hard_links: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before_each_file_operation: Callable[[Callable[[], None]], None],
) -> None:
    """What is on the disk before an operation is also what a kill at that moment leaves."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not hard_links:
        monkeypatch.setattr(os, "link", refuse)
    last = tmp_path / "last.pt"
    previous = tmp_path / "previous.pt"
    for step in (1, 2):
        checkpoint_file.save(last, {**CONTENT, "step": step}, previous)
    steps: list[tuple[int, ...]] = []

    def look() -> None:
        steps.append(tuple(checkpoint_file.load(str(path))["step"] for path in (previous, last)))

    before_each_file_operation(look)
    checkpoint_file.save(last, {**CONTENT, "step": 3}, previous)
    look()
    assert list(dict.fromkeys(steps)) == [(1, 2), (2, 2), (2, 3)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.pt", "previous.pt"]


def test_a_save_after_a_kill_between_the_renames_leaves_no_third_file(tmp_path: Path) -> None:
    last = tmp_path / "last.pt"
    previous = tmp_path / "previous.pt"
    checkpoint_file.save(last, CONTENT)
    os.link(last, previous)
    checkpoint_file.save(last, {**CONTENT, "step": 31}, previous)
    assert [checkpoint_file.load(str(path))["step"] for path in (previous, last)] == [30, 31]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last.pt", "previous.pt"]


def bytes_read() -> int:
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


def test_the_newest_of_two_checkpoints_is_found_without_reading_their_tensors(tmp_path: Path) -> None:
    size = 32 << 20
    values = {"w": torch.ones(size // 4)}
    for step, name in ((5, "last.pt"), (6, "previous.pt")):  # an older last.pt, as after a torn write
        checkpoint_file.save(
            tmp_path / name, {**CONTENT, "model": values, "step": step, "settings": {"imgsz": 64}}
        )
    before = bytes_read()
    given = Settings(data="", resume=str(tmp_path))
    assert checkpoints.settings_of(given, frozenset()).imgsz == 64
    assert bytes_read() - before < size / 8
    before = bytes_read()
    found, _ = checkpoints.newest(tmp_path)
    assert 2 * size <= bytes_read() - before < 2.5 * size  # once for its sums, once for its tensors
    assert found is not None
    assert (found["step"], found["model"]["w"].sum().item()) == (6, size // 4)


def test_a_checkpoint_of_a_version_with_fewer_hyper_parameters_is_resumed() -> None:
    settings = Settings(data="d.yaml")
    saved = dataclasses.asdict(settings)
    del saved["hyp"]["backbone_lr"], saved["hyp"]["clip_norm"]
    content = {"settings": saved, "data": "", "cfg": {"nc": 2}}
    checkpoints.check_same(content, settings, "", {"nc": 2})
    saved["hyp"]["lr0"] = 0.5
    with pytest.raises(TrainerError, match="lr0"):
        checkpoints.check_same(content, settings, "", {"nc": 2})


def test_a_checkpoint_with_damaged_tensors_gives_way_to_the_one_before(tmp_path: Path) -> None:
    for step, name in ((5, "previous.pt"), (6, "last.pt")):
        checkpoint_file.save(tmp_path / name, {**CONTENT, "step": step, "settings": {}})
    with zipfile.ZipFile(tmp_path / "last.pt") as file:
        records = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(tmp_path / "last.pt", "w") as file:
        for name, data in records.items():
            file.writestr(name, data[:2] if "/data/" in name else data)
    found, _ = checkpoints.newest(tmp_path)
    assert found is not None
    assert found["step"] == 5


def test_a_changed_block_of_a_tensor_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"w": torch.ones(1 << 14)}
    for step, name in ((5, "previous.pt"), (6, "last.pt")):
        checkpoint_file.save(tmp_path / name, {**CONTENT, "model": values, "step": step, "settings": {}})
    last = tmp_path / "last.pt"
    content = bytearray(last.read_bytes())
    begin = content.index(values["w"].numpy().tobytes()) + 8192
    content[begin : begin + 4096] = os.urandom(4096)
    last.write_bytes(content)
    with pytest.raises(
        TrainerError, match=r"last\.pt: the file is damaged: the sum of archive/data/\d+ is wrong"
    ):
        checkpoint_file.load(str(last))
    found = checkpoints.newest_of_all(tmp_path)
    assert found is not None
    assert (found["step"], found["model"]["w"].sum().item()) == (5, 1 << 14)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {last}: the file is damaged")
    (tmp_path / "previous.pt").unlink()
    with pytest.raises(TrainerError, match="cannot be read"):
        checkpoints.newest_of_all(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_truncated_checkpoint_gives_way_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], share: float
) -> None:
    for step, name in ((5, "previous.pt"), (6, "last.pt")):
        checkpoint_file.save(tmp_path / name, {**CONTENT, "step": step, "settings": {}})
    last = tmp_path / "last.pt"
    os.truncate(last, int(share * last.stat().st_size))
    found = checkpoints.newest_of_all(tmp_path)
    assert found is not None
    assert found["step"] == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {last}: not a checkpoint of this trainer")
    assert line.endswith("or damaged; this checkpoint is skipped")


def test_an_incomplete_checkpoint_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ema"):
        checkpoint_file.save(tmp_path / "last.pt", {k: v for k, v in CONTENT.items() if k != "ema"})
    assert not list(tmp_path.iterdir())


def test_foreign_and_hostile_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({**CONTENT, "ema": Trap()}, tmp_path / "trap.pt")
    (tmp_path / "text.pt").write_text("weights")
    (tmp_path / "empty.pt").touch()
    torch.save({"model": 1}, tmp_path / "other.pt")
    torch.save({"format": checkpoint_file.FORMAT + 1, "weights": {}}, tmp_path / "newer.pt")
    with pytest.raises(
        TrainerError, match=f"another version of this trainer, in format {checkpoint_file.FORMAT + 1}"
    ):
        checkpoint_file.load("newer.pt")
    for name in ("trap.pt", "text.pt", "empty.pt", "other.pt", "newer.pt", "none.pt", "."):
        with pytest.raises(TrainerError, match="--weights"):
            checkpoint_file.load(name)
    assert not (tmp_path / "sprung").exists()


def test_weights_for_another_number_of_classes_fill_all_but_the_head() -> None:
    cfg = load_cfg("yolov5n.yaml")
    old = build_yolo(cfg, nc=3)
    new = build_yolo(cfg, nc=5)
    fit, of = checkpoint_file.transfer(new, old.state_dict(), "best.pt")
    assert (fit, of) == (343, 349)
    assert torch.equal(new.state_dict()["model.0.conv.weight"], old.state_dict()["model.0.conv.weight"])
    with pytest.raises(TrainerError, match="tensors fit"):
        checkpoint_file.transfer(build_yolo(load_cfg("yolov5s.yaml"), nc=3), old.state_dict(), "best.pt")


def test_run_folders_count_up(tmp_path: Path) -> None:
    made = [
        checkpoint_file.make_run_dir({}, str(tmp_path / "a" / "runs"), "train", False).name for _ in range(3)
    ]
    assert made == ["train", "train2", "train3"]
    again = checkpoint_file.make_run_dir({}, str(tmp_path / "a" / "runs"), "train", True)
    assert again.name == "train"
    assert not list(again.iterdir())


def test_the_launchers_folder_is_taken_and_must_exist(tmp_path: Path) -> None:
    assert checkpoint_file.make_run_dir({contract.RUN_DIR: str(tmp_path)}, "runs", "train", False) == tmp_path
    with pytest.raises(TrainerError, match="no such folder"):
        checkpoint_file.make_run_dir({contract.RUN_DIR: str(tmp_path / "x")}, "runs", "train", False)


def test_a_folder_that_cannot_be_written_names_both_users() -> None:
    # /proc takes no new files, not even from root.
    for environment, project in (({contract.RUN_DIR: "/proc/self"}, "runs"), ({}, "/proc/self/runs")):
        with pytest.raises(TrainerError) as error:
            checkpoint_file.make_run_dir(environment, project, "train", False)
        assert f"we are uid {os.getuid()}" in error.value.message
        assert "belongs to uid" in error.value.message


@pytest.mark.parametrize(("project", "name"), [("runs\udcff", "train"), ("runs", "\udcfftrain")])
def test_a_run_folder_that_is_not_utf8_is_refused_before_it_is_made(tmp_path, monkeypatch, project, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrainerError, match="not UTF-8"):
        checkpoint_file.make_run_dir({}, project, name, exist_ok=False)
    assert list(tmp_path.iterdir()) == []
