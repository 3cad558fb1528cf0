"""The local backend: master ports, GPUs, bad input, and a suspended or killed launcher."""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from cluster.backends import BACKENDS
from cluster.spec.model import Job, JobRecord
from cluster.store import JobStore
from tests import nvidia_smi
from tests.conftest import ended, interrupted, processes_of, wait_until
from tests.contract.sshd import TICKS

LOCAL = ["launch", "--backend", "local"]


@pytest.fixture
def launch(job_name):
    """Return the arguments that launch a command as this test's job."""

    def arguments(command, *more, name=job_name):
        return [*LOCAL, "--name", name, "--command", command, *more]

    return arguments


def test_nodes_that_do_not_join_in_time_are_named_and_stopped(clusterctl, job_name):
    (clusterctl.folder / "trainer.py").write_text("import time; time.sleep(300)  # never ready\n")
    text = clusterctl.expect(4, *LOCAL, "--name", job_name, "--nodes", "2", "--rendezvous-timeout", "0.5")
    assert "0 of 2 nodes joined in 0.5 s" in text
    assert "node-0" in text
    assert "node-1" in text
    assert processes_of(job_name) == []
    assert [clusterctl.run(verb, job_name)[0] for verb in ("wait", "attach")] == [4, 4]  # as for launch


def test_a_job_whose_secrets_are_words_of_the_events_joins(clusterctl, launch, job_name):
    """The launch names the variable whose value logs show. `reachable` is a field by which a node counts as joined."""
    clusterctl.env |= {"WANDB_DISABLED": "true", "NOTE": "reachable"}
    wait = "import os, sys, time\nprint('true,', 'reach' + 'able')\nwhile not os.path.exists('end'): time.sleep(0.05)"
    (clusterctl.folder / "wait.py").write_text(wait)
    text = clusterctl.expect(0, *launch("wait.py", "--env", "WANDB_DISABLED", "--env", "NOTE", "--detach"))
    assert [line for line in text.splitlines() if "WANDB_DISABLED" in line and "true" not in line], text
    assert "NOTE" not in text

    def state():
        return json.loads(clusterctl.run("ps", "--all", "--json")[1])[0]["state"]

    try:
        assert wait_until(lambda: state() == "running", timeout_s=60), state()
    finally:
        (clusterctl.folder / "end").touch()
        clusterctl.expect(0, "wait", job_name)
    assert "true, ***" in clusterctl.run("logs", job_name)[1]


@pytest.mark.parametrize("command", ["attach", "wait"])
def test_a_job_has_its_results_when_attach_or_wait_returns(clusterctl, launch, job_name, command):
    """A supervisor in the background records the outcome, and then copies the results."""
    (clusterctl.folder / "nothing.py").touch()
    clusterctl.expect(0, *launch("nothing.py"))
    with JobStore(clusterctl.folder / "records").supervise(job_name, in_background=True) as copies:
        assert copies
        process = clusterctl.start(command, job_name)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
    ended(process, 0, has=f"{job_name}: done")


def test_stop_ends_several_jobs_or_all(clusterctl, launch, job_name):
    names = [f"{job_name}-{nth}" for nth in ("first", "second", "third")]
    for name in names:
        clusterctl.expect(0, *launch(f"{TICKS}", "--detach", name=name))
    text = clusterctl.expect(0, "stop", *names[:2], names[0])
    assert {f"{name}: stopped. No processes remain." for name in names[:2]} <= {*text.splitlines()}
    assert processes_of(names[2]) != []
    for wrong in ((), (names[2], "--all")):
        clusterctl.expect(2, "stop", *wrong, has="give the names of jobs, or --all")
    clusterctl.expect(2, "stop", names[2], "no-such-job", has="no-such-job")
    assert processes_of(names[2]) != []
    assert clusterctl.expect(0, "stop", "--all").endswith(f"\n{names[2]}: stopped. No processes remain.\n")
    assert [pid for name in names for pid in processes_of(name)] == []
    assert clusterctl.expect(0, "stop", "--all") == "no running jobs\n"
    (clusterctl.folder / "records" / "damaged.json").write_text("{")
    clusterctl.expect(0, "stop", "--all", has="not stopped: ")


