"""Slurm states, options and limits, and the batch script: pure functions."""

import subprocess
from dataclasses import replace

import pytest

from cluster.agent import scripts
from cluster.backends import BACKENDS
from cluster.errors import UsageError
from cluster.spec import slurm
from cluster.spec.model import Job, Node, NodeStatus, Queue
from cluster.supervisor import job_state, restarts

LOGIN = Node("login", "", login="ann@cluster", run_dir="/shared/runs", data_dir="/shared/data", runtime="none")
JOB = Job(
    "digits", ("-m", "trainer", "train"), 2, 2, "/home/ann/runs", device="cpu", queue=Queue(LOGIN), max_restarts=3
)
PLAN = BACKENDS["slurm"].plan(JOB, attempt=1, port=0)
OWN = [NodeStatus("node-0", "starting"), NodeStatus("node-1", "starting")]


def line(state, restarts=0, code="0:0", start="N/A", nodes="n[0-1]", reason="None", name="digits", number=7):
    values = (name, number, "N/A", "N/A", state, restarts, code, start, nodes, reason)
    return "".join(f"{value:<{width}}" for value, width in zip(values, slurm.COLUMNS.values(), strict=True))


def seen(text, attempt=1, hosts=("n0", "n1"), own=OWN, error="", plan=PLAN):
    return slurm.statuses(plan, slurm.row(text), attempt, hosts, own, error)


def test_a_pending_job_has_a_reason_and_an_expected_start():
    (first, second) = seen(line("PENDING", reason="Resources", start="2026-11-21T17:00:00"), attempt=0, hosts=())
    assert (first.phase, second.phase) == ("pending", "pending")
    assert first.detail == "in the queue: Resources; expected start: 2026-11-21T17:00:00"
    (first, _) = seen(line("CONFIGURING"), attempt=0, hosts=())  # its nodes boot: the timeout does not run yet
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
        ("OUT_OF_MEMORY", "0:125", "lost", "out of memory (--slurm mem=...)"),
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
    assert slurm.row("") is None
    assert {each.detail for each in seen("")} == {"squeue does not list the job"}


SITE = {"partition": ["gpu*|2|64|gpu:a100:4(S:0-1)|1-00:00:00", "gpu*|1|32|gpu:2|1-00:00:00", "debug|1|8|(null)|30:00"]}


def refused(job, **options):
    return slurm.problems(replace(job, queue=Queue(LOGIN, options)), SITE, "login")


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"partition": "gppu"}, "login: no partition gppu"),
        ({"nodes": 4}, {}, "partition gpu: it has 3 nodes, and --nodes 4 asks for more"),
        ({"device": "cuda", "procs_per_node": 5}, {}, "gpu: its nodes have 4 GPUs, and --gpus 5 asks for more"),
        ({"nodes": 1, "device": "cuda"}, {"partition": "debug"}, "debug: its nodes have no GPUs, and --gpus 2"),
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
    [("90", 5400), ("30:00", 1800), ("8:00:00", 28800), ("1-0", 86400), ("1-12:30:00", 131400), ("1:2:3:4", None)],
)
def test_times_are_read_as_slurm_reads_them(text, seconds):
    assert slurm.seconds(text) == seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": "3"}, "clusterctl sets it"),
        ({"array": "0-3"}, "clusterctl sets it"),
        ({"Partition": "gpu"}, "not an option of sbatch"),
        ({"time": "soon"}, "not a time"),
        ({"comment": "a\n#SBATCH --wrap=evil"}, "quote, '\\$' or control character"),
        ({"comment": 'a" --uid=root'}, "quote, '\\$' or control character"),
        ({"mem": ""}, "has no value"),
    ],
)
def test_invalid_options_are_errors(options, message):
    with pytest.raises(UsageError, match=message):
        slurm.checked(options)


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
        (["launch", "--push"], "--push: no remote node of this job needs the image"),
        (["launch", "--spares", "1"], "--spares: --backend slurm does not support it"),
        (["launch", "--nodes", "2:4"], "--nodes 2:4: --backend slurm does not support it"),
        (["launch", "--slurm", "nodes=3"], "--slurm nodes=...: clusterctl sets it"),
        (["launch", "--backend", "ssh"], "--backend ssh: cluster.yaml has backend: slurm"),
        (["launch", "-b", "local", "--partition", "gpu"], "--slurm partition: --backend local does not support it"),
        (["image", "push"], "cluster.yaml: apptainer runs a file on the shared disk, not a Docker image"),
    ],
)
def test_an_option_that_slurm_does_not_support_is_one_error_line(slurm_cluster, words, message):
    code, text = slurm_cluster.run(*words)
    assert (code, text.startswith(f"error: {message}"), "Traceback" in text) == (2, True, False), text


def test_a_cancelled_job_is_not_restarted():
    own = [NodeStatus("node-0", "exited", 135, "", 5.0), OWN[1]]
    statuses = seen(line("CANCELLED"), own=own)
    assert {each.detail for each in statuses} == {slurm.CANCELLED}
    view = job_state.fold(job_state.start(PLAN, 1.0), statuses, [], 6.0)
    past = [restarts.failure(view, "failed")]
    assert restarts.refusal(JOB, view, "failed", past) == "it was cancelled with scancel"


ACCEPTS = ["bash", "-c", "env > seen; echo Submitted batch job 7"]
REFUSES = ["bash", "-c", "env > seen; echo sbatch: error: Invalid account >&2; exit 1"]


@pytest.mark.parametrize(("sbatch", "code"), [(ACCEPTS, 0), (REFUSES, 1)], ids=["accepted", "refused"])
@pytest.mark.parametrize("name", ["slurm_submit", "slurm_array"])
def test_secrets_are_in_the_environment_of_sbatch_and_in_no_file(tmp_path, monkeypatch, name, sbatch, code):
    """Not by their own names, which could change what sbatch does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job-0").mkdir()
    words = {
        "slurm_submit": [f"{tmp_path}/attempt-1", str(tmp_path), "2"],
        "slurm_array": ["array.sbatch", "2", "job-0", "--"],
    }
    text = "export TOKEN='hush\nhush'\n" + ("YWdlbnQ=\n" if name == "slurm_submit" else "") + "script\n"
    done = subprocess.run(
        scripts.command(name, *words[name], *sbatch), input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done
    (seen,) = tmp_path.rglob("seen")
    assert "CLUSTER_SECRET_VALUES=export TOKEN='hush\nhush'\n" in seen.read_text()
    assert "\nTOKEN=" not in seen.read_text()
    seen.unlink()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert "script\n" in [path.read_text() for path in files]
    assert not [path for path in files if "hush" in path.read_text()]


@pytest.mark.parametrize(
    ("options", "has", "message"),
    [
        ({}, {}, ""),
        ({"export": "ALL,X"}, {}, ""),
        ({"export": "NONE"}, {}, "--slurm export=NONE: the job gets its secrets in its environment"),
        ({"export": "A,B"}, {}, "--slurm export=A,B: the job gets its secrets in its environment"),
        ({}, {"stores_env": [""]}, "login: Slurm would store the secrets in its accounting database"),
    ],
)
def test_secrets_that_the_job_would_not_get_or_that_slurm_would_store_are_an_error(options, has, message):
    has = {"partition": ["gpu*|3|8|gpu:2|1:00:00"], **has}
    job = replace(JOB, queue=Queue(LOGIN, options))
    assert slurm.problems(job, has, "login") == []
    found = slurm.problems(replace(job, secrets=("TOKEN",)), has, "login")
    assert [text[: len(message)] for text, _ in found] == ([message] if message else [])
