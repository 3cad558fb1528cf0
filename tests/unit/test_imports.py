from pathlib import Path

import pytest

from trainer.config import imports
from trainer.data.registry import open_dataset
from trainer.engine import callbacks
from trainer.errors import TrainerError


def test_a_module_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("class Outer:\n    def inner():\n        return 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [])
    assert imports.load("only_here:Outer.inner", "--data")() == 3


@pytest.mark.parametrize(
    "text", ["digits", "a/b.yaml", "https://a.org/x", "c:\\data", "a:b c", ":b", "a:", "a:b:c", "1:2"]
)
def test_paths_and_addresses_are_no_import_paths(text: str) -> None:
    assert not imports.is_import_path(text)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere.at_all:open", "no module nowhere"),
        ("json:nothing", "json has no nothing"),
        ("json:__all__", "it is a list, not a function or class"),
        ("broken_module:open", "importing broken_module raised ZeroDivisionError: division by zero"),
    ],
)
def test_what_cannot_be_imported_is_an_error_of_the_option(
    path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrainerError) as error:
        imports.load(path, "--data")
    assert error.value.message == f"--data {path}: {said}"


def test_what_is_made_must_be_of_use() -> None:
    with pytest.raises(TrainerError, match="it creates a JSONDecoder"):
        callbacks.load("json:JSONDecoder")
    with pytest.raises(TrainerError, match="no module Callback"):
        callbacks.load("Callback")
    with pytest.raises(TrainerError, match="without names, flips, __len__, size"):
        open_dataset("operator:eq", "train", imgsz=64)