def test_a_stop_that_lasts_says_what_it_waits_for(clusterctl, launch, job_name):
    deaf = (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n"
    )
    (clusterctl.folder / "deaf.py").write_text(f"{deaf}time.sleep(600)\n")
    clusterctl.expect(0, *launch("deaf.py", "--detach"))
    clusterctl.wait_for(job_name, "deaf")
    text = clusterctl.expect(0, "stop", job_name, "--grace", "5s", has="stopped. No processes remain.")
    (line,) = [line for line in text.splitlines() if line.startswith("waiting")]  # once, as it is no terminal
    assert re.fullmatch(rf"waiting up to \d+ s for {job_name} to exit on this machine", line)


def test_two_jobs_on_one_machine_do_not_take_the_same_gpus(clusterctl, launch, job_name):
    """Three simulated GPUs."""
    first, second, third = (f"{job_name}-{nth}" for nth in ("first", "second", "third"))
    folder = nvidia_smi.install(clusterctl.folder / "bin", nvidia_smi.gpus(3))
    clusterctl.env |= {"PATH": f"{folder}:{clusterctl.env['PATH']}", "CUDA_VISIBLE_DEVICES": "2,1"}
    clusterctl.env["CLUSTERCTL_LOCKS"] = str(clusterctl.folder / "locks")
    (clusterctl.folder / "show.py").write_text(
        "import os, time\nprint('sees', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\ntime.sleep(600)\n"
    )
    clusterctl.expect(0, *launch("show.py", "--detach", "--gpus", "1", name=first))
    try:
        clusterctl.wait_for(first, "sees 2")
        clusterctl.expect(
            2, *launch("show.py", "--gpus", "1", name=second), has=f"job {first} is using GPU 2"
        )
        clusterctl.expect(0, *launch("show.py", "--detach", "--wait", "60s", "--gpus", "1", name=third))
        clusterctl.wait_for(third, "sees 1")
        text = clusterctl.expect(3, *launch("show.py", "--wait", "1s", "--gpus", "1", name=second))
        assert f"held by {first}, {third}" in text
        waiting = clusterctl.start(
            *launch("show.py", "--detach", "--wait", "60s", "--gpus", "1", name=second)
        )
        assert waiting.stdout.readline() == f"waiting for 1 GPU: held by {first}, {third}\n"
        assert clusterctl.run("stop", first)[0] == 0
        ended(waiting, 0, timeout_s=60)
        clusterctl.wait_for(second, "sees 2")
        assert [clusterctl.run("stop", name)[0] for name in (second, third)] == [0, 0]
        second = f"{job_name}-uuid"
        clusterctl.env["CUDA_VISIBLE_DEVICES"] = "GPU-11"
        clusterctl.expect(0, *launch("show.py", "--detach", "--gpus", "1", name=second))
        clusterctl.wait_for(second, "sees 1")
    finally:
        for name in (first, second, third):
            clusterctl.run("stop", name)


def test_a_taken_master_port_is_an_error_with_its_holder(clusterctl, launch):
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        text = clusterctl.expect(
            2, *launch(f"{TICKS}", "--master-port", str(port)), has=f"port {port} is taken"
        )
    assert f"pid={os.getpid()}" in text
    assert list(clusterctl.folder.iterdir()) == []


def test_a_taken_automatic_port_is_skipped(clusterctl, launch, job_name):
    from cluster.spec.port import auto_port

    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier test may have used it
        holder.bind(("", auto_port(job_name)))
        holder.listen()
        clusterctl.expect(0, *launch(f"{TICKS} --ticks 1"))
    script = (clusterctl.folder / f"runs/{job_name}/attempt-1/node-0.sh").read_text()
    assert f"PET_MASTER_PORT={auto_port(job_name, 1)}" in script


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["launch", "--nodes", "0"], "--nodes 0"),
        ([*LOCAL, "--device", "cuda"], "this machine has 0 of the"),
        (["launch", "--backend", "nomad"], "use one of: auto, compose, local, ssh"),
        (["attach", "nothing"], "no job 'nothing'"),
        ([*LOCAL, "--name", "UPPER"], "lower-case letters"),
        ([*LOCAL, "--command", "nothere.py --lr 1"], "no nothere.py in "),
        ([*LOCAL, "--command", "python train.py"], "hint: leave out python: --command 'train.py"),
        ([*LOCAL, "--command", "--no-python ./run.sh"], "no ./run.sh in "),
    ],
)
def test_bad_input_is_one_error_line_and_writes_no_file(clusterctl, arguments, words):
    text = clusterctl.expect(2, *arguments)
    assert text.startswith("error: ")
    assert words in text
    assert "Traceback" not in text
    assert list(clusterctl.folder.iterdir()) == []


