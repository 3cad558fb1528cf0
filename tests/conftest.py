"""Runs the real `clusterctl` as a user would; every test has its own records, folder and job name."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.config import auto_port

ROOT = Path(__file__).parents[1]
_JOB_NUMBERS = itertools.count(1)


class Clusterctl:
    """The command line in one folder, with its own records."""

    def __init__(self, folder):
        self.folder = folder
        self.env = {**os.environ, "CLUSTERCTL_STATE_DIR": str(folder / "records"), "COLUMNS": "120"}
        self.env.pop("OMP_NUM_THREADS", None)

    def start(self, *arguments, **options):
        return subprocess.Popen(
            [sys.executable, "-m", "cluster", *arguments],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # A shell starts what stands in the background with SIGINT ignored; the tests send one all the same.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            **options,
        )

    def run(self, *arguments, timeout_s=120):
        with self.start(*arguments) as process:
            try:
                text, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise AssertionError(f"{arguments} did not end: {process.communicate()[0]}") from None
        return process.returncode, text

    def wait_for(self, job, text, node="node-0", timeout_s=90):
        """Wait until a node's log has `text`."""
        log = self.folder / "runs" / job / "attempt-1" / f"{node}.log"
        until = time.time() + timeout_s
        while time.time() < until:
            if log.exists() and text in log.read_text():
                return
            time.sleep(0.1)
        raise AssertionError(f"{text!r} never came in {log}: {log.read_text() if log.exists() else 'no log'}")


def processes_of(job):
    """The pids of everything on this machine that belongs to a job, found independently of the launcher."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"CLUSTER_JOB_ID=" + job.encode() in variables:
                found.append(int(folder.name))
    return found


@pytest.fixture(scope="session")
def worker(worker_id):
    """The number of this process among those of `pytest -n`: 0, 1, ..."""
    return 0 if worker_id == "master" else int(worker_id.removeprefix("gw"))


@pytest.fixture
def job_name(worker):
    """A job's name that no other test uses, of this run or of another one on this machine.

    The master's port derives from it (`auto_port`); each worker has a range of ports of its own.
    """
    names = (f"ct-{os.getpid()}-{number}" for number in _JOB_NUMBERS)
    return next(name for name in names if auto_port(name) // 1000 % 10 == worker % 10)


@pytest.fixture
def clusterctl(tmp_path):
    return Clusterctl(tmp_path)
