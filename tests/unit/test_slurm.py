"""Slurm states, options and limits; the batch script and the scripts of the login node, with recording programs."""

import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.agent import scripts
from cluster.backends import BACKENDS
from cluster.backends import slurm as slurm_backend
from cluster.backends.batch import queued
from cluster.backends.slurm import options as slurm_options
from cluster.backends.slurm import queue
from cluster.backends.slurm.login_check import problems
from cluster.errors import UsageError
from cluster.spec.model import Job, Machine, Queue
from cluster.spec.node_status import NodeStatus
from cluster.spec.request import Request
from cluster.supervisor import job_state, restarts

LOGIN = Machine(
    "login", "", login="ann@cluster", run_dir="/shared/runs", data_dir="/shared/data", runtime="none"
)
JOB = Job(
    "digits",
    ("-m", "trainer", "train"),
    2,
    2,
    "/home/ann/runs",
    device="cpu",
    queue=Queue(LOGIN),
    max_restarts=3,
)
PLAN = BACKENDS["slurm"].plan(JOB, attempt=1, port=0)
OWN = [NodeStatus("node-0", "starting"), NodeStatus("node-1", "starting")]


def line(state, restarts=0, code="0:0", start="N/A", nodes="n[0-1]", reason="None", name="digits", number=7):
    values = (name, number, "N/A", "N/A", state, restarts, code, start, nodes, reason)
    return "".join(f"{value:<{width}}" for value, width in zip(values, queue.COLUMNS.values(), strict=True))


def seen(text, attempt=1, hosts=("n0", "n1"), own=OWN, error="", plan=PLAN):
    job = queue.queued_job(text)
    return queued.statuses(plan, job, attempt, hosts, own, error, scheduler="Slurm", lister="squeue")


def test_a_pending_job_has_a_reason_and_an_expected_start():
    (first, second) = seen(
        line("PENDING", reason="Resources", start="2026-11-21T17:00:00"), attempt=0, hosts=()
    )
    assert (first.phase, second.phase) == ("pending", "pending")
    assert first.detail == "in the queue: Resources; expected start: 2026-11-21T17:00:00"
    (first, _) = seen(line("PENDING", reason="None"), attempt=0, hosts=())  # Slurm has not considered it yet
    assert first.detail == "in the queue"
    (first, _) = seen(
        line("CONFIGURING"), attempt=0, hosts=()
    )  # its nodes boot: the timeout does not run yet
    assert (first.phase, first.detail) == ("pending", "its nodes are being configured")


def test_a_running_node_has_its_host():
    found = [(each.phase, each.detail) for each in seen(line("RUNNING"))]
    assert found == [("starting", "on n0"), ("starting", "on n1")]


def test_a_nodes_own_exit_status_has_precedence_over_slurms_state():
    own = [NodeStatus("node-0", "exited", 1, "", 5.0), OWN[1]]
    first, second = seen(line("RUNNING"), own=own)
    assert (first.phase, first.exit_code, first.detail, first.ended_at) == ("exited", 1, "", 5.0)
    assert first.where == "on n0"
    assert second.phase == "starting"
    own = [NodeStatus("node-0", "exited", 0, "", 5.0)] * 2
    assert [each.detail for each in seen(line("COMPLETED"), own=own)] == ["", ""]


@pytest.mark.parametrize(
    ("state", "code", "phase", "detail"),
    [
        ("COMPLETED", "0:0", "exited", ""),
        ("TIMEOUT", "0:1", "lost", "it reached its time limit (--time)"),
        ("NODE_FAIL", "0:0", "lost", "its node failed"),
        ("PREEMPTED", "0:0", "lost", "Slurm ended it: PREEMPTED"),
        ("OUT_OF_MEMORY", "0:125", "lost", "out of memory (--set mem=...)"),
        ("FAILED", "0:53", "exited", "the run directory is not shared by all nodes: missing on the first"),
        ("FAILED", "9:0", "exited", "the batch script exited with 9:0"),
        ("CANCELLED", "0:15", "exited", "cancelled with scancel"),
    ],
)
def test_a_final_state_without_a_nodes_exit_status(state, code, phase, detail):
    assert {(each.phase, each.detail) for each in seen(line(state, code=code), hosts=())} == {(phase, detail)}


def test_an_error_of_the_batch_script_is_the_reason():
    (first, _) = seen(line("FAILED", code="71:0"), hosts=(), error="n0: port 29500 is taken")
    assert (first.exit_code, first.detail) == (71, "n0: port 29500 is taken")


