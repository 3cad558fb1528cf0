"""Fixtures. Without torch, collect only the tests of the launcher: packaging/test.sh runs them on another Python."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None:
    _TRAINER = re.compile(r"^(from|import) (torch|numpy|PIL|playwright|trainer|tests\.unit)\b", re.MULTILINE)
    _tests = Path(__file__).parent.glob("test_*.py")
    collect_ignore = [path.name for path in _tests if _TRAINER.search(path.read_text())]


@pytest.fixture
def run_trainer(monkeypatch, capfd):
    """Return a function that runs `trainer ARGUMENTS` here and returns exit code, stdout and stderr.

    Its ranks are forked.
    """
    from tests.unit.trainer_process import FORKING
    from trainer.__main__ import main

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["trainer", *map(str, arguments)])
        monkeypatch.setattr("trainer.distributed.spawn.subprocess", FORKING)
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, *capfd.readouterr()

    return run
