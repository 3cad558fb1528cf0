"""Nodes' scripts that really run, and their statuses from the real polling script."""

import json
import subprocess
from pathlib import Path

from cluster.agent import scripts
from cluster.spec import node_status
from cluster.spec.status import parse
from cluster.transport.local import LocalShell
from tests.conftest import wait_until


def status_of(folder):
    """Return the status of node n0 from the real polling script; `folder` is the attempt's."""
    done = LocalShell().run(scripts.command("poll", str(folder), "n0", "", most=1000))
    assert not done.err
    state, why, agent, _log = done.out.split("\n")[:4]
    return node_status.from_agent("n0", parse(agent), state, why)


def started(folder, node):
    """Start a node's script."""
    script = folder / f"{node}.sh"
    script.write_text("sleep 60 & wait")
    process = subprocess.Popen(["bash", str(script)])
    # Popen returns a moment before the kernel has set the command line, by which the script is found.
    assert wait_until(lambda: str(script).encode() in Path(f"/proc/{process.pid}/cmdline").read_bytes())
    (folder / f"{node}.pid").write_text(str(process.pid))
    return process


def running(tmp_path, **agent):
    """Start a node's script, and write `agent` to its status file."""
    process = started(tmp_path, "n0")
    (tmp_path / "n0.json").write_text(json.dumps(agent) + "\n")
    return process
