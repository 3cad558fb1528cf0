"""Places that cannot be used and texts that are not UTF-8: each is an error with a hint, never a traceback."""

import contextlib
import os
import re
import subprocess
import sys

import pytest

from tests.contract.sshd import TICKS, inventory

#: Commands that read the records of jobs.
READERS = [
    *(["ps"], ["ps", "--all", "--json"], ["stop", "--all"]),
    *(
        [name, "absent"]
        for name in ("status", "logs", "stop", "top", "attach", "wait", "tensorboard", "shell")
    ),
    *(["exec", "absent", "--", "true"], ["cp", "absent:last.pt", "."], ["port-forward", "absent", "8888"]),
]
LAUNCH = ["launch", "--backend", "local", "--nodes", "1", "--command", str(TICKS)]
#: Another user, who may read this test's interpreter.
STRANGER = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"]
STRANGER += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
NOT_UTF8 = b"a\xffb"


@pytest.fixture
def run(clusterctl):
    """Run a command that must fail without a traceback, and return what it prints."""

    def _run(code, *words, prefix=(), **more):
        env = {**clusterctl.env, **more}
        env = {name: value for name, value in env.items() if value is not None}
        command = [*prefix, sys.executable, "-m", "cluster", *words]
        done = subprocess.run(
            command, cwd=clusterctl.folder, env=env, capture_output=True, timeout=120, check=False
        )
        text = (done.stdout + done.stderr).decode(errors="replace")
        assert (done.returncode, "Traceback" in text) == (code, False), f"{words}: {text}"
        return text

    return _run