def test_an_unreachable_engine_is_an_error_for_compose_and_a_note_for_auto(clusterctl):
    clusterctl.env["DOCKER_HOST"] = "unix:///nowhere.sock"
    clusterctl.expect(2, "launch", "--backend", "compose", has="Docker Engine does not answer")
    assert list(clusterctl.folder.iterdir()) == []
    text = clusterctl.expect(
        0, "plan", "--nodes", "3", "--gpus", "2", has="the nodes are groups of processes"
    )
    assert text.count("# ---- node-") == 3


def test_backend_here_ignores_cluster_yaml(clusterctl):
    (clusterctl.folder / "cluster.yaml").write_text("nodes: [nowhere.invalid]\n")
    for backend in ("here", "local"):
        code, text = clusterctl.run("plan", "--backend", backend, "--nodes", "2")
        assert (code, "PET_NNODES" in text, "nowhere.invalid" in text) == (0, True, False), text
    text = clusterctl.expect(2, "plan", "--backend", "here", "--hosts", "a,b")
    assert "--backend here runs on this machine, so --hosts has no effect" in text


def test_a_plan_imports_no_heavy_packages(clusterctl):
    program = "import sys; sys.argv = ['clusterctl', 'plan', '--backend', 'local']\n"
    program += "from cluster.cli.main import main\ntry:\n main()\nfinally:\n"
    program += " print([name for name in ('fabric', 'submitit', 'yaml', 'tarfile', 'torch', 'numpy') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=clusterctl.folder, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_version_is_printed(clusterctl):
    assert clusterctl.run("--version") == (0, f"clusterctl {version('clusterctl')}\n")


def test_a_second_launch_of_the_same_job_gets_a_number(clusterctl):
    command = [*LOCAL, "--command", f"{TICKS} --ticks 1", "--detach"]
    for _ in range(2):
        assert clusterctl.run(*command)[0] == 0
    names = [row["job"] for row in json.loads(clusterctl.run("ps", "--all", "--json")[1])]
    assert names[1] == f"{names[0]}-2"
    for name in names:
        assert clusterctl.run("wait", name)[0] == 0


@pytest.mark.parametrize("program", [["--command", f"{TICKS} --ticks 1"], []])
def test_an_interpreter_that_does_not_exist_is_found_before_the_launch(clusterctl, program):
    missing = clusterctl.folder / "none/bin/python"
    has = f"there is no program {missing} to run the node with"
    clusterctl.expect(2, *LOCAL, *program, "--python", str(missing), has=has)
    assert not (clusterctl.folder / "runs").exists()


