"""The working directory of a program travels to machines over a real sshd, and what the program writes comes back."""

import json
import re
import sys

import pytest
import yaml

from tests.conftest import wait_until
from tests.contract.sshd import inventory

PROGRAM = """
import os, pathlib
from package import text
pathlib.Path("written.txt").write_text(text.TEXT)
pathlib.Path("seen.txt").open("a").write("again ")
print("rank", os.environ["RANK"], "has", text.TEXT, sorted(path.name for path in pathlib.Path().iterdir()), flush=True)
if pathlib.Path("seen.txt").read_text().count("again") < int(os.environ.get("RUNS", "1")):
    raise SystemExit(3)
"""


@pytest.fixture
def project(clusterctl, sshd):
    """Return the command line in a folder with a program of two files and a cluster.yaml of three machines."""
    folder = clusterctl.folder
    inventory(folder, sshd, folder / "remote")
    (folder / "package").mkdir()
    (folder / "program.py").write_text(PROGRAM)
    (folder / "package" / "text.py").write_text("TEXT = 'one'\n")
    (folder / ".gitignore").write_text("ignored.txt\n")
    (folder / "ignored.txt").write_text("x")
    return clusterctl


def launch(project, name, *options, nodes=1):
    words = ["launch", "--name", name, "--nodes", str(nodes), "--python", sys.executable, *options]
    return project.run(*words, "--command", "program.py")


def test_a_job_runs_in_a_writable_copy_and_only_changes_are_sent_again(project, job_name):
    code, text = launch(project, job_name)
    assert code == 0, text
    assert "working directory: 5 files, " in text
    assert "5 sent to node-0" in text
    assert "rank 0 has one ['.clusterignore', '.gitignore', 'cluster.yaml', 'package', 'program.py'" in text
    assert "ignored.txt" not in text
    back = project.folder / "runs" / job_name / "workdir"
    assert {str(path.relative_to(back)) for path in back.rglob("*") if path.is_file()} == {
        "written.txt",
        "seen.txt",
    }
    assert (back / "written.txt").read_text() == "one"
    assert not (project.folder / "written.txt").exists()

    (project.folder / "package" / "text.py").write_text("TEXT = 'two!'\n")
    code, text = launch(project, f"{job_name}-2")
    assert code == 0, text
    assert "working directory: 5 files, " in text
    assert "1 sent to node-0" in text
    assert (project.folder / "runs" / f"{job_name}-2" / "workdir" / "written.txt").read_text() == "two!"
    first = project.folder / "remote" / job_name / "workdir" / "package" / "text.py"
    assert first.read_text() == "TEXT = 'one'\n"


def test_a_restart_continues_in_the_same_copy(project, job_name):
    code, text = launch(project, job_name, "--max-restarts", "1", "--env", "RUNS=2")
    assert code == 0, text
    assert "restart 1 of 1" in text
    assert (project.folder / "runs" / job_name / "workdir" / "seen.txt").read_text() == "again again "


def test_an_empty_folder_is_a_working_directory_too(project, job_name):
    (project.folder / "empty").mkdir()
    words = [
        "launch",
        "--name",
        job_name,
        "--nodes",
        "1",
        "--workdir",
        "empty",
        "--command",
        "--no-python pwd",
    ]
    code, text = project.run(*words)
    assert (code, f"{job_name}/workdir" in text) == (0, True), text


def test_workdir_names_another_folder(project, job_name):
    other = project.folder / "other"
    other.mkdir()
    (other / "program.py").write_text("import os; print('in', sorted(os.listdir()))\n")
    code, text = launch(project, job_name, "--workdir", "other")
    assert code == 0, text
    assert "in ['program.py']" in text
    assert json.loads(project.run("status", job_name, "--json")[1])["commit"] == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workdir", "nowhere", "--command", "x.py"], "--workdir nowhere: no such folder"),
        (["--workdir", "."], "--workdir: only with --command"),
        (["--mount", ".:{here}:rw", "--command", "x.py"], "--mount: {here} is the working directory"),
    ],
)
def test_a_wrong_working_directory_is_one_error(project, options, message):
    here = str(project.folder)
    code, text = project.run("launch", *(word.replace("{here}", here) for word in options))
    assert (code, text.startswith(f"error: {message.replace('{here}', here)}")) == (2, True), text
    assert not (project.folder / "remote").exists()


def test_a_copy_that_fails_leaves_nothing(project, job_name):
    """A dangling link has the name of the job's folder on one of the machines."""
    file = project.folder / "cluster.yaml"
    blocked = project.folder / "remote" / "blocked"
    described = yaml.safe_load(file.read_text())
    described["nodes"]["node-1"]["run_dir"] = str(blocked)
    file.write_text(yaml.safe_dump(described))
    blocked.mkdir(parents=True)
    (blocked / job_name).symlink_to("nowhere/below")
    code, text = launch(project, job_name, nodes=2)
    assert (code, f"node-1: {blocked}/{job_name}/workdir cannot be written" in text) == (3, True), text
    assert not (project.folder / "remote" / job_name).exists()