def test_a_requeued_attempt_is_lost_and_the_next_one_is_not():
    assert {each.phase for each in seen(line("PENDING", restarts=1), attempt=1)} == {"lost"}
    assert {each.phase for each in seen(line("CONFIGURING", restarts=1), attempt=1)} == {"lost"}
    assert {each.phase for each in seen(line("RUNNING", restarts=1), attempt=2)} == {"lost"}
    second = replace(PLAN, attempt=2)
    assert {each.phase for each in seen(line("PENDING", restarts=1), attempt=1, plan=second)} == {"pending"}
    assert {each.phase for each in seen(line("RUNNING", restarts=1), attempt=2, plan=second)} == {"starting"}


def test_a_job_that_slurm_does_not_list_is_lost():
    assert queue.queued_job("") is None
    assert {each.detail for each in seen("")} == {"squeue does not list the job"}


SITE = {
    "partition": [
        "gpu*|2|64|gpu:a100:4(S:0-1)|1-00:00:00",
        "gpu*|1|32|gpu:2|1-00:00:00",
        "debug|1|8|(null)|30:00",
    ]
}


def refused(job, **options):
    return problems(replace(job, queue=Queue(LOGIN, options)), SITE, "login")


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"partition": "gppu"}, "login: no partition gppu"),
        ({"nodes": 4}, {}, "partition gpu: it has 3 nodes, but --nodes is 4"),
        (
            {"device": "cuda", "procs_per_node": 5},
            {},
            "gpu: its nodes have 4 GPUs, but --gpus is 5",
        ),
        (
            {"nodes": 1, "device": "cuda"},
            {"partition": "debug"},
            "debug: its nodes have no GPUs, but --gpus is 2",
        ),
        ({"nodes": 1}, {"partition": "debug", "time": "31"}, "its time limit is shorter than --time 31"),
    ],
)
def test_a_request_beyond_the_limits_is_an_error_before_submission(changes, options, message):
    ((what, hint),) = refused(replace(JOB, **changes), **options)
    assert message in what
    assert hint


def test_a_request_within_the_limits_is_accepted():
    assert refused(JOB) == []
    assert refused(replace(JOB, device="cuda", procs_per_node=4), time="1-00:00:00") == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("30:00", 1800),
        ("8:00:00", 28800),
        ("1-0", 86400),
        ("1-12:30:00", 131400),
        ("1:2:3:4", None),
    ],
)
def test_times_are_read_as_slurm_reads_them(text, seconds):
    assert slurm_options.seconds(text) == seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": "3"}, "clusterctl sets it"),
        ({"array": "0-3"}, "clusterctl sets it"),
        ({"clusters": "b"}, "submits to the cluster of the login node only"),
        ({"Partition": "gpu"}, "not an option of sbatch"),
        ({"time": "soon"}, "not a time"),
        ({"comment": "a\n#SBATCH --wrap=evil"}, "quote, '\\$' or control character"),
        ({"comment": 'a" --uid=root'}, "quote, '\\$' or control character"),
    ],
)
def test_invalid_options_are_errors(options, message):
    with pytest.raises(UsageError, match=message):
        slurm_options.checked(options)


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("signal", "--grace"),
        ("no-kill", "--max-restarts"),
        ("no-requeue", "--max-restarts"),
        ("parsable", "omit it"),
        ("quiet", "omit it"),
        ("test-only", "clusterctl plan"),
        ("wait", "clusterctl wait"),
        ("get-user-env", "--env"),
        ("chdir", "--workdir"),
    ],
)
def test_an_option_that_would_take_the_job_from_the_launcher_is_refused(option, instead):
    with pytest.raises(UsageError, match=f"--set {option}=...: clusterctl sets it") as caught:
        slurm_options.checked({option: "USR1@60"})
    assert instead in caught.value.hint


@pytest.mark.parametrize(
    ("words", "rendered"), [("contiguous", "contiguous"), ("disable-dcgm=", "disable-dcgm")]
)
def test_an_option_without_a_value_is_rendered_without_one(slurm_cluster, words, rendered):
    text = slurm_cluster.expect(0, "plan", "--set", words, "--command", "train.py")
    assert f"#SBATCH --{rendered}\n" in text