@pytest.mark.parametrize("records", ["records", "others"])
def test_two_launches_at_the_same_moment_get_different_names(clusterctl, records):
    """Both have found the name free: the test's Python does not answer the preflight check before both have asked."""
    asked, answer, python = (clusterctl.folder / name for name in ("asked", "answer", "python"))
    python.write_text(
        f'#!/bin/sh\necho >> {asked}\nuntil [ -e {answer} ]; do sleep 0.05; done\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    command = [*LOCAL, "--command", f"{TICKS} --ticks 1", "--detach", "--python", str(python)]
    first = clusterctl.start(*command)
    own = clusterctl.env["CLUSTERCTL_STATE_DIR"]
    clusterctl.env["CLUSTERCTL_STATE_DIR"] = str(clusterctl.folder / records)
    second = clusterctl.start(*command)
    assert wait_until(lambda: asked.exists() and len(asked.read_text()) == 2, 60)
    answer.touch()
    for each in (first, second):
        ended(each, 0)
    found = sorted(path.name for path in (clusterctl.folder / "runs").glob("[!.]*"))
    assert found == [found[0], f"{found[0]}-2"]
    stores = {JobStore(Path(folder)) for folder in {own, clusterctl.env["CLUSTERCTL_STATE_DIR"]}}
    assert sorted(record.plan.job_id for store in stores for record in store) == found
    assert wait_until(lambda: not any(processes_of(name) for name in found), 60)


def test_bad_input_of_the_trainer_is_an_error_without_a_traceback(clusterctl, job_name):
    text = clusterctl.expect(2, *LOCAL, "--name", job_name, "--nodes", "2", "--", "--batch", "1")
    # The log of rank 0 has the error, too, unless rank 1 failed first and rank 0 was stopped before it said so.
    assert re.search(
        r"^node-[01]: rank [01]: --batch 1 is smaller than the number of ranks, 2$", text, re.MULTILINE
    )
    assert re.search(
        r"^hint: --batch counts the images of all ranks together: use 2 or more$", text, re.MULTILINE
    )
    assert "Traceback" not in text
    assert processes_of(job_name) == []


def test_a_job_that_is_suspended_with_its_launcher_has_not_stalled(clusterctl, launch, job_name):
    program = clusterctl.folder / "steps.py"
    program.write_text(
        "import json, time\n"
        "for step in range(12):\n"
        "    event = {'event': 'progress', 'node': 0, 'time': time.time(), 'epoch': 1, 'step': step}\n"
        "    print('::cluster', json.dumps(event), flush=True)\n"
        "    time.sleep(0.7)\n"
    )
    process = clusterctl.start(*launch("steps.py", "--stall-timeout", "4"))
    clusterctl.wait_for(job_name, '"step": 2')
    # After a resume the launcher may run before the job.
    suspended = processes_of(job_name)
    for pid in (process.pid, *suspended):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(6)
    process.send_signal(signal.SIGCONT)
    time.sleep(2)
    for pid in suspended:
        os.kill(pid, signal.SIGCONT)
    ended(process, 0, timeout_s=90)


def test_a_script_that_is_run_by_hand_again_has_its_own_exit_code(clusterctl, launch):
    (clusterctl.folder / "again.py").write_text(
        "import pathlib, sys\nran = pathlib.Path('ran')\nif not ran.exists():\n    ran.touch()\n    sys.exit(75)\n"
    )
    clusterctl.expect(0, "plan", *launch("again.py")[1:], "-o", "plan.sh")
    ended = [
        subprocess.run(["bash", "plan.sh"], cwd=clusterctl.folder, check=False).returncode for _ in range(2)
    ]
    assert ended == [75, 0]


def test_a_job_is_stopped_even_if_its_record_cannot_be_written(clusterctl, launch, job_name):
    clusterctl.expect(0, *launch(f"{TICKS}"), "--detach")
    clusterctl.wait_for(job_name, "tick 0")
    no_file_may_grow = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); " + (
        f"sys.argv = ['clusterctl', 'stop', '{job_name}']; import cluster.__main__ as main; main.main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", no_file_may_grow],
        cwd=clusterctl.folder,
        env=clusterctl.env,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 3, ended
    assert "cannot write the job's record" in ended.stdout + ended.stderr
    assert processes_of(job_name) == []


@pytest.fixture
def starts(clusterctl):
    """A locked file that holds the last step before each start of a node."""
    lock = clusterctl.folder / "lock"
    slow = clusterctl.folder / "bin" / "env"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\nexec flock --close {lock} {shutil.which("env")} "$@"\n')
    slow.chmod(0o755)
    (clusterctl.folder / "twice.py").write_text(
        "import os, time\n"
        "print('runs', flush=True)\n"
        "while os.environ['CLUSTER_ATTEMPT'] == '1':\n"
        "    assert not os.path.exists(os.path.join(os.environ['CLUSTER_RUN_DIR'], 'fail'))\n"
        "    time.sleep(0.1)\n"
    )
    clusterctl.env["PATH"] = f"{slow.parent}:{clusterctl.env['PATH']}"
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield held


