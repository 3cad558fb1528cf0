"""Jobs whose events and status files do not fit: they are followed, restarted and shown all the same."""

import json

import pytest

from tests.conftest import wait_until
from tests.sessions import Terminal

HUGE = "9" * 400
#: Each of these once ended the launcher, the supervisor, or a command.
LINES = (
    f'{{"event":"progress","time":{HUGE},"node":0}}',
    '{"event":"progress","node":0,"epoch":1,"step":1,"steps":10,"loss":1,"images_per_s":0,"eta_s":Infinity}',
    '{"event":"progress","node":0,"epoch":1,"step":1,"steps":10,"loss":NaN,"images_per_s":0,"eta_s":NaN}',
    '{"event":"progress","node":0,"epoch":1,"step":1,"steps":Infinity}',
    f'{{"event":"metric","node":0,"epoch":1,"map50":{HUGE}}}',
    '{"event":"metric","node":0,"epoch":[1],"map":"high"}',
    '{"event":"progress","node":0,"epoch":"1 of 3","step":1}',
)
STATUSES = (
    {"phase": "running", "heartbeat": 1, "stall": [{}]},
    {"phase": "exited"},
    {"phase": "running", "usage": {"ranks": [{}]}},
)
READY = '{"event":"ready","node":0,"world_size":1,"backend":"gloo","device":"cpu"}'
#: Rank 0 prints the lines, and replaces its status file, until the file `go` exists. Then it exits with its argument.
PROGRAM = f"""
import os, sys, time
for line in {(READY, *LINES)!r}:
    print("::cluster " + line, flush=True)
print("printed", flush=True)
status = os.path.join(os.environ["CLUSTER_RUN_DIR"], "attempt-1", "node-0.json")
statuses, number = {[json.dumps(each) for each in STATUSES]!r}, 0
while not os.path.exists("go"):
    number += 1
    with open(status + ".mine", "w") as file:
        file.write(statuses[number // 20 % len(statuses)] + "\\n")
    os.replace(status + ".mine", status)
    time.sleep(0.05)
sys.exit(int(sys.argv[1]) if os.environ["CLUSTER_ATTEMPT"] == "1" else 0)
"""


@pytest.fixture
def launch(clusterctl):
    """The first words of a launch of the program."""
    (clusterctl.folder / "hostile.py").write_text(PROGRAM)
    return "launch", "--backend", "local", "--device", "cpu", "--nodes", "1"


def test_every_command_shows_a_job_whose_events_do_not_fit(launch, clusterctl, job_name):
    terminal = Terminal(clusterctl, *launch, "--name", job_name, "--command", "hostile.py 0")
    terminal.wait_for("printed", timeout_s=60)
    for words in (
        ["ps"],
        ["ps", "--all"],
        ["status", job_name],
        ["logs", job_name],
        ["top", "--once", job_name],
    ):
        assert "Traceback" not in clusterctl.expect(0, *words)
    assert [row["job"] for row in json.loads(clusterctl.expect(0, "ps", "--json"))] == [job_name]
    assert json.loads(clusterctl.expect(0, "top", "--json", job_name))["progress"]["step"] == 1
    assert json.loads(clusterctl.expect(0, "status", "--json", job_name))["nodes"][0]["node"] == "node-0"
    (clusterctl.folder / "go").touch()
    assert terminal.exit_code(timeout_s=60) == 0, terminal.text
    assert "done in" in terminal.text
    folder = clusterctl.folder / "runs" / job_name
    assert wait_until((folder / "report.html").exists)
    log = (folder / "attempt-1" / "node-0.log").read_text()
    assert "agent: rank 0: ignored values of events: time of progress (1), eta_s of progress (2)" in log


def test_a_failed_job_is_restarted_although_its_last_epoch_is_no_number(launch, clusterctl, job_name):
    (clusterctl.folder / "go").touch()
    text = clusterctl.expect(
        0, *launch, "--name", job_name, "--max-restarts", "1", "--command", "hostile.py 1"
    )
    assert "restart 1 of 1" in text, text
    assert "attempt 2 on node-0" in text, text


def test_what_a_node_says_cannot_control_the_terminal(clusterctl, job_name):
    """The interpreter's error has sequences that set the clipboard and the title, and that clear the screen."""
    (clusterctl.folder / "hostile.py").touch()
    python = clusterctl.folder / "python"
    sequences = r"\033]52;c;cm0=\007\033]0;title\033\\\033[2J\302\2332J"
    python.write_text(f"#!/bin/sh\nprintf 'no such {sequences}interpreter\\n' >&2\nexit 1\n")
    python.chmod(0o755)
    words = ["launch", "--backend", "local", "--device", "cpu", "--nodes", "1", "--name", job_name]
    terminal = Terminal(clusterctl, *words, "--python", str(python), "--command", "hostile.py")
    assert terminal.exit_code(timeout_s=60) == 1, terminal.text
    shown = [terminal.text]
    for words in (["status", job_name], ["ps", "--all"], ["attach", job_name]):
        again = Terminal(clusterctl, *words)
        again.exit_code(timeout_s=60)
        shown.append(again.text)
    assert "no such interpreter" in shown[0]
    assert "no such interpreter" in shown[1]
    for text in shown:
        for sequence in ("\x1b]", "\x1b[2J", "\x9b"):
            assert sequence not in text, text
