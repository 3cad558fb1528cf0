"""Two users of a machine who share a run directory: each can run jobs, and neither gets the other's files.

The second user is a UID without a name, for which this process needs root. The tests run with an interpreter that every
user can read.
"""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import cluster
from tests.conftest import Clusterctl, wait_until

UID = 12345
#: Where this process imports from.
PATHS = [
    str(Path(cluster.__file__).parents[1]),
    *(path for path in sys.path if path.endswith("site-packages")),
]
PROGRAM = """
import os, pathlib, time
cache, run = pathlib.Path(os.environ["CLUSTER_CACHE_DIR"]), pathlib.Path(os.environ["CLUSTER_RUN_DIR"])
print("cached", cache, sorted(path.name for path in cache.iterdir()), flush=True)
(cache / "compiled.so").touch()
pathlib.Path(run, "result").write_text("a")
pathlib.Path(run, "folder").mkdir()
while os.environ.get("WAITS") and not (run / "end").exists():
    time.sleep(0.05)
"""


def python_for_all():
    """Return an interpreter of this version that the other user can run, with the packages of this one, or None."""
    version = sys.version_info[:2]
    check = f"import sys; print(sys.version_info[:2] == {version}); import msgspec"
    for python in filter(None, (sys.executable, shutil.which(f"python3.{version[1]}", path="/usr/bin"))):
        environment = {"PYTHONPATH": ":".join(PATHS), "PATH": os.environ["PATH"]}
        # in a shell: setpriv itself still has root's rights when it starts a program
        words = as_other(["sh", "-c", 'exec "$@"', "sh", python, "-c", check])
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout == "True\n":
            return python
    return None


def as_other(words):
    return ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", *words]


class User(Clusterctl):
    """The command line of one of the two users, in a folder of their own, with an umask."""

    def __init__(self, folder, python, *, is_other, mask=0o022):
        super().__init__(folder)
        folder.mkdir()
        folder.chmod(0o700)
        self.python = python
        self.is_other = is_other
        self.mask = mask
        self.env |= {"PYTHONPATH": ":".join(PATHS), "HOME": str(folder)}
        (folder / "program.py").write_text(PROGRAM)
        if is_other:
            for path in (folder, folder / "program.py"):
                os.chown(path, UID, UID)

    def start(self, *arguments, **options):
        words = [self.python, "-m", "cluster", *arguments]
        return subprocess.Popen(
            as_other(words) if self.is_other else words,
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            umask=self.mask,
            **options,
        )

    def launch(self, name, shared, *options):
        words = ["launch", "--backend", "local", "--device", "cpu", "--name", name, "--run-dir", str(shared)]
        return self.run(*words, "--python", self.python, "--command", "program.py", *options)