def test_a_launcher_that_is_terminated_during_the_start_leaves_no_processes(
    clusterctl, launch, job_name, starts
):
    launcher = clusterctl.start(*launch(f"{TICKS}", "--nodes", "2"))
    assert wait_until(lambda: list(clusterctl.folder.glob(f"runs/{job_name}/attempt-1/node-?.sh")))
    with JobStore(Path(clusterctl.env["CLUSTERCTL_STATE_DIR"])).supervise(job_name) as is_supervisor:
        assert not is_supervisor  # `attach` must not restart a job that is still starting
    launcher.terminate()
    time.sleep(1)
    fcntl.flock(starts, fcntl.LOCK_UN)
    ended(launcher, 130, timeout_s=60)
    time.sleep(2)
    assert processes_of(job_name) == []
    assert json.loads(clusterctl.run("ps", "--all", "--json")[1])[0]["state"] == "stopped"
    assert f" runs/{job_name}" in clusterctl.expect(0, "ps", "--all")


@pytest.fixture
def is_being_started(clusterctl, job_name):
    """Whether the record and `ps` say that an attempt is being started, once a node is at the last step of it."""
    records = JobStore(Path(clusterctl.env["CLUSTERCTL_STATE_DIR"]))

    def is_(attempt):
        folder = clusterctl.folder / "runs" / job_name / f"attempt-{attempt}"
        if not wait_until((folder / "node-0.sh").exists):
            return False
        (row,) = json.loads(clusterctl.expect(0, "ps", "--json"))
        record = records.load(job_name)
        return (record.plan.attempt, record.start_lock, row["state"]) == (attempt, job_name, "starting")

    return is_


def test_the_record_says_while_an_attempt_is_being_started(
    clusterctl, launch, job_name, starts, is_being_started
):
    """Until then its nodes are not polled."""
    records = JobStore(Path(clusterctl.env["CLUSTERCTL_STATE_DIR"]))
    process = clusterctl.start(*launch("twice.py", "--max-restarts", "1"))
    assert is_being_started(1)
    fcntl.flock(starts, fcntl.LOCK_UN)
    clusterctl.wait_for(job_name, "runs")
    assert wait_until(lambda: records.load(job_name).start_lock == "")
    fcntl.flock(starts, fcntl.LOCK_EX)
    (clusterctl.folder / "runs" / job_name / "fail").touch()
    assert is_being_started(2)
    fcntl.flock(starts, fcntl.LOCK_UN)
    ended(process, 0, timeout_s=60, has="restart 1 of 1")
    assert records.load(job_name).start_lock == ""


def test_what_a_killed_launcher_has_started_is_polled(clusterctl, launch, job_name, starts, is_being_started):
    """By others as soon as it is killed, and for good once `attach` has taken over."""
    process = clusterctl.start(*launch("twice.py", "--max-restarts", "1"))
    assert is_being_started(1)
    process.kill()
    process.communicate()
    fcntl.flock(starts, fcntl.LOCK_UN)
    clusterctl.wait_for(job_name, "runs")

    def is_running():
        return json.loads(clusterctl.expect(0, "ps", "--json"))[0]["state"] == "running"

    assert wait_until(is_running)
    process = clusterctl.start("attach", job_name)
    assert wait_until(lambda: JobStore(Path(clusterctl.env["CLUSTERCTL_STATE_DIR"])).supervisor_of(job_name))
    assert wait_until(is_running)
    (clusterctl.folder / "runs" / job_name / "fail").touch()
    ended(process, 0, timeout_s=60, has="restart 1 of 1")


