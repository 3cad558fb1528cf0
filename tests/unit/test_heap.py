import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import resource
from trainer.engine.memory import keep_freed_memory

kept = keep_freed_memory()
for _ in range(2):  # the first time, the pages are new
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * (40 << 20) for _ in range(3)]
    del blocks
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(kept, faults)
"""


@pytest.mark.parametrize("variables", [{}, {"MALLOC_ARENA_MAX": "2"}])
def test_freed_memory_is_there_for_the_next_step(variables: dict[str, str]) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**clean, "PYTHONPATH": str(ROOT), **variables},
        text=True,
        capture_output=True,
        check=True,
    )
    kept, faults = done.stdout.split()
    assert kept == str(not variables)
    pages = 3 * (40 << 20) // os.sysconf("SC_PAGE_SIZE")
    if kept == "True":
        assert int(faults) < pages / 100
    else:
        assert int(faults) > pages / 2