@pytest.fixture
def top():
    """A folder that both users reach; pytest's own are closed."""
    if os.getuid() != 0:
        pytest.skip("only root can be two users")
    with tempfile.TemporaryDirectory(prefix="two-users-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def users(top):
    python = python_for_all()
    if python is None:
        assert os.environ.get("CI") != "true", "no interpreter that every user can run"
        pytest.skip("no interpreter that every user can run")
    return User(top / "one", python, is_other=False), User(top / "two", python, is_other=True)


@pytest.fixture
def shared(top):
    """A run directory of both users, as /tmp."""
    folder = top / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def owner_and_mode(path):
    about = path.lstat()
    return about.st_uid, stat.S_IMODE(about.st_mode)


def test_both_users_run_jobs_in_one_run_directory_with_caches_of_their_own(users, shared, job_name):
    first, second = users
    code, text = first.launch(f"{job_name}-1", shared)
    assert (code, f"cached {shared}/.cache/0 []" in text) == (0, True), text
    code, text = second.launch(f"{job_name}-2", shared)
    assert (code, f"cached {shared}/.cache/{UID} []" in text) == (0, True), text
    code, text = second.launch(f"{job_name}-3", shared)
    assert f"cached {shared}/.cache/{UID} ['compiled.so']" in text
    assert [owner_and_mode(shared / ".cache" / str(uid)) for uid in (0, UID)] == [(0, 0o700), (UID, 0o700)]
    assert owner_and_mode(shared / ".cache") == (0, 0o1777)
    code, text = second.launch(f"{job_name}-1", shared)
    assert (code, f"{shared}/{job_name}-1 already exists" in text) == (2, True), text


def test_a_run_directory_of_a_group_has_caches_for_the_group(users, shared, job_name):
    """The second user is in the group, whose folder is closed to all others."""
    os.chown(shared, 0, UID)
    shared.chmod(0o3770)
    for user in users:
        code, text = user.launch(f"{job_name}-{int(user.is_other)}", shared)
        assert code == 0, text
    assert ((shared / ".cache").stat().st_gid, owner_and_mode(shared / ".cache")) == (UID, (0, 0o3771))
    assert [owner_and_mode(shared / ".cache" / str(uid)) for uid in (0, UID)] == [(0, 0o2700), (UID, 0o2700)]


def test_the_second_user_learns_why_a_run_directory_is_closed(users, top, job_name):
    first, second = users
    closed = top / "closed"
    assert first.launch(f"{job_name}-1", closed)[0] == 0
    code, text = second.launch(f"{job_name}-2", closed)
    assert (code, text) == (
        3,
        f"error: this machine: cannot make the run directory {closed}/{job_name}-2/attempt-1: {closed} belongs to root "
        "and has the mode 755\nhint: choose another folder: --run-dir FOLDER; or its owner can share it: chmod 1777 "
        f"{closed}\n",
    )
    closed.chmod(0o1777)
    code, text = second.launch(f"{job_name}-3", closed)  # the caches are still closed
    assert (
        f"cannot make the folder {closed}/.cache/{UID}: {closed}/.cache belongs to root and has the mode 1755"
        in text
    )
    assert f"its owner can type: chmod 1777 {closed}/.cache" in text
    (closed / ".cache").chmod(0o1777)
    assert second.launch(f"{job_name}-4", closed)[0] == 0


@pytest.mark.parametrize("planted", ["folder", "open", "link"])
@pytest.mark.parametrize("name", [".cache", ".setup"])
def test_what_another_user_has_planted_is_not_run(users, shared, job_name, planted, name):
    first, second = users
    plan_a_trap = shared / name / "0"
    plan_a_trap.parent.mkdir()
    plan_a_trap.parent.chmod(0o1777)
    if planted == "link":
        (second.folder / "trap").mkdir()
        plan_a_trap.symlink_to(second.folder / "trap")
    else:
        plan_a_trap.mkdir(0o700)
        if planted == "open":
            plan_a_trap.chmod(0o777)
        else:
            os.chown(plan_a_trap, UID, UID)
    code, text = first.launch(job_name, shared, "--setup", "true")
    assert code == 1, text
    assert f"{plan_a_trap} is a {'symbolic link' if planted == 'link' else 'directory'} of " in text
    assert (
        "but jobs run what is in it, so it must be a folder of this user with the mode 700: remove it" in text
    )
    assert "cached" not in text
    shutil.rmtree(plan_a_trap) if planted != "link" else plan_a_trap.unlink()
    assert first.launch(f"{job_name}-2", shared, "--setup", "true")[0] == 0


def test_neither_user_sees_stops_or_reads_the_others_job(users, shared, job_name):
    first, second = users
    first.mask = 0o077
    try:
        code, text = first.launch(job_name, shared, "--detach", "--env", "WAITS=1")
        assert code == 0, text
        assert wait_until((shared / job_name / "folder").is_dir)
        for words in (["ps", "--all"], ["gc"], ["doctor"]):
            assert job_name not in second.run(*words)[1]
        for words in (
            ["stop", job_name],
            ["logs", job_name],
            ["status", job_name],
            ["cp", f"{job_name}:result", "."],
        ):
            code, text = second.run(*words)
            assert (code, f"no job {job_name!r}" in text) == (2, True), text
        second.run("gc", "--yes")
        second.run("gc", "--job", job_name, "--yes")
        code, text = second.launch(f"{job_name}-2", shared)
        assert code == 0, text
        reads = subprocess.run(as_other(["ls", str(shared / job_name)]), capture_output=True, check=False)
        assert reads.returncode != 0
        assert '"state": "running"' in first.run("status", job_name, "--json")[1]
    finally:
        (shared / job_name / "end").touch()
        first.run("wait", job_name)
        first.run("stop", job_name)


@pytest.mark.parametrize(
    ("mask", "file", "folder"), [(0o077, 0o600, 0o700), (0o002, 0o664, 0o775), (0o022, 0o644, 0o755)]
)
def test_what_a_job_writes_has_the_users_umask(users, shared, job_name, mask, file, folder):
    _, user = users
    user.mask = mask
    code, text = user.launch(job_name, shared)
    assert code == 0, text
    run_dir = shared / job_name
    for path in (
        run_dir / "result",
        run_dir / "attempt-1" / "node-0.log",
        run_dir / "attempt-1" / "node-0.json",
    ):
        assert owner_and_mode(path) == (UID, file), path
    for path in (run_dir / "report.html", run_dir / "job.yaml"):
        assert owner_and_mode(path) == (UID, file), path
    for path in (run_dir, run_dir / "folder", run_dir / "attempt-1", run_dir / "attempt-1" / "ranks"):
        assert owner_and_mode(path) == (UID, folder), path