def test_a_third_ctrl_c_exits_at_once(clusterctl, launch, job_name):
    """The command in its message then stops the job. The test's `sleep` does not end, so that no stop does."""
    lock = clusterctl.folder / "lock"
    slow = clusterctl.folder / "bin" / "sleep"
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\nexec flock {lock} true\n")
    slow.chmod(0o755)
    (clusterctl.folder / "stubborn.py").write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('here', flush=True)\n"
        "time.sleep(300)\n"
    )
    path = clusterctl.env["PATH"]
    clusterctl.env["PATH"] = f"{slow.parent}:{path}"
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = clusterctl.start(*launch("stubborn.py"))
        clusterctl.wait_for(job_name, "here")
        for said in ("Ctrl-C stops it now", "Ctrl-C again exits at once"):
            process.send_signal(signal.SIGINT)
            assert any(said in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        text = ended(process, 130, timeout_s=60)
    assert text.endswith(f"exited before the job stopped; to stop it: clusterctl stop {job_name}\n")
    clusterctl.env["PATH"] = path
    clusterctl.expect(
        0, "stop", job_name, "--grace", "1s", has="No processes remain."
    )  # if the kill was too late
    assert processes_of(job_name) == []


@pytest.mark.parametrize("moment", ["_write", "follow"])
def test_ctrl_c_between_the_start_and_the_first_poll_stops_the_job(clusterctl, launch, job_name, moment):
    """Send it when the launcher writes job.yaml, or before it follows the job. A busy machine starts `env` slowly."""
    slow = clusterctl.folder / "bin" / "env"
    slow.parent.mkdir()
    slow.write_text('#!/bin/sh\nsleep 0.5\nexec /usr/bin/env "$@"\n')
    slow.chmod(0o755)
    clusterctl.env["PATH"] = f"{slow.parent}:{os.environ['PATH']}"
    code = "import os, signal, cluster.cli.launch as launch\nfrom cluster.cli.main import main\n"
    code += f"launch.{moment} = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", code, *launch(f"{TICKS}", "--nodes", "2")],
        cwd=clusterctl.folder,
        env=clusterctl.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert done.stdout.lower().endswith("stopped. no processes remain.\n")
    time.sleep(1)
    assert processes_of(job_name) == []


def test_attach_becomes_the_supervisor_when_the_launcher_is_killed(clusterctl, launch, job_name):
    program = f"{TICKS} --ticks-later 5"
    launcher = clusterctl.start(*launch(program, "--nodes", "2", "--max-restarts", "1"))
    clusterctl.wait_for(job_name, "tick 1")
    attached = clusterctl.start("attach", job_name)
    try:
        clusterctl.wait_for(job_name, "tick 8")
        os.killpg(launcher.pid, signal.SIGKILL)
        ranks = [pid for pid in processes_of(job_name) if b"LOCAL_RANK=" in _environment(pid)]
        os.kill(ranks[0], signal.SIGKILL)
        text = ended(attached, 0, timeout_s=150, has="restart 1 of 1")
    finally:
        attached.kill()
        launcher.communicate()
    assert "done in" in text
    assert processes_of(job_name) == []
    page = (clusterctl.folder / "runs" / job_name / "report.html").read_text()
    assert re.findall(r"attempt \d<td>node-0, node-1, [^<]*: (?:rank \d|done)", page), page


def test_ps_lists_all_jobs_when_an_engine_is_unreachable(clusterctl, job_name):
    clusterctl.env["DOCKER_HOST"] = "unix:///absent.sock"
    records = JobStore(Path(clusterctl.env["CLUSTERCTL_STATE_DIR"]))
    for name, backend in ((f"{job_name}-dark", "compose"), (f"{job_name}-here", "local")):
        job = Job(name, ("x.py",), 1, 1, str(clusterctl.folder), image="some:1")
        records.reserve(JobRecord(BACKENDS[backend].plan(job, attempt=1, port=20000), time.time(), job))
    text = clusterctl.expect(0, "ps", "--json")
    assert [(row["job"], row["state"]) for row in json.loads(text)] == [
        (f"{job_name}-dark", "unreachable"),
        (f"{job_name}-here", "failed"),
    ]


CACHES = """import os, pathlib
kept = pathlib.Path(os.environ["CLUSTER_CACHE_DIR"], "kept")
print("found", kept.exists(), flush=True)
kept.touch()
"""


def test_jobs_share_a_cache_folder_that_outlives_them(clusterctl, launch, job_name):
    (clusterctl.folder / "caches.py").write_text(CACHES)
    assert "found False" in clusterctl.expect(0, *launch("caches.py"))
    assert "found True" in clusterctl.expect(0, *launch("caches.py", name=f"{job_name}-again"))