def test_a_job_file_with_setup_runs_here_and_on_machines_and_can_be_repeated(project, job_name):
    (project.folder / "lines.txt").write_text("one\n")
    (project.folder / "program.py").write_text("import dep\nprint('program has', dep.LINES, flush=True)\n")
    (project.folder / "setup.sh").write_text(
        "echo setting up\n"
        "packages=$(python -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')\n"
        "echo \"LINES = '$(tr '\n' ' ' < lines.txt)'\" > $packages/dep.py\n"
    )
    job = {
        "python": sys.executable,
        "command": "program.py",
        "setup": "bash setup.sh < lines.txt",
        "nodes": 1,
    }
    (project.folder / "job.yaml").write_text(yaml.safe_dump(job))
    code, text = project.run("launch", "job.yaml", "--name", job_name)
    assert code == 0, text
    assert "setup: setting up" in text
    assert "program has one" in text
    code, text = project.run("launch", "job.yaml", "--name", f"{job_name}-2")
    assert (code, "setting up" in text) == (0, False), text

    (project.folder / "lines.txt").write_text("one\ntwo\n")
    code, text = project.run("launch", "job.yaml", "--name", f"{job_name}-3")
    assert code == 0, text
    assert "setup: setting up" in text
    assert "program has one two" in text
    code, text = project.run("launch", "job.yaml", "--name", f"{job_name}-4", "--backend", "local")
    assert code == 0, text
    assert "program has one two" in text
    code, text = project.run("launch", f"runs/{job_name}-4/job.yaml")  # under a name of its own
    assert code == 0, text
    assert "program has one two" in text
    assert "setting up" not in text


@pytest.mark.parametrize("options", [[], ["--backend", "local"]], ids=["ssh", "local"])
def test_exec_runs_in_the_environment_of_the_setup(project, job_name, options):
    (project.folder / "program.py").write_text(
        "import dep, time\nprint('has', dep.X, flush=True)\ntime.sleep(600)\n"
    )
    setup = "cd $VIRTUAL_ENV/lib/python3*/site-packages; echo 'X = 5' > dep.py"
    words = [
        "--nodes",
        "2",
        "--python",
        sys.executable,
        "--setup",
        setup,
        "--command",
        "program.py",
        *options,
    ]
    project.expect(0, "launch", "--name", job_name, "--detach", *words)
    try:
        assert wait_until(lambda: project.run("logs", job_name)[1].count("has 5") == 2, timeout_s=60)
        text = project.expect(0, "exec", job_name, "--all", "--", "python", "-c", "import dep; print(dep.X)")
        assert sorted(text.split()) == ["5", "5", "node-0", "node-1", "|", "|"]
    finally:
        project.run("stop", job_name)
    if not options:  # the link is no result
        assert not list(project.folder.glob(f"runs/{job_name}/attempt-1/*.venv"))


def test_a_setup_that_fails_is_reported_on_every_backend_and_leaves_nothing(project, job_name):
    words = ["--command", "program.py", "--python", sys.executable, "--setup", "echo first; ls nowhere"]
    for nth, options in enumerate(([], ["--backend", "local"])):
        code, text = project.run("launch", "--name", f"{job_name}-{nth}", "--nodes", "2", *words, *options)
        assert code == 1, text
        assert re.search(
            r"node-\d: setup: exit code 2: ls: cannot access 'nowhere': No such file or directory", text
        )
        assert "no orphans" in project.run("gc", "--job", f"{job_name}-{nth}")[1]


def test_files_that_usually_hold_secrets_stop_the_launch_until_the_user_decides(project, job_name):
    remote = project.folder / "remote"
    for name in (".env", "package/server.pem", "keys/id_ed25519"):
        (project.folder / name).parent.mkdir(exist_ok=True)
        (project.folder / name).write_text("SECRET")
    code, text = launch(project, job_name)
    assert code == 2, text
    assert ".env, keys/id_ed25519, package/server.pem" in text
    assert (
        "hint: list them in .clusterignore to leave them out, or !NAME to send one; to send all: --yes"
        in text
    )
    assert not remote.exists()
    assert not (project.folder / "runs").exists()

    def sent(name, *options):
        code, text = launch(project, name, *options)
        assert code == 0, text
        copy = remote / name / "workdir"
        return sorted(
            str(path.relative_to(copy))
            for path in copy.rglob("*")
            if path.is_file() and path.read_bytes() == b"SECRET"
        )

    with (project.folder / ".clusterignore").open("a") as file:
        file.write("keys/\n!*.pem\n/.env\n")
    assert sent(f"{job_name}-1") == ["package/server.pem"]
    (project.folder / ".clusterignore").write_text("/remote\n/records\n/sshd\n")
    everything = [".env", "keys/id_ed25519", "package/server.pem"]
    assert sent(f"{job_name}-2", "--yes") == everything
    saved = yaml.safe_load((project.folder / "runs" / f"{job_name}-2" / "job.yaml").read_text())
    assert saved["send_secrets"] is True
    (project.folder / "job.yaml").write_text(yaml.safe_dump(saved))
    code, text = project.run("launch", "job.yaml", "--name", f"{job_name}-3")
    assert code == 0, text


def test_a_restart_sends_no_secret_that_is_newer_than_the_launch(project, job_name):
    """The machine's copy is removed, so that the restart sends all files again."""
    with (project.folder / ".clusterignore").open("a") as file:
        file.write("!old.pem\n")
    (project.folder / "old.pem").write_text("x")
    remove = f"import os, shutil; shutil.rmtree({str(project.folder / 'remote' / job_name / 'workdir')!r})"
    program = f"import os\nif os.environ['CLUSTER_ATTEMPT'] == '1':\n    open({str(project.folder / 'new.pem')!r}, 'w')"
    (project.folder / "program.py").write_text(f"{program}\n    {remove}\n    raise SystemExit(3)\n")
    code, text = launch(project, job_name, "--max-restarts", "1")
    assert code == 0, text
    assert (project.folder / "new.pem").exists()
    copy = project.folder / "remote" / job_name / "workdir"
    assert sorted(path.name for path in copy.glob("*.pem")) == ["old.pem"]