def test_a_value_that_contains_the_end_mark_of_the_script_stays_a_value(tmp_path):
    job = replace(JOB, env={"NOTE": "one\nEND_OF_NODE_SCRIPT\n$(touch evil) @run@"})
    (step,) = BACKENDS["slurm"].plan(job, attempt=1, port=0).steps
    (text,) = step.files.values()
    _, _, rest = text.partition("node=$(cat <<'END_OF_NODE_SCRIPT_'\n")
    node, _, _ = rest.partition("\nEND_OF_NODE_SCRIPT_\n)")
    assert "END_OF_NODE_SCRIPT\n$(touch evil) @run@" in node
    program = f"node=$(cat <<'END_OF_NODE_SCRIPT_'\n{node}\nEND_OF_NODE_SCRIPT_\n); printf %s \"$node\""
    shown = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout == node
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def slurm_cluster(clusterctl):
    """A cluster.yaml whose login node does not exist: invalid options are errors before a connection."""
    (clusterctl.folder / "cluster.yaml").write_text(
        "backend: slurm\nimage: /shared/x.sif\nnodes:\n"
        "  login: {login: ann@nowhere.invalid, run_dir: /shared/runs, data_dir: /shared/data}\n"
    )
    return clusterctl


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch", "--push"], "--push: the nodes of a Slurm cluster share one file"),
        (["launch", "--spares", "1"], "--spares is not supported by the backend slurm"),
        (["launch", "--nodes", "2:4"], "--nodes 2:4 is not supported by the backend slurm"),
        (["launch", "--set", "nodes=3"], "--set nodes=...: clusterctl sets it"),
        (["launch", "--backend", "ssh"], "--backend ssh: cluster.yaml has backend: slurm"),
        (
            ["launch", "-b", "local", "--partition", "gpu"],
            "--partition is not supported by the backend local",
        ),
        (["image", "push"], "cluster.yaml: apptainer runs an image file on the shared disk"),
    ],
)
def test_an_option_that_slurm_does_not_support_is_one_error_line(slurm_cluster, words, message):
    code, text = slurm_cluster.run(*words)
    assert (code, text.startswith(f"error: {message}"), "Traceback" in text) == (2, True, False), text


def test_a_cancelled_job_is_not_restarted():
    own = [NodeStatus("node-0", "exited", 135, "", 5.0), OWN[1]]
    statuses = seen(line("CANCELLED"), own=own)
    assert {(each.detail, each.is_cancelled) for each in statuses} == {("cancelled with scancel", True)}
    view = job_state.fold(job_state.start(PLAN, 1.0), statuses, [], 6.0)
    past = [restarts.failure(view, "failed")]
    assert restarts.refusal(JOB, view, "failed", past) == "it was cancelled with scancel"


SUBMIT = "backends/batch/submit"
ARRAY = "backends/slurm/array"
ACCEPTS = ["bash", "-c", "env > seen; echo Submitted batch job 7"]
REFUSES = ["bash", "-c", "env > seen; echo sbatch: error: Invalid account >&2; exit 1"]


def submission(*words, **values):
    """The command that submits a batch script."""
    return scripts.command_after("backends/slurm", SUBMIT, *words, **values)