def test_stop_does_not_say_that_a_job_ended_whose_engine_is_unreachable(clusterctl, job_name):
    clusterctl.env["DOCKER_HOST"] = "unix:///absent.sock"
    job = Job(job_name, ("x.py",), 1, 1, str(clusterctl.folder), image="some:1")
    record = JobRecord(BACKENDS["compose"].plan(job, attempt=1, port=20000), time.time(), job)
    JobStore(Path(clusterctl.env["CLUSTERCTL_STATE_DIR"])).reserve(record)
    code, text = clusterctl.run("stop", job_name)
    assert code == 5, text
    assert "this machine: docker ps: " in text


def test_ps_and_status_do_not_read_logs(clusterctl, launch, job_name, request):
    (clusterctl.folder / "quiet.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    clusterctl.expect(0, *launch("quiet.py", "--nodes", "2", "--detach"))
    request.addfinalizer(lambda: clusterctl.run("stop", job_name))
    for node in ("node-0", "node-1"):
        for text in ("up", '"reachable":true'):
            clusterctl.wait_for(job_name, text, node=node)
        log = clusterctl.folder / f"runs/{job_name}/attempt-1/{node}.log"
        log.rename(log.with_suffix(".kept"))
        log.mkdir()  # reading it is an error; the agent has the old file open
    (row,) = json.loads(clusterctl.expect(0, "ps", "--json"))
    assert (row["state"], row["nodes"]) == ("running", "2/2")
    found = json.loads(clusterctl.expect(0, "status", job_name, "--json"))
    assert [node["phase"] for node in found["nodes"]] == ["ready", "ready"]


def _environment(pid):
    return Path(f"/proc/{pid}/environ").read_bytes()


STALLS = """
import gc, sys, time; gc.disable()  # collections take a fifth of torch's import
import torch, torch.distributed as dist

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        if dist.get_rank() == 0:
            time.sleep(1000)
        return torch.zeros(1)

def sleep():
    time.sleep(1000)

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("joined", flush=True)  # one node can import torch seconds later than the other: no stall
rank, how = dist.get_rank(), sys.argv[1]
if rank == 3 and how in ("one rank skips a collective", "ranks poll"):
    sleep()
if how == "one rank loads data":
    next(iter(torch.utils.data.DataLoader(Data(), num_workers=1)))
if how == "two collectives" and rank == 0:
    dist.barrier()
if how == "ranks poll":
    work = dist.all_reduce(torch.ones(1), async_op=True)
    while not work.is_completed(): time.sleep(0.02 * rank)  # a single busy one says it, and costs one core
dist.all_reduce(torch.ones(1))
dist.barrier()
"""


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        (
            "one rank skips a collective",
            "rank 3 has not entered all_reduce: sleep (stalls.py:13); ranks 0, 1, 2 wait in all_reduce (stalls.py:28)",
        ),
        (
            "one rank loads data",
            "rank 0 has not entered all_reduce: select (stalls.py:22); ranks 1, 2, 3 wait in all_reduce (stalls.py:28)",
        ),
        ("ranks poll", "rank 3: sleep (stalls.py:13); ranks 0, 1, 2: <module> (stalls.py:27)"),
        (
            "two collectives",
            "rank 0 waits in barrier (stalls.py:24); ranks 1, 2, 3 wait in all_reduce (stalls.py:28)",
        ),
    ],
)
def test_a_stalled_program_says_which_ranks_wait_where(clusterctl, launch, job_name, how, cause):
    (clusterctl.folder / "stalls.py").write_text(STALLS.strip())
    words = ["--nodes", "2", "--gpus", "2", "--stall-timeout", "4", "--device", "cpu"]
    began = time.monotonic()
    what = "no output, and busy at the same place" if how == "ranks poll" else "no output and no activity"
    clusterctl.expect(1, *launch(f"stalls.py '{how}'", *words), has=f"{what}: {cause}\n")
    assert (
        "agent: rank 3:   File " in (clusterctl.folder / f"runs/{job_name}/attempt-1/node-1.log").read_text()
    )
    assert processes_of(job_name) == []
    print(f"after {time.monotonic() - began:.1f} s")


