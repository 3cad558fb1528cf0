"""Which of the files that the setup commands name `plan` opens: regular ones of a reasonable size, and no others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: clusterctl in a process that exits with 9 before it opens a file of the first argument, where a read may never end.
GUARDED = """
import os, runpy, sys
refused = sys.argv.pop(1).split(":")
def refuse(event, arguments):
    if event == "open" and os.path.basename(str(arguments[0])) in refused:
        print("opened", arguments[0], flush=True)
        os._exit(9)
sys.addaudithook(refuse)
runpy.run_module("cluster", run_name="__main__")
"""


def plan(folder, setup, refused=()):
    words = ["plan", "--backend", "local", "--name", "job", "--command", "x.py", "--setup", setup]
    argv = [sys.executable, "-c", GUARDED, ":".join(refused), *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        argv,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    os.mkfifo(tmp_path / "install")  # named like a command
    with (tmp_path / "huge").open("w") as huge:
        huge.truncate(1 << 34)
    (tmp_path / "link").symlink_to("/dev/urandom")
    (tmp_path / "data").mkdir()
    (tmp_path / "small.txt").write_text("numpy\n")
    return tmp_path


@pytest.mark.parametrize(
    "setup",
    [
        *("head -c 10 /dev/urandom", "head -c 10 < /dev/urandom", "head -c 10 link", "./link", "cat fifo", "cat <fifo"),
        *("install -d x; fifo", "tar xf huge", "cat /proc/kmsg", "cat data", "ls data/*", "cat nothing", "true"),
        *(f"python3 -c {'x' * 5000}", "cat 'a\x01b'", "cat \udce9", "(fifo)", 'x=fifo; cat "$x"'),
    ],
)
def test_a_file_without_an_end_is_never_opened(folder, setup):
    code, text = plan(folder, setup, ["urandom", "link", "fifo", "install", "huge", "kmsg", "data"])
    assert (code, "Traceback" in text) == (0, False), text


def test_a_small_file_is_read(folder):
    assert plan(folder, "pip install -r small.txt", ["small.txt"])[0] == 9
    before = plan(folder, "pip install -r small.txt")[1]
    (folder / "small.txt").write_text("numpy==2\n")
    assert plan(folder, "pip install -r small.txt")[1] != before