@pytest.mark.parametrize(("sbatch", "code"), [(ACCEPTS, 0), (REFUSES, 1)], ids=["accepted", "refused"])
@pytest.mark.parametrize("name", ["submit", "array"])
def test_secrets_are_in_the_environment_of_sbatch_and_in_no_file(tmp_path, monkeypatch, name, sbatch, code):
    """Not by their own names, which could change what sbatch does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job-0").mkdir()
    command = {
        "submit": submission(
            *sbatch, dir=f"{tmp_path}/attempt-1", folder=str(tmp_path), path="job.sbatch", secrets=2
        ),
        "array": scripts.command(ARRAY, "job-0", path="array.sbatch", submit=sbatch, secrets=2),
    }[name]
    text = "export TOKEN='hush\nhush'\n" + ("YWdlbnQ=\n" if name == "submit" else "") + "script\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == code, done
    (seen,) = tmp_path.rglob("seen")
    assert "CLUSTER_SECRET_VALUES=export TOKEN='hush\nhush'\n" in seen.read_text()
    assert "\nTOKEN=" not in seen.read_text()
    seen.unlink()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert "script\n" in [path.read_text() for path in files]
    assert not [path for path in files if "hush" in path.read_text()]


def test_each_job_of_an_array_has_the_number_of_its_task(tmp_path):
    """More folders than the 128 KB of one argument have room for."""
    folders = [tmp_path / f"{'long' * 20}-{task}" for task in range(1200)]
    for folder in folders:
        folder.mkdir()
    command = scripts.command(
        "backends/slurm/array",
        *map(str, folders),
        path=str(tmp_path / "a b.sbatch"),
        secrets=0,
        submit=ACCEPTS,
    )
    assert sum(map(len, command)) > 128 * 1024
    subprocess.run(command, input="script\n", text=True, check=True, capture_output=True, cwd=tmp_path)
    assert [(folder / "submitted").read_text() for folder in folders] == [
        f"7_{task}\n" for task in range(1200)
    ]
    assert (tmp_path / "a b.sbatch").read_text() == "script\n"


@pytest.mark.parametrize(
    ("options", "has", "message"),
    [
        ({}, {}, ""),
        ({"export": "ALL,X"}, {}, ""),
        ({"export": "NONE"}, {}, "--set export=NONE: the job gets its secrets in its environment"),
        ({"export": "A,B"}, {}, "--set export=A,B: the job gets its secrets in its environment"),
        ({}, {"stores_env": [""]}, "login: Slurm would store the secrets in its accounting database"),
    ],
)
def test_secrets_that_the_job_would_not_get_or_that_slurm_would_store_are_an_error(options, has, message):
    has = {"partition": ["gpu*|3|8|gpu:2|1:00:00"], **has}
    job = replace(JOB, queue=Queue(LOGIN, options))
    assert problems(job, has, "login") == []
    found = problems(replace(job, secrets=("TOKEN",)), has, "login")
    assert [text[: len(message)] for text, _ in found] == ([message] if message else [])


# ---- inherited variables

#: A surrounding job, a profile and a user may set these, and more in other versions.
VARIABLES = [
    *" ".join((Path(__file__).parent / "slurm_variables.txt").read_text().splitlines()[1:]).split(),
    *(
        "SLURM_OF_ANOTHER_VERSION",
        "SBATCH_OF_ANOTHER_VERSION",
        "SRUN_OF_ANOTHER_VERSION",
        "_SLURM_SPANK_OPTION_x_y",
    ),
]
#: Where the cluster is.
PLACES = {
    "SLURM_CONF": "/etc/site.conf",
    "SLURM_CONF_SERVER": "ctl",
    "SLURM_JWT": "x",
    "SLURM_SACK_SOCKET": "/s",
}
#: What Slurm itself sets in the batch script of a job with --mem=200M and --threads-per-core=1.
OWN_JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[0-1]",
    "SLURM_NNODES": "2",
    "SLURM_MEM_PER_NODE": "200",
    "SLURM_THREADS_PER_CORE": "1",
}
IS_SLURMS = re.compile("_?SLURM|S(BATCH|RUN|ALLOC|QUEUE|ACCT|INFO|CANCEL|CONTROL)_|PMI_")
#: Stands for each program of Slurm: records its arguments and its variables.
PROGRAM = r"""#!/bin/bash
name=${0##*/}
{ printf '%s\n' "$name ${*//$'\n'/ }"; env; echo; } >> "$CALLS"
case $name:$* in
    "scontrol:show hostnames"*) printf 'n0\nn1\n' ;;
    "scontrol:show job"*) echo "JobId=7 JobState=RUNNING" ;;
    scontrol:requeue*) exit 1 ;;
    srun:*) eval "$SRUN" ;;
    squeue:*) printf '%s\n' "$SQUEUE" ;;
    sbatch:*) echo "Submitted batch job 8" ;;
