"""The folder of GPU locks, which all users of a machine share and which no user may trust.

In these tests the other user is this one, who prepares the folder as an attacker would; some need root, to own files.
"""

import base64
import fcntl
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cluster.agent import scripts
from trainer.distributed.machine_lock import one_per_machine

ROOT = Path(__file__).parents[2]
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's file")


@pytest.fixture
def locks(tmp_path):
    """Return the folder of the locks, which does not exist yet."""
    return tmp_path / "locks"


def run(name, locks, *words, program="true", path="", **values):
    """Run agent/NAME.sh with the locks in a folder."""
    environment = {
        **os.environ,
        "CLUSTERCTL_LOCKS": str(locks),
        "PATH": f"{path or '/bin'}:{os.environ['PATH']}",
    }
    text = base64.b64encode(b"agent").decode() + f"\n{program}\n"
    argv = scripts.command(name, *words, **values)
    return subprocess.run(
        argv, input=text, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def start(locks, job="job", gpus="0", **more):
    folder = str(locks.parent / job / "attempt-1")
    return run("start", locks, folder=folder, node="n0", job=job, gpus=gpus, secrets=0, **more)


def ask(locks):
    return run("queue", locks, "00-1-job", "0")


def shared_folder(locks):
    locks.mkdir()
    locks.chmod(0o1777)
    return locks


def test_the_folder_and_its_files_are_for_all_users(locks):
    assert start(locks).returncode == 0
    assert (locks / "gpu-0.lock").read_text() == "job\n"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (locks, locks / "gpu-0.lock")] == [0o1777, 0o666]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
@pytest.mark.parametrize("script", [start, ask])
def test_a_folder_in_which_others_could_remove_a_lock_is_refused(locks, mode, script):
    locks.mkdir()
    locks.chmod(mode)
    done = script(locks)
    assert (done.returncode, f"{locks} must be a folder with mode 1777" in done.stderr) == (1, True), done
    assert list(locks.iterdir()) == []


@as_root
@pytest.mark.parametrize(("mode", "code"), [(0o1777, 0), (0o755, 1), (0o777, 1), (0o1755, 1)])
def test_a_folder_of_another_user_is_used_only_if_each_user_keeps_their_own_files(locks, mode, code):
    locks.mkdir()
    os.chown(locks, 1, 1)
    locks.chmod(mode)
    assert start(locks).returncode == code


@pytest.mark.parametrize("script", [start, ask])
def test_a_link_in_place_of_the_folder_is_refused(locks, script):
    victim = locks.parent / "victim"
    victim.mkdir()
    locks.symlink_to(victim)
    assert script(locks).returncode == 1
    assert list(victim.iterdir()) == []


@pytest.mark.parametrize("how", ["symlink_to", "hardlink_to", "fifo", "folder", "dangling"])
def test_a_lock_that_is_no_file_of_its_own_is_refused_and_nothing_is_written(locks, how):
    shared_folder(locks)
    victim = locks.parent / "victim"
    lock = locks / "gpu-0.lock"
    if how == "fifo":
        os.mkfifo(lock)
    elif how == "folder":
        lock.mkdir()
    elif how == "dangling":
        lock.symlink_to(victim)
    else:
        victim.write_text("precious")
        getattr(lock, how)(victim)
    done = start(locks)
    assert (done.returncode, f"{lock} is not a lock file" in done.stderr) == (1, True), done
    assert victim.read_text() == "precious" if how.endswith("link_to") else not victim.exists()


@pytest.mark.parametrize("program", ["flock", "head", "dd"])
def test_a_lock_that_is_exchanged_for_a_link_after_its_check_is_not_followed(locks, program):
    """The folder's owner replaces the file each time that the script runs this program."""
    shared_folder(locks)
    victim = locks.parent / "victim"
    bin_ = locks.parent / "bin"
    victim.write_text("precious")
    bin_.mkdir()
    real = subprocess.run(["which", program], capture_output=True, text=True, check=True).stdout.strip()
    (bin_ / program).write_text(f'#!/bin/sh\nln -sf {victim} {locks}/gpu-0.lock\nexec {real} "$@"\n')
    (bin_ / program).chmod(0o755)
    assert start(locks, path=bin_).returncode == 0
    assert (locks / "gpu-0.lock").is_symlink()
    assert victim.read_text() == "precious"


