"""SIGTERM, SIGHUP and Ctrl-C end a command with everything that it has started on this machine."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.conftest import ended, processes_of, wait_until
from tests.contract.sshd import TICKS, inventory

SIGNALS = pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda each: each.name
)

#: A program that does not end by itself. $FOREVER is the name of its process, and of those that must not remain.
FOREVER = "#!/bin/sh\ntouch {begun}\nexec sleep {seconds}\n"
#: rsync whose transfers do not end while the file `block` exists; comparing works.
RSYNC = """#!/bin/sh
case " $* " in *" --dry-run "*) exec {rsync} "$@" ;; esac
[ -e {block} ] || exec {rsync} "$@"
touch {begun}
sleep {seconds}
"""
#: docker without layers that can be read one by one; `save` and `build` do not end.
DOCKER = """#!/bin/sh
case "$*" in
"version"*) echo version 27.5.1 ;;
"info"*) printf 'platform linux/x86_64\\ndriver vfs []\\nroot /var/lib/docker\\n' ;;
"image inspect"*) {image} ;;
"save"* | "build"*) touch {begun}; sleep {seconds} ;;
esac
"""


class Machine:
    """This machine with programs of the test, in front of nodes behind a real sshd."""

    def __init__(self, clusterctl, sshd):
        self.clusterctl = clusterctl
        self.sshd = sshd
        self.begun = clusterctl.folder / "begun"
        self.block = clusterctl.folder / "block"
        #: The argument of `sleep`: no other process of this machine has it.
        self.seconds = f"{100000 + os.getpid()}"
        (clusterctl.folder / "bin").mkdir()
        (clusterctl.folder / "tmp").mkdir()
        self._path = clusterctl.env["PATH"]
        clusterctl.env |= {
            "PATH": f"{clusterctl.folder / 'bin'}:{self._path}",
            "TMPDIR": str(clusterctl.folder / "tmp"),
        }
        inventory(clusterctl.folder, sshd, clusterctl.folder / "remote", runtime="docker")

    def program(self, folder, name, text, **values):
        values |= {"begun": self.begun, "block": self.block, "seconds": self.seconds}
        (folder / name).write_text(text.format(**values))
        (folder / name).chmod(0o755)

    def here(self, name, text, **values):
        self.program(self.clusterctl.folder / "bin", name, text, **values)

    def remains(self):
        """Return the command lines of processes that do not end by themselves."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
            except OSError:
                continue
            if self.seconds.encode() in words:
                found.append(words)
        return found


@pytest.fixture
def machine(clusterctl, sshd):
    made = Machine(clusterctl, sshd)
    made.here("rsync", RSYNC, rsync=_which("rsync"))
    made.here("docker", DOCKER, image="echo image sha256:1234 1000 []")
    made.program(sshd.bin(), "docker", DOCKER, image="exit 1")
    yield made
    for process in map(int, (folder.name for folder in Path("/proc").iterdir() if folder.name.isdigit())):
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if made.seconds.encode() in words:
            os.kill(process, signal.SIGKILL)


def _which(name):
    return next(path for path in (f"/usr/bin/{name}", f"/usr/local/bin/{name}") if Path(path).exists())


@SIGNALS
@pytest.mark.parametrize(
    "words",
    [["sync", "set", "--copy"], ["image", "push"], ["launch", "--push"], ["launch", "--build", "set"]],
)
def test_nothing_of_a_command_remains(machine, words, number):
    (machine.clusterctl.folder / "set").mkdir()
    (machine.clusterctl.folder / "set" / "Dockerfile").write_text("FROM scratch\n")
    machine.block.touch()
    process = machine.clusterctl.start(*words)
    assert wait_until(machine.begun.exists, 60), process.communicate(timeout=5)
    assert wait_until(machine.remains)
    process.send_signal(number)
    ended(process, 130, timeout_s=60)
    assert wait_until(lambda: not machine.remains()), machine.remains()
    assert list((machine.clusterctl.folder / "tmp").glob("clusterctl-*")) == []


@SIGNALS
@pytest.mark.parametrize("more", [["--all"], ["--node", "1"]], ids=["all", "one"])
def test_nothing_of_an_exec_remains(machine, job_name, more, number):
    """A terminal sends Ctrl-C to the command, too, so without one it ends nothing of a single command."""
    if number == signal.SIGINT and more != ["--all"]:
        pytest.skip("Ctrl-C is the command's own")
    command = ["--backend", "local", "--nodes", "2", "--name", job_name, "--detach", "--command", str(TICKS)]
    machine.clusterctl.expect(0, "launch", *command)
    machine.clusterctl.wait_for(job_name, "tick 0", node="node-1")
    try:
        process = machine.clusterctl.start("exec", job_name, *more, "--", "sleep", machine.seconds)
        assert wait_until(lambda: [words for words in machine.remains() if words[0] == b"sleep"], 60)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert wait_until(lambda: not machine.remains()), machine.remains()
    finally:
        machine.clusterctl.expect(0, "stop", job_name)


def test_a_closed_terminal_leaves_the_job_running(machine, job_name):
    process = machine.clusterctl.start(
        "launch", "--backend", "local", "--name", job_name, "--command", str(TICKS)
    )
    machine.clusterctl.wait_for(job_name, "tick 1")
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 129
    assert json.loads(machine.clusterctl.run("status", job_name, "--json")[1])["state"] == "running"
    machine.clusterctl.expect(0, "stop", job_name)


@SIGNALS
def test_a_job_that_is_done_stays_done_if_the_copy_of_its_results_is_interrupted(machine, job_name, number):
    folder = machine.clusterctl.folder
    inventory(folder, machine.sshd, folder / "remote")
    (folder / "work").mkdir()
    (folder / "work" / "writes.py").write_text(
        "import os, time\n"
        "print('begins', flush=True)\n"
        f"while not os.path.exists({str(machine.block)!r}):\n"
        "    time.sleep(0.05)\n"
        "open(os.path.join(os.environ['CLUSTER_RUN_DIR'], 'result'), 'w').write('42')\n"
    )
    words = ["--name", job_name, "--nodes", "1", "--python", sys.executable, "--workdir", "work"]
    process = machine.clusterctl.start("launch", *words, "--command", "writes.py")
    machine.clusterctl.wait_for(job_name, "begins")
    machine.block.touch()
    assert wait_until(machine.begun.exists, 60)
    process.send_signal(number)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == (129 if number == signal.SIGHUP else 130), text
    if number != signal.SIGHUP:
        assert (
            f"interrupted; {job_name}: done. To copy the rest of its results: clusterctl stop {job_name}\n"
            in text
        )
    assert [row["state"] for row in json.loads(machine.clusterctl.run("ps", "--all", "--json")[1])] == [
        "done"
    ]
    assert wait_until(lambda: not machine.remains()), machine.remains()
    assert not (folder / "runs" / job_name / "result").exists()
    machine.block.unlink()
    machine.clusterctl.expect(0, "stop", job_name, has=f"{job_name}: done. It had already ended.")
    assert (folder / "runs" / job_name / "result").read_text() == "42"
    assert processes_of(job_name) == []
