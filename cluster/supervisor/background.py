"""A supervisor in the background: one process for a job, which outlives the terminal and the login of its launch.

`leave_behind` starts it, and `run` is its main function (`clusterctl supervise`). It holds the job's lock in the job
store (`JobStore.supervise`), so at any time one process decides; `attach` and `wait` only display the job meanwhile. It
ends with the job. Slurm jobs have none: Slurm requeues them itself, also while the launching machine is off, and login
nodes end processes that stay behind.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from cluster.backends import BACKENDS
from cluster.errors import UnreachableError, with_hint
from cluster.spec.model import JobRecord
from cluster.store import JobStore
from cluster.supervisor import attempt_monitor, display, job_end, notes
from cluster.supervisor.supervisor import Supervisor
from cluster.transport import inside

#: Runs `clusterctl` from the same files as this process, and not from a folder `cluster` of the current directory.
_PROGRAM = """
import sys
if not sys.path[0]:
    sys.path.pop(0)
if {root!r} not in sys.path:
    sys.path.insert(0, {root!r})
from cluster.cli.main import main
main()
""".format(root=str(Path(__file__).parents[2]))
_POLL_S = 0.05
#: Time between two tries to reach machines that do not answer.
_RETRY_S = 10.0
#: Time between two notes that they do not answer.
_NOTE_EVERY_S = 3600.0


def leave_behind(record: JobRecord, records: JobStore, secrets: Mapping[str, str]) -> str:
    """Start a supervisor for a running job, unless a process supervises it. Return why there is none, or "".

    The process gets the values of `secrets` through a pipe.
    """
    plan = record.plan
    if BACKENDS[plan.backend].requeues or records.supervisor_of(plan.job_id):
        return ""
    argv = [sys.executable, "-c", _PROGRAM, "supervise", plan.job_id]
    try:
        with inside.open_file(plan.run_dir, notes.NAME, "ab") as log:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        assert process.stdin
        # The pipe breaks if the process has exited already. Its exit code says whether that is wrong.
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(json.dumps(dict(secrets)).encode())
    except OSError as error:
        return f"{error.filename or 'the supervisor'}: {error.strerror}"
    while not records.supervisor_of(plan.job_id):
        if process.poll() is not None:
            if process.returncode == 0:  # the job ended, or another process supervises it
                return ""
            last = (notes.Reader(plan).lines() or ["it printed no reason"])[-1]
            return f"it exited with {process.returncode}: {last} (all of {notes.path(plan)})"
        time.sleep(_POLL_S)
    return ""


def run(job_id: str, records: JobStore, secrets: Mapping[str, str]) -> None:
    """Supervise a job to its end, and finish it as a launcher does; return at once if another process supervises it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with records.supervise(job_id, in_background=True) as is_supervisor:
        if is_supervisor:
            _supervise(job_id, records, secrets)


def _supervise(job_id: str, records: JobStore, secrets: Mapping[str, str]) -> None:
    noted_at = -math.inf
    while not (record := records.load(job_id)).outcome:
        try:
            attempt, _ = Supervisor(record, records, display.Display(), secrets).supervise()
        except UnreachableError as error:
            if time.monotonic() - noted_at > _NOTE_EVERY_S:
                noted_at = time.monotonic()
                notes.add(
                    record.plan,
                    f"{with_hint(error.message, error.hint)}; trying again until the job is stopped",
                )
            until = time.monotonic() + _RETRY_S
            while time.monotonic() < until and not records.load(job_id).outcome:
                time.sleep(attempt_monitor.POLL_S)
            continue
        # `stop` itself cleans up, and waits for the end of this process.
        if records.load(job_id).outcome != "stopped":
            _, problems = job_end.finish(attempt, records)
            notes.add(attempt.plan, *problems)
        return