esac
"""


class Site:
    """A login node, which is this machine, with programs that record how they are called."""

    def __init__(self, folder):
        self.folder = folder
        self.runs = folder / "runs"
        (folder / "bin").mkdir()
        for name in ("sbatch", "srun", "squeue", "sinfo", "scancel", "scontrol"):
            (folder / "bin" / name).write_text(PROGRAM)
            (folder / "bin" / name).chmod(0o755)
        #: What srun does: by default, both nodes end with this exit code.
        self.srun = 'for r in 0 1; do echo "$EXIT 1" > "$OUT/node-$r.exit"; done'
        self.exit_code = 0
        self.squeue = ""

    def plan(self, **options):
        login = replace(LOGIN, login="", run_dir=str(self.runs))
        return BACKENDS["slurm"].plan(replace(JOB, queue=Queue(login, options)), attempt=1, port=0)

    def environment(self, variables):
        out = self.runs / "digits" / "attempt-1"
        base = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "CALLS": str(self.folder / "calls"),
            "OUT": str(out),
        }
        return {**base, "SRUN": self.srun, "EXIT": str(self.exit_code), "SQUEUE": self.squeue, **variables}

    def batch(self, variables, **options):
        """Run the batch script of a job with these options."""
        (step,) = self.plan(**options).steps
        ((path, text),) = step.files.items()
        Path(path).parent.mkdir(parents=True)
        Path(path).write_text(text)
        with Path(self.runs, "digits", "slurm.log").open("w") as log:  # as Slurm opens it
            return subprocess.run(
                ["bash", path],
                env=self.environment(variables),
                stdout=log,
                stderr=log,
                timeout=60,
                check=False,
            )

    def script(self, name, /, *words, variables, text="", **values):
        """Run a script of agent/ as the launcher does."""
        command = scripts.command_after("backends/slurm", name, *words, **values)
        env = self.environment(variables)
        return subprocess.run(
            command, env=env, input=text, capture_output=True, text=True, timeout=60, check=False
        )

    def calls(self):
        """The calls, as (words, Slurm's variables)."""
        found = []
        for call in (self.folder / "calls").read_text().split("\n\n")[:-1]:
            words, *lines = call.splitlines()
            pairs = dict(line.partition("=")[::2] for line in lines if IS_SLURMS.match(line))
            found.append((words, pairs, dict(line.partition("=")[::2] for line in lines)))
        return found


CHECK = {"scheduler": "Slurm", "programs": ["sbatch", "squeue"], "image": "", "new": "", "version": []}
CANCELLATION = {"job": "digits", "launch": "0123", "scheduler": "Slurm", "lister": "squeue"}


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


@pytest.mark.parametrize(
    ("name", "words", "values", "text"),
    [
        (SUBMIT, ["sbatch", "x"], {"dir": "a", "folder": ".", "path": "x", "secrets": 0}, "\nscript\n"),
        (
            "backends/slurm/array",
            ["."],
            {"path": "array.sbatch", "secrets": 0, "submit": ["sbatch", "x"]},
            "script\n",
        ),
        (
            "backends/slurm/poll",
            ["digits", ".", "1", "a", "node-0", ""],
            {"most": 9, "format": "Name:50", "old": 0},
            "",
        ),
        ("backends/batch/cancel", [], {**CANCELLATION, "grace": 0, "folder": "."}, ""),
        ("backends/batch/check", [], {**CHECK, "run_dir": ".", "name": "digits", "needs": []}, ""),
    ],
)
def test_no_inherited_variable_reaches_a_program_of_the_login_node(
    site, monkeypatch, name, words, values, text
):
    monkeypatch.chdir(site.folder)
    inherited = dict.fromkeys(VARIABLES, "1") | PLACES
    values = {
        key: f"{site.folder}/{value}" if key in ("dir", "folder", "path") else value
        for key, value in values.items()
    }
    done = site.script(name, *words, variables=inherited, text=text, **values)
    calls = site.calls()
    assert calls, done.stderr
    assert {words: pairs for words, pairs, _ in calls} == {words: PLACES for words, _, _ in calls}


@pytest.mark.parametrize(
    ("number", "grace", "sent"),
    [
        ("Submitted batch job 7", 1, ["--batch --signal=TERM 7", "7"]),
        ("Submitted batch job 7", 0, ["7"]),
        ("7_1", 1, ["--batch --signal=TERM 7_1", "7_1"]),
    ],
)
def test_a_stop_asks_the_batch_script_before_it_cancels_the_job(site, number, grace, sent):
    folder = site.runs / "digits"
    (folder / "attempt-1").mkdir(parents=True)
    (folder / "attempt").write_text("1 n0 n1\n")
    (folder / "submitted").write_text(f"{number}\n")
    site.squeue = "7               "
    # The job is gone once scancel has cancelled it.
    program = (site.folder / "bin" / "squeue").read_text()
    gone = '! grep -q "^scancel [0-9_]* *$" "$CALLS" 2>/dev/null || exit 0\n'
    (site.folder / "bin" / "squeue").write_text(
        program.replace("name=${0##*/}\n", f"name=${{0##*/}}\n{gone}")
    )
    values = {**CANCELLATION, "grace": grace, "folder": str(folder)}
    done = site.script("backends/batch/cancel", variables={}, **values)
    assert (done.returncode, done.stdout) == (0, ""), done
    calls = [words.strip() for words, _, _ in site.calls()]
    assert [words.removeprefix("scancel ") for words in calls if words.startswith("scancel ")] == sent
    assert (folder / "attempt-1" / "grace").read_text() == f"{grace}\n"


def test_a_session_a_release_and_doctor_inherit_no_variable(site):
    """srun of `exec`, scontrol of a requeued job, and srun of doctor: their commands begin with the same function."""
    site.srun = "true"
    inherited = site.environment(dict.fromkeys(VARIABLES, "1") | PLACES)
    for text in (slurm_backend._QUIET_STEP, 'clear_slurm; exec "$0" "$@"'):
        subprocess.run([*slurm_backend._shell(text), "srun", "true"], env=inherited, timeout=60, check=True)
    where = {"run_dir": str(site.folder), "data_dir": str(site.folder), "token": "token", "timeout_s": 60}
    doctor = scripts.variables(**where) + scripts.text(
        "backends/slurm/environment.sh", "backends/slurm/doctor_job.sh"
    )
    command = ["bash", "-c", doctor, "x", "srun"]
    with subprocess.Popen(
        command, env=inherited, stdin=subprocess.PIPE
    ) as running:  # the end of its input cancels it
        assert running.wait(60) == 0
    assert [pairs for _, pairs, _ in site.calls()] == [PLACES] * 3


def test_srun_in_the_batch_script_gets_the_job_and_its_options_and_nothing_inherited(site):
    inherited = dict.fromkeys(VARIABLES, "1") | {"SLURM_EXPORT_ENV": "NONE", "SLURM_STEP_GPUS": "3"}
    done = site.batch(inherited | PLACES | OWN_JOB, mem="200M", **{"threads-per-core": "1", "time": "30"})
    assert done.returncode == 0, (site.runs / "digits" / "slurm.log").read_text()
    steps = [(words, pairs) for words, pairs, _ in site.calls() if words.startswith("srun ")]
    assert len(steps) == 2
    fresh = {
        "SLURM_NODELIST",
        "SLURM_JOBID",
    }  # Slurm sets them in every job; here they are those of VARIABLES
    for words, pairs in steps:
        assert words.startswith("srun --nodes=2 --ntasks=2 --ntasks-per-node=1 ")
        kept = {
            name: value
            for name, value in pairs.items()
            if not name.startswith(("SLURM_JOB_", "_SLURM_SPANK"))
        }
        wanted = {
            **PLACES,
            **{name: value for name, value in OWN_JOB.items() if not name.startswith("SLURM_JOB_")},
        }
        assert {name: value for name, value in kept.items() if name not in fresh} == wanted


def test_the_cores_of_a_task_come_from_the_jobs_option_only(site):
    assert site.batch(OWN_JOB | {"SLURM_CPUS_PER_TASK": "2"}, **{"cpus-per-task": "2"}).returncode == 0
    assert {pairs.get("SRUN_CPUS_PER_TASK") for words, pairs, _ in site.calls() if "srun" in words} == {"2"}


def test_a_job_that_replaces_one_counts_its_own_restarts(site):
    site.exit_code = 75
    restarted = OWN_JOB | {"SLURM_RESTART_COUNT": "1", "SLURM_EXPORT_ENV": "NONE"}
    site.srun = site.srun.replace("$OUT", str(site.runs / "digits" / "attempt-2"))
    assert site.batch(restarted).returncode == 0, (site.runs / "digits" / "slurm.log").read_text()
    ((words, pairs, every),) = [call for call in site.calls() if call[0].startswith("sbatch ")]
    assert words.startswith("sbatch --export=ALL ")
    assert (pairs, every["CLUSTER_RESTARTS"]) == ({}, "2")


FATAL = "srun: fatal: SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are mutually exclusive."


@pytest.mark.parametrize(
    ("said", "accepted", "steps"),
    [
        (FATAL, "none", 1),
        ("srun: error: Unable to create step for job 7: Invalid generic resource", "none", 1),
        (FATAL, '*" look "*', 3),  # the step of the nodes, and the one that asks whether a node is alive
    ],
)
def test_a_step_that_srun_refuses_ends_the_job_with_its_message(site, said, accepted, steps):
    (site.runs / "digits").mkdir(parents=True)
    site.srun = f'case "$*" in {accepted}) ;; *) echo {shlex.quote(said)} >&2; exit 1 ;; esac'
    assert site.batch(OWN_JOB).returncode == 71
    assert sum(words.startswith("srun ") for words, _, _ in site.calls()) == steps
    site.squeue = line("FAILED", code="71:0")
    assert statuses_of(site) == {("exited", 71, said)}


def polled(site, old=0):
    """What the script prints about both nodes. Without `old`, squeue's answers are not cached."""
    folder = site.runs / "digits"
    nodes = [word for rank in (0, 1) for word in (str(folder / "attempt-1"), f"node-{rank}", "")]
    values = {"most": 100, "format": queue.FORMAT, "old": old}
    return site.script("backends/slurm/poll", "digits", str(folder), "2", *nodes, variables={}, **values)


def statuses_of(site, old=0):
    """What the launcher reads about both nodes."""
    done = polled(site, old)
    row, attempt, _, error, *_ = done.stdout.splitlines()
    number, *hosts = attempt.split() or ["0"]
    found = seen(row, int(number), hosts, error=error.removeprefix("error: "))
    return {(each.phase, each.exit_code, each.detail) for each in found}


@pytest.mark.parametrize("planted", ["", "folder", "link", "file of all"])
def test_only_this_users_own_answers_of_squeue_are_believed(site, planted):
    """Another user shares the run directory, and has answers of their own in it."""
    if planted and os.getuid() != 0:
        pytest.skip("only root can make another user's file")
    folder = site.runs / "digits"
    own = site.runs / ".cache" / str(os.getuid())
    (folder / "attempt-1").mkdir(parents=True)
    (folder / "attempt").write_text("1 n0 n1\n")
    (folder / "submitted").write_text("Submitted batch job 7\n")
    (site.runs / ".squeue").write_text(line("FAILED"))  # of an earlier version
    victim = site.folder / "victim"
    victim.write_text("original")
    if planted:
        own.parent.mkdir()
        trap = site.folder / "trap" if planted == "link" else own
        trap.mkdir()
        (trap / "squeue").write_text(line("FAILED"))
        (trap / "squeue.new").symlink_to(victim)
        trap.chmod(0o777 if planted == "file of all" else 0o700)
        for path in (trap, trap / "squeue"):
            os.chown(path, 0 if planted == "file of all" else 12345, -1)
        if planted == "link":
            own.symlink_to(trap)
    site.squeue = line("RUNNING")
    for _ in range(2):
        assert {phase for phase, _, _ in statuses_of(site, old=1000)} == {"starting"}
    assert victim.read_text() == "original"
    assert sum(words.startswith("squeue ") for words, _, _ in site.calls()) == (2 if planted else 1)


@pytest.mark.parametrize("name", ["slurm.log", "attempt-1/srun.err", "attempt", "attempt-1/node-0.json"])
def test_a_job_shows_no_private_file_through_a_link(site, name):
    folder = site.runs / "digits"
    (folder / "attempt-1").mkdir(parents=True)
    (folder / "slurm.log").write_text("attempt 1 is job 7 on n[0-1]\n")
    site.squeue = line("RUNNING")
    for content in (
        "error: private\n",
        "srun: error: n0: task 0: Exited with exit code private\n",
        "1 private\n",
    ):
        (site.runs / "private").write_text(content)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(site.runs / "private")
        assert "private" not in polled(site).stdout


def test_a_status_of_any_size_is_read_up_to_a_bound(site):
    folder = site.runs / "digits" / "attempt-1"
    folder.mkdir(parents=True)
    (folder / "node-0.json").write_text("[" + "1," * (3 << 20))
    (folder / "srun.err").write_text("srun: " + "x" * (3 << 20))
    site.squeue = line("RUNNING")
    assert len(polled(site).stdout) < 3 << 20


def test_a_step_that_waits_says_why_until_a_node_has_started(site):
    folder = site.runs / "digits"
    (folder / "attempt-1").mkdir(parents=True)
    (folder / "attempt").write_text("1 n0 n1\n")
    (folder / "slurm.log").write_text("error: of an earlier attempt\nattempt 1 is job 7 on n[0-1]\n")
    site.squeue = line("RUNNING")
    assert {detail for _, _, detail in statuses_of(site)} == {"on n0", "on n1"}
    waits = "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"
    (folder / "attempt-1" / "srun.err").write_text(f"{waits}\n")
    assert {detail for _, _, detail in statuses_of(site)} == {f"on n0; {waits}", f"on n1; {waits}"}
    (folder / "attempt-1" / "node-0.pid").write_text("9\n")
    assert {detail for _, _, detail in statuses_of(site)} == {"on n0", "on n1"}


@pytest.mark.parametrize(
    ("variables", "options", "wrong", "notes"),
    [
        (
            ["SBATCH_PARTITION=debug"],
            {"partition": "gpu"},
            [],
            ["SBATCH_PARTITION=debug, because the job has partition"],
        ),
        (["SBATCH_PARTITION=gpu", "SBATCH_TIMELIMIT=30"], {"partition": "gpu", "time": "30"}, [], []),
        (
            ["SBATCH_MEM_PER_NODE=1G"],
            {"mem": "2G"},
            [],
            ["SBATCH_MEM_PER_NODE=1G, because the job has mem=2G"],
        ),
        (["SBATCH_ACCOUNT=ml"], {}, ["SBATCH_ACCOUNT=ml is set, but the job has no option account"], []),
        (["SBATCH_NEW_IN_2030=x"], {}, ["the job has no option new-in-2030"], []),
        (["SBATCH_EXPORT=NONE"], {}, [], ["SBATCH_EXPORT=NONE, because clusterctl sets export"]),
        (["SBATCH_JOB_NAME=x", "SBATCH_NO_REQUEUE="], {}, [], ["sets job-name", "sets no-requeue"]),
        (
            ["SLURM_CLUSTERS=b"],
            {},
            ["SLURM_CLUSTERS=b is set, but clusterctl submits to the cluster of the login"],
            [],
        ),
        (["SLURM_MEM_PER_CPU=100", "SRUN_X=1"], {}, [], ["login: ignoring SLURM_MEM_PER_CPU=100, SRUN_X=1"]),
        (
            ["SLURM_JOB_ID=7", "SLURM_NTASKS=1", "SBATCH_CPU_BIND=q"],
            {},
            [],
            ["the variables of Slurm's job 7, in which"],
        ),
        (["SLURM_TIME_FORMAT=relative", "SQUEUE_FORMAT=%i", "SALLOC_PARTITION=x"], {}, [], []),
    ],
)
def test_an_inherited_variable_is_refused_or_ignored_with_a_sentence(variables, options, wrong, notes):
    job = replace(JOB, queue=Queue(LOGIN, options))
    found, said = slurm_options.inherited(job, variables, "login")
    for texts, parts in (([message for message, _ in found], wrong), (said, notes)):
        assert len(texts) == len(parts), texts
        assert all(part in text for text, part in zip(texts, parts, strict=True)), texts
    assert all(hint for _, hint in found)
    assert [message for message, _ in problems(job, {**SITE, "inherited": variables}, "login")] == [
        message for message, _ in found
    ]


def test_the_hint_of_an_inherited_option_is_one_that_the_launch_takes():
    for variable in (
        "SBATCH_MEM_PER_GPU=8G",
        "SBATCH_CONSTRAINT=[a|b]",
        "SBATCH_EXCLUSIVE=",
        "SBATCH_OVERCOMMIT=1",
    ):
        ((_, hint),) = slurm_options.inherited(JOB, [variable], "login")[0]
        word = shlex.split(re.match("to use it: --set (.*), or ", hint)[1])[0]
        given = BACKENDS["slurm"].settings({}, Request(settings=[word]).given_settings("slurm", BACKENDS))
        assert slurm_options.inherited(replace(JOB, queue=Queue(LOGIN, given)), [variable], "login") == (
            [],
            [],
        )


def test_one_command_and_one_squeue_tell_the_states_of_all_jobs_of_a_login_node(site):
    site.squeue = (
        line("RUNNING", number=7) + "\n" + line("PENDING", number=8, name="second", reason="Resources")
    )
    words = []
    for name, number in (("digits", 7), ("second", 8), ("third", 9)):
        folder = site.runs / name
        (folder / "attempt-1").mkdir(parents=True)
        (folder / "submitted").write_text(f"Submitted batch job {number}\n")
        words += [name, str(folder), "2"]
        words += [word for rank in (0, 1) for word in (str(folder / "attempt-1"), f"node-{rank}", "")]
    (site.runs / "digits" / "attempt").write_text("1 n0 n1\n")
    values = {"most": 100, "format": queue.FORMAT, "old": 3}
    lines = site.script("backends/slurm/poll", *words, variables={}, **values).stdout.split("\n")
    heads = [lines[12 * job : 12 * job + 4] for job in range(3)]
    states = [
        found and (found.number, found.state) for found in (queue.queued_job(head[0]) for head in heads)
    ]
    assert states == [("7", "RUNNING"), ("8", "PENDING"), None]
    assert [head[1] for head in heads] == ["1 n0 n1", "", ""]
    assert sum(words.startswith("squeue") for words, *_ in site.calls()) == 1


def test_an_image_that_pyxis_cannot_import_is_named_by_the_error_of_enroot(site):
    folder = site.runs / "digits"
    (folder / "attempt-1").mkdir(parents=True)
    (folder / "submitted").write_text("Submitted batch job 7\n")
    said = "[ERROR] URL https://r.example/v2/absent/manifests/1 returned error code: 404 Not Found"
    printed = (
        "pyxis: importing docker image: absent:1",
        "slurmstepd: error: pyxis: child 5 failed with error code: 1",
        "slurmstepd: error: pyxis: failed to import docker image",
        "slurmstepd: error: pyxis: printing enroot log file:",
        f"slurmstepd: error: pyxis:     {said}",
        "slurmstepd: error: pyxis: couldn't start container",
        "slurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1",
        "srun: error: n0: task 0: Exited with exit code 1",
    )
    (folder / "attempt-1" / "srun.err").write_text("\n".join(printed) + "\n")
    site.squeue = line("FAILED", code="2:0")
    error = polled(site).stdout.splitlines()[3]
    why = f"Pyxis cannot start the container: {said.removeprefix('[ERROR] ')}"
    assert BACKENDS["slurm"].readable(error) == why
    assert seen(line("FAILED", code="2:0"), error=why)[0].detail == why