def test_what_a_lock_and_a_ticket_name_is_only_a_jobs_name(locks):
    """All users can write the files, and a terminal would obey what they contain."""
    shared_folder(locks)
    (locks / "ticket-00-1-\x1b[2Jjob\nheld all 0").touch()
    (locks / "gpu-0.lock").write_text("\x1b]0;evil\x07digits-1\nheld all 1\n" + "x" * 10_000_000)
    with (locks / "gpu-0.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        queue = run("queue", locks, "01-1-mine", "0")
        refused = start(locks)
    lines = queue.stdout.splitlines()
    assert [
        bool(re.fullmatch("held [a-z0-9-]{1,48} 0", line)) for line in lines if line.startswith("held")
    ] == [True]
    assert "ticket 01-1-mine" in lines
    assert "\x1b" not in queue.stdout
    assert (refused.returncode, bool(re.fullmatch("[a-z0-9-]{1,48}", refused.stdout))) == (74, True)


def test_a_ticket_does_not_follow_a_link(locks):
    shared_folder(locks)
    victim = locks.parent / "victim"
    (locks / "ticket-00-1-job").symlink_to(victim)
    run("queue", locks, "00-1-job", "")
    assert not victim.exists()


@as_root
def test_a_lock_of_the_trainer_that_another_user_has_made_delays_no_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with one_per_machine(Path("/data")) as waited:
        assert not waited
        (file,) = tmp_path.iterdir()
        os.chown(file, 1, 1)
        found = []

        def second():
            with one_per_machine(Path("/data")) as again:
                found.append(again)

        thread = threading.Thread(target=second, daemon=True)
        thread.start()
        thread.join(20)
        assert found == [False]


#: Adds 1 to a number in a file, so many times, each time under the lock.
COUNTS = """
import sys, time
from pathlib import Path
from trainer.distributed.machine_lock import one_per_machine
number = Path(sys.argv[1])
for _ in range(200):
    with one_per_machine(number):
        before = int(number.read_text())
        time.sleep(0)
        number.write_text(str(before + 1))
"""


def test_the_locks_of_the_trainer_exclude_each_other_and_leave_no_file(tmp_path):
    number = tmp_path / "number"
    locks = tmp_path / "locks"
    number.write_text("0")
    locks.mkdir()
    words = [sys.executable, "-c", COUNTS, str(number)]
    env = {**os.environ, "TMPDIR": str(locks)}
    processes = [subprocess.Popen(words, env=env) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    assert number.read_text() == "800"
    assert list(locks.iterdir()) == []


def home(tmp_path):
    """Return the home folder that packaging/entrypoint.sh chooses for a user without one."""
    text = (ROOT / "packaging" / "entrypoint.sh").read_text().replace("/tmp/home-", f"{tmp_path}/home-")
    environment = {**os.environ, "HOME": "/", "CLUSTER_RUN_DIR": str(tmp_path)}
    done = subprocess.run(
        ["sh", "-c", text, "sh", "printenv", "HOME"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(done.stdout.strip())


def test_the_home_of_a_container_is_a_folder_that_only_its_user_writes(tmp_path):
    usual = tmp_path / f"home-{os.getuid()}"
    assert home(tmp_path) == usual
    assert stat.S_IMODE(usual.stat().st_mode) == 0o700
    assert home(tmp_path) == usual
    usual.chmod(0o770)
    assert home(tmp_path) != usual
    usual.rmdir()
    (tmp_path / "mine").mkdir(mode=0o700)
    usual.symlink_to(tmp_path / "mine")
    assert home(tmp_path) != usual


@as_root
def test_the_home_of_a_container_is_no_folder_of_another_user(tmp_path):
    usual = tmp_path / "home-0"
    usual.mkdir(mode=0o700)
    os.chown(usual, 1, 1)
    other = home(tmp_path)
    assert other != usual
    assert (other.stat().st_uid, stat.S_IMODE(other.stat().st_mode)) == (0, 0o700)
