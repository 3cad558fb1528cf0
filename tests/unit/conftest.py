"""Without torch, collect only the tests of the launcher: packaging/test.sh runs them on a second version of Python."""

import re
from importlib.util import find_spec
from pathlib import Path

if find_spec("torch") is None:
    _TRAINER = re.compile(r"^(from|import) (torch|numpy|PIL|trainer|tests\.unit)\b", re.MULTILINE)
    _tests = Path(__file__).parent.glob("test_*.py")
    collect_ignore = [path.name for path in _tests if _TRAINER.search(path.read_text())]
