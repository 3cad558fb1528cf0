"""Jobs and nodes that put links in the place of files: nothing outside of the run directory is shown or written."""

import os
import shutil
import sys
import urllib.parse

import pytest

from tests.browser import serving
from tests.conftest import ended, wait_until
from tests.contract.sshd import TICKS, inventory
from tests.contract.test_serve import Events, fetch

#: Replaces files of the run directory by links to a private file, waits for `end`, and ends well.
PLANT = """
import os, pathlib, time
run, private = pathlib.Path(os.environ["CLUSTER_RUN_DIR"]), os.environ["PRIVATE"]
(run / "made").mkdir()
(run / "made" / "file").write_text("result")
(run / "made" / "again").symlink_to("file")
log = run / "attempt-1" / "node-0.log"
for link in (log, run / "results.csv", run / "image.png", run / "made" / "out"):
    link.unlink(missing_ok=True)
    link.symlink_to(private)
print("planted", flush=True)
(run / "planted").touch()
while not (run / "end").exists():
    time.sleep(0.05)
"""


@pytest.fixture
def remote(clusterctl, sshd):
    """The folder of the run directories on a node."""
    folder = clusterctl.folder / "remote"
    inventory(clusterctl.folder, sshd, folder)
    return folder


def copied(clusterctl, job, path):
    """Copy a path of a job into a new folder. Return the exit code, the output, and the files by their names."""
    into = clusterctl.folder / f"copies{len(list(clusterctl.folder.glob('copies*')))}"
    into.mkdir()
    code, text = clusterctl.run("cp", f"{job}:{path}", str(into))
    files = {str(each.relative_to(into)): each.read_text() for each in into.rglob("*") if each.is_file()}
    return code, text, files


@pytest.mark.parametrize("backend", ["local", "ssh"])
def test_links_of_a_job_show_no_private_file(clusterctl, remote, backend, job_name, tmp_path_factory):
    private = tmp_path_factory.mktemp("private") / "key"
    private.write_text("epoch,PRIVATE_loss\n1,2\n2,3\n")
    (clusterctl.folder / "plant.py").write_text(PLANT)
    options = ["--backend", backend, "--name", job_name, "--nodes", "1", "--python", sys.executable]
    started = clusterctl.start("launch", *options, "--command", "plant.py", "--env", f"PRIVATE={private}")
    there = (remote if backend == "ssh" else clusterctl.folder / "runs") / job_name
    result = {"made/file": "result", "made/again": "result"}
    try:
        assert wait_until((there / "planted").exists)
        assert wait_until(lambda: copied(clusterctl, job_name, "made")[0] == 0)
        code, text, files = copied(clusterctl, job_name, "made")
        assert (code, files) == (0, result), text
        assert "not copied: made/out leads out of" in text
        code, text, files = copied(clusterctl, job_name, "results.csv")
        assert (code, files) == (3, {}), text
    finally:
        (there / "end").touch()
    printed = ended(started, 0)
    run_dir = clusterctl.folder / "runs" / job_name
    shown = [printed, (run_dir / "report.html").read_text()]
    shown += [clusterctl.run(*words, job_name)[1] for words in (["logs"], ["status"], ["attach"])]
    code, text, files = copied(clusterctl, job_name, "made")
    assert (code, files) == (0, result), text
    for path in ("results.csv", "attempt-1/node-0.log" if backend == "local" else "image.png"):
        code, text, files = copied(clusterctl, job_name, path)
        assert (code != 0, files) == (True, {}), text
    with serving(clusterctl) as url:
        page = urllib.parse.urljoin(url, f"/jobs/{job_name}/")
        events = Events(f"{page}logs/node-0/events")
        if backend == "local":  # else nothing of the log has come from the node
            events.wait_for(lambda lines: True)
        body = Events(f"{page}events")
        body.wait_for(lambda message: "Attempts" in message or "Job" in message)
        for name in ("results.csv", "image.png", "made/out"):
            assert fetch(page + name)[0] == 404
        shown += [str(events.messages), str(body.messages)]
    assert not [text for text in shown if "PRIVATE_loss" in text]
    assert "image.png" not in shown[1]
    if backend == "local":
        assert all("node-0.log is not read: it leads out of" in text for text in shown[1:3])
    else:
        assert "was not copied completely: " in printed
        assert not (run_dir / "results.csv").is_symlink()


def test_a_node_writes_nothing_outside_of_the_run_directory(clusterctl, remote, job_name):
    """Its administrator first puts a link there, which is copied, and then a folder for the link's target."""
    outside = clusterctl.folder / "outside"
    outside.mkdir(mode=0o700)
    keys = outside / "authorized_keys"
    keys.write_text("original")
    keys.chmod(0o600)
    (clusterctl.folder / TICKS.name).write_bytes(TICKS.read_bytes())
    clusterctl.expect(0, "launch", "--nodes", "1", "--name", job_name, "--detach", "--command", TICKS.name)
    clusterctl.wait_for(job_name, "tick 1")
    run_dir = clusterctl.folder / "runs" / job_name
    ranks = remote / job_name / "attempt-1/ranks"
    here = run_dir / "attempt-1/ranks/node-0"
    clusterctl.run("stop", job_name)
    for target in ("../../../../outside", str(outside), "here/../../../../../outside"):
        # As if an earlier version had copied the link, and as this version does.
        for is_copied in (False, True):
            _remove(here)
            _remove(ranks / "node-0")
            ranks.mkdir(exist_ok=True)
            if not (ranks / "here").is_symlink():
                (ranks / "here").symlink_to(".")
            (ranks / "node-0").symlink_to(target)
            clusterctl.run("stop", job_name)
            if is_copied:
                _remove(here)
                here.symlink_to(outside)
            (ranks / "node-0").unlink()
            (ranks / "node-0").mkdir()
            (ranks / "node-0" / keys.name).write_text("attacker")
            text = clusterctl.run("stop", job_name)[1]
            assert keys.read_text() == "original"
            assert [path.name for path in outside.iterdir()] == [keys.name]
            assert (outside.stat().st_mode & 0o777, keys.stat().st_mode & 0o777) == (0o700, 0o600)
            if is_copied:
                assert "leads out of" in text
    # Files that others may write, or that run as their owner.
    _remove(here)
    (ranks / "node-0" / keys.name).chmod(0o6777)
    os.mkfifo(ranks / "node-0" / "fifo")
    os.umask(umask := os.umask(0))
    clusterctl.run("stop", job_name)
    assert (here / keys.name).stat().st_mode & 0o7777 == 0o775 & ~umask


def _remove(path):
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