def test_gc_finds_that_a_job_is_running(clusterctl, launch, job_name):
    clusterctl.expect(0, *launch(f"{TICKS} --ticks 600", "--nodes", "2", "--detach"))
    clusterctl.wait_for(job_name, "tick 1")
    # The tests have no terminal, on which gc would ask.
    text = clusterctl.expect(2, "gc", "--job", job_name, has="clusterctl gc --yes")
    assert f"this machine: {job_name} is running" in text
    clusterctl.expect(0, "stop", job_name)


def test_ctrl_c_waits_for_the_end_of_a_start_on_one_node():
    """A start that is under way would escape the stop after it."""
    program = (
        "import os, signal, time\n"
        "from cluster.spec.model import Machine\n"
        "from cluster.transport import parallel\n"
        "def start(node):\n"
        "    time.sleep(0.5)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(0.5)\n"
        "    print('started', flush=True)\n"
        "try:\n"
        "    parallel.each([Machine('n0', '', ())], start)\n"
        "except KeyboardInterrupt:\n"
        "    print('stops')\n"
    )
    assert interrupted(program, timeout_s=60).stdout == "started\nstops\n"


def test_a_current_folder_that_has_been_removed_is_one_error(clusterctl):
    """Commands that need no folder still work there."""
    gone = clusterctl.folder / "gone"
    gone.mkdir()
    each = f"{sys.executable} -m cluster"
    script = f"cd {gone} && rmdir {gone} && {each} ps --all && {each} plan --command x.py; {each} launch --command x.py"
    done = subprocess.run(
        ["bash", "-c", script], env=clusterctl.env, capture_output=True, text=True, check=False
    )
    error = "error: the current folder has been removed\nhint: cd to a folder that exists\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "no jobs\n", 2 * error)


#: Prints what the prologue has set, and what it must not.
SEES = "import os\nprint('sees', *(os.environ.get(name) for name in ('LOADED', 'CHOICE', 'PET_NNODES', 'LOCAL_RANK')))\n"
MODULES = "module() { echo loading $2; false; export LOADED=$2; }\n"


def test_the_prologue_sets_the_programs_environment_but_not_the_launchers(clusterctl, launch, job_name):
    (clusterctl.folder / "sees.py").write_text(SEES)
    (clusterctl.folder / "modules.sh").write_text(MODULES)
    lines = f"source {clusterctl.folder}/modules.sh\nmodule load cuda/$VERSION; CHOICE=own; [ -d /none ] && exit 1\n"
    lines += "export CHOICE PET_NNODES=7; cd /; umask 027; set -u"
    (clusterctl.folder / "job.yaml").write_text(json.dumps({"prologue": lines, "command": "sees.py"}))
    clusterctl.expect(0, *LOCAL, "job.yaml", "--name", job_name, "--env", "VERSION=12.4")
    log = clusterctl.run("logs", job_name)[1]
    assert "sees cuda/12.4 own 1 0" in log
    assert "prologue: loading cuda/12.4" in log
    saved = (clusterctl.folder / "runs" / job_name / "job.yaml").read_text()
    assert "module load" in saved


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("true\nfind_nothing --now", "exit code 127: find_nothing --now: .*command not found"),
        ("f() { echo not there >&2; return 5; }; f a", "exit code 5: f a: not there"),
        ("if", "exit code [12]: .*syntax error"),
        ("exit 0", "exit code 0: exit 0"),
    ],
)
def test_a_line_of_the_prologue_that_fails_is_found_before_the_start(
    clusterctl, launch, job_name, lines, said
):
    (clusterctl.folder / "sees.py").write_text(SEES)
    text = clusterctl.expect(2, *launch("sees.py", "--prologue", lines))
    assert re.search(said, text.replace("\n", " ")), text
    assert not (clusterctl.folder / "runs" / job_name / "attempt-1").exists()


def test_a_line_of_the_prologue_that_fails_on_the_node_ends_the_job(clusterctl, launch):
    (clusterctl.folder / "sees.py").write_text(SEES)
    once = clusterctl.folder / "once"  # the preflight check makes it
    text = clusterctl.expect(1, *launch("sees.py", "--prologue", f"mkdir {once}"))
    assert f"the prologue failed with exit code 1: mkdir {once}: mkdir: cannot create" in " ".join(
        text.split()
    ), text