def fill(folder):
    """Write a file into a folder until its file system is full."""
    with contextlib.suppress(OSError), (folder / "filler").open("ab", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


@pytest.fixture
def full(tmp_path):
    """Yield a folder on a file system without free space."""
    folder = tmp_path / "full"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a tmpfs")
    try:
        fill(folder)
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_records_folder_that_cannot_be_read_is_not_an_empty_one(run, clusterctl):
    (clusterctl.folder / "file").touch()
    for words in READERS:
        text = run(3, *words, CLUSTERCTL_STATE_DIR=str(clusterctl.folder / "file" / "jobs"))
        assert "error: cannot read the records of jobs in " in text, words
        assert "Not a directory\nhint: give this user access, or use another folder" in text, words


def test_a_launch_without_space_for_its_record_starts_nothing(run, full, clusterctl):
    text = run(3, *LAUNCH, CLUSTERCTL_STATE_DIR=str(full / "jobs"))
    assert "error: cannot write the job's record " in text
    assert "No space left on device\nhint: free some space, or use another folder" in text
    assert not list((clusterctl.folder / "runs").glob("*/*/*.log"))
    run(3, *LAUNCH, CLUSTERCTL_STATE_DIR="/proc/clusterctl")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without an entry")
def test_a_user_without_a_home_folder(run, clusterctl):
    clusterctl.folder.chmod(0o777)
    nowhere = {"CLUSTERCTL_STATE_DIR": None, "XDG_STATE_HOME": None, "HOME": None}
    for words in [*READERS, LAUNCH]:
        text = run(2, *words, prefix=STRANGER, **nowhere)
        assert text.endswith(
            "error: there is no home folder: HOME is not set, and user 54321 has no entry in the password database\n"
            "hint: export HOME=FOLDER, or name a folder for the records of jobs: export CLUSTERCTL_STATE_DIR=FOLDER\n"
        ), words
    run(0, "plan", "--backend", "local", prefix=STRANGER, **nowhere)
    run(0, "--version", prefix=STRANGER, **nowhere)
    assert "Permission denied" in run(3, *LAUNCH, prefix=STRANGER, **{**nowhere, "HOME": "/nonexistent"})


def test_a_text_that_is_not_utf8_is_named(run, clusterctl):
    folder = os.fsencode(clusterctl.folder) + b"/" + NOT_UTF8
    os.mkdir(folder)  # noqa: PTH102 (Path has no bytes)
    for name, words in {
        "image": ["--image", NOT_UTF8, "--backend", "compose"],
        "mounts": ["--mount", folder + b":/x", "--backend", "compose"],
        "env": ["--env", b"A=" + NOT_UTF8],
        "setup": ["--setup", NOT_UTF8],
        "python": ["--python", NOT_UTF8],
        "workdir": ["--workdir", folder],
        "run root": ["--run-dir", folder],
        "command": ["--command", str(TICKS).encode() + b" " + NOT_UTF8],
    }.items():
        for command in (["launch"], ["plan"], ["plan", "--json"], ["plan", "--save", "job.yaml"]):
            given = [*command, "--backend", "local", "--nodes", "1", "--command", str(TICKS), *words]
            text = run(2, *given)
            assert f"error: {name}: " in text, text
            assert (
                "a\\xffb is not UTF-8\nhint: rename that file or folder, or write the value in UTF-8\n"
                in text
            )
    env = {"SECRET": os.fsdecode(NOT_UTF8)}
    assert "error: --env SECRET: the value of SECRET is not UTF-8\n" in run(
        2, *LAUNCH, "--env", "SECRET", **env
    )
    for words in (
        ["--name", NOT_UTF8],
        ["--hosts", NOT_UTF8],
        ["--inventory", NOT_UTF8],
        ["--env-file", NOT_UTF8],
    ):
        run(2, *LAUNCH, *words)
    for words in (
        ["status", NOT_UTF8],
        ["stop", NOT_UTF8],
        ["cp", NOT_UTF8 + b":x", "."],
        ["init", NOT_UTF8],
    ):
        run(2, *words)
    assert "this is not a host name" in run(2, "serve", "--host", NOT_UTF8)
    assert not (clusterctl.folder / "runs").exists()


#: Prints lines until the file `enough` exists.
PRINTS = """import os, time
print("begins", flush=True)
while not os.path.exists({enough!r}):
    print("x" * 1000, flush=True)
    time.sleep({pause_s})
print("ends", flush=True)
"""


def test_a_full_disk_under_the_log_is_part_of_the_outcome(clusterctl, full, job_name):
    (full / "filler").unlink()
    program = clusterctl.folder / "prints.py"
    program.write_text("for number in range(200): print(number, 'x' * 1000, flush=True)\n")
    words = ["launch", "--backend", "local", "--nodes", "1", "--name", job_name, "--run-dir", str(full)]
    text = clusterctl.expect(0, *words, "--command", str(program))
    found = re.search(
        r"^done, but the log of node-0 lost (\d+) lines: No space left on device$", text, re.MULTILINE
    )
    assert found, text
    kept = re.findall(
        r"^\d+ x{1000}$", (full / job_name / "attempt-1" / "node-0.log").read_text(), re.MULTILINE
    )
    assert 200 - len(kept) <= int(found[1]) <= 200 - len(kept) + 5  # and lines of the agent
    lost = f"but the log of node-0 lost {found[1]} lines: No space left on device"
    assert f"\n{lost}\n" in clusterctl.expect(0, "status", job_name)
    assert f"{job_name}: done ({lost})" in clusterctl.expect(0, "wait", job_name)


def test_a_full_disk_under_the_copy_of_the_log_loses_nothing(clusterctl, full, sshd, job_name):
    (full / "filler").unlink()
    inventory(clusterctl.folder, sshd, clusterctl.folder / "remote")
    enough = clusterctl.folder / "enough"
    (clusterctl.folder / "prints.py").write_text(PRINTS.format(enough=str(enough), pause_s=0.01))
    words = ["launch", "--nodes", "1", "--name", job_name, "--run-dir", str(full), "--python", sys.executable]
    text = clusterctl.expect(5, *words, "--command", "prints.py")
    assert f"error: this machine: {full / job_name}/attempt-1/node-0.log: No space left on device\n" in text
    subprocess.run(["mount", "-o", "remount,size=8m", str(full)], check=True)
    enough.touch()
    clusterctl.expect(0, "attach", job_name)
    (log,) = (full / job_name).glob("attempt-1/node-0.log")
    source = clusterctl.folder / "remote" / job_name / "attempt-1" / "node-0.log"
    assert log.read_bytes() == source.read_bytes()
    assert b"\nends\n" in log.read_bytes()
