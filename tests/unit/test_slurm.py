"""What Slurm says in our words, what it is asked, and the batch script: all pure."""

import subprocess
from dataclasses import replace

import pytest

from cluster import rendezvous, restarts, slurm
from cluster.backends import BACKENDS
from cluster.backends.slurm import _accounted
from cluster.errors import UsageError
from cluster.inventory import from_yaml
from cluster.model import Job, Node, NodeStatus, Queue

LOGIN = Node("login", "", login="ann@cluster", run_dir="/shared/runs", data_dir="/shared/data", runtime="none")
JOB = Job(
    "digits", ("-m", "trainer", "train"), 2, 2, "/home/ann/runs", device="cpu", queue=Queue(LOGIN), max_restarts=3
)
PLAN = BACKENDS["slurm"].plan(JOB, attempt=1, port=0)
SAID = [NodeStatus("node-0", "starting"), NodeStatus("node-1", "starting")]


def line(state, restarts=0, code="0:0", start="N/A", nodes="n[0-1]", reason="None", name="digits", number=7):
    values = (name, number, "N/A", "N/A", state, restarts, code, start, nodes, reason)
    return "".join(f"{value:<{width}}" for value, width in zip(values, slurm.COLUMNS.values(), strict=True))


def seen(text, attempt=1, hosts=("n0", "n1"), said=SAID, error="", plan=PLAN):
    return slurm.statuses(plan, slurm.row(text), attempt, hosts, said, error)


def test_a_job_that_waits_says_for_what_and_until_when():
    (first, second) = seen(line("PENDING", reason="Resources", start="2026-11-21T17:00:00"), attempt=0, hosts=())
    assert (first.phase, second.phase) == ("pending", "pending")
    assert first.detail == "in the queue: for free nodes; Slurm expects its start at 2026-11-21T17:00:00"
    (first, _) = seen(line("PENDING", reason="(AssocGrpCPU)"), attempt=0, hosts=())
    assert first.detail == "in the queue: (AssocGrpCPU)"
    (first, _) = seen(line("CONFIGURING"), attempt=0, hosts=())  # its nodes boot: nobody can come late yet
    assert (first.phase, first.detail) == ("pending", "Slurm makes its nodes ready")


def test_a_node_that_runs_is_told_with_its_host():
    assert [(each.phase, each.detail) for each in seen(line("RUNNING"))] == [
        ("starting", "on n0"),
        ("starting", "on n1"),
    ]


def test_what_a_node_said_itself_counts_more_than_what_slurm_says():
    said = [NodeStatus("node-0", "exited", 1, "", 5.0), SAID[1]]
    first, second = seen(line("RUNNING"), said=said)
    assert (first.phase, first.exit_code, first.detail, first.ended_at) == ("exited", 1, "", 5.0)
    assert first.where == "on n0"
    assert second.phase == "starting"
    said = [NodeStatus("node-0", "exited", 0, "", 5.0)] * 2
    assert [each.detail for each in seen(line("COMPLETED"), said=said)] == ["", ""]


@pytest.mark.parametrize(
    ("state", "code", "phase", "detail"),
    [
        ("COMPLETED", "0:0", "exited", ""),
        ("TIMEOUT", "0:1", "lost", "its time limit was reached before it had ended (--time)"),
        ("NODE_FAIL", "0:0", "lost", "its node failed"),
        ("OUT_OF_MEMORY", "0:125", "lost", "out of memory (--slurm mem=...)"),
        (
            "FAILED",
            "0:53",
            "exited",
            "the run directory must be a folder common to all nodes, and is not: not there on the first",
        ),
        ("FAILED", "9:0", "exited", "the batch script ended with 9:0"),
        ("CANCELLED", "0:15", "exited", "cancelled with scancel"),
    ],
)
def test_how_a_job_ended_of_which_no_node_says_so(state, code, phase, detail):
    assert {(each.phase, each.detail) for each in seen(line(state, code=code), hosts=())} == {(phase, detail)}


def test_the_batch_scripts_own_complaint_is_the_reason():
    (first, _) = seen(line("FAILED", code="71:0"), hosts=(), error="n0: port 29500 is taken")
    assert (first.exit_code, first.detail) == (71, "n0: port 29500 is taken")


def test_an_attempt_that_slurm_put_back_into_the_queue_is_lost_and_the_next_one_is_not():
    assert {each.phase for each in seen(line("PENDING", restarts=1), attempt=1)} == {"lost"}
    assert {each.phase for each in seen(line("CONFIGURING", restarts=1), attempt=1)} == {"lost"}
    assert {each.phase for each in seen(line("RUNNING", restarts=1), attempt=2)} == {"lost"}
    second = replace(PLAN, attempt=2)
    assert {each.phase for each in seen(line("PENDING", restarts=1), attempt=1, plan=second)} == {"pending"}
    assert {each.phase for each in seen(line("RUNNING", restarts=1), attempt=2, plan=second)} == {"starting"}


def test_a_job_that_slurm_forgot_is_lost():
    assert slurm.row("") is None
    assert {each.detail for each in seen("")} == {"Slurm does not know the job any more"}


@pytest.mark.parametrize(
    ("line", "number", "state", "phase"),
    [
        ("4242|COMPLETED|0:0|n[0-1]", "4242", "COMPLETED", "exited"),
        ("4242_3|CANCELLED by 1000|0:15|n0", "4242_3", "CANCELLED", "exited"),
        ("4242|NODE_FAIL|0:0|n0", "4242", "NODE_FAIL", "lost"),
    ],
)
def test_a_job_that_squeue_forgot_is_read_from_sacct(line, number, state, phase):
    found = _accounted(PLAN, line)
    assert (found.number, found.state) == (number, state)
    assert {each.phase for each in slurm.statuses(PLAN, found, 1, [], SAID)} == {phase}
    assert _accounted(PLAN, "") is None


SITE = {"partition": ["gpu*|2|64|gpu:a100:4(S:0-1)|1-00:00:00", "gpu*|1|32|gpu:2|1-00:00:00", "debug|1|8|(null)|30:00"]}


def refused(job, site=SITE, **options):
    return slurm.problems(replace(job, queue=Queue(LOGIN, options)), site, "login")


@pytest.mark.parametrize(
    ("job", "options", "message"),
    [
        (JOB, {"partition": "gppu"}, "login: no partition gppu"),
        (replace(JOB, nodes=4), {}, "partition gpu: it has 3 nodes, and --nodes 4 asks for more"),
        (
            replace(JOB, device="cuda", procs_per_node=5),
            {},
            "partition gpu: its nodes have 4 GPUs, and --gpus 5 asks for more",
        ),
        (
            replace(JOB, nodes=1, device="cuda"),
            {"partition": "debug"},
            "partition debug: its nodes have no GPUs, and --gpus 2",
        ),
        (replace(JOB, nodes=1), {"partition": "debug", "time": "31"}, "its time limit is shorter than --time 31"),
        (replace(JOB, nodes=1), {"partition": "debug", "cpus-per-task": "9"}, "its nodes have 8 CPUs"),
    ],
)
def test_what_the_site_has_not_is_refused_before_submission(job, options, message):
    ((what, hint),) = refused(job, **options)
    assert message in what
    assert hint


def test_what_the_site_has_is_taken():
    assert refused(JOB) == []
    assert refused(replace(JOB, device="cuda", procs_per_node=4), time="1-00:00:00") == []
    site = {**SITE, "account": ["mine", "ours"], "qos": ["normal,long", "normal"]}
    assert refused(JOB, site, account="ours", qos="long") == []
    assert refused(JOB, site, account="theirs")[0][1] == "one of: mine, ours"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("30:00", 1800),
        ("8:00:00", 28800),
        ("1-0", 86400),
        ("1-12:30:00", 131400),
        ("soon", None),
        ("1:2:3:4", None),
    ],
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
def test_options_that_are_none_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        slurm.checked(options)


def test_a_value_that_looks_like_the_end_of_the_script_stays_a_value(tmp_path):
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
def on_a_cluster(clusterctl):
    """A cluster.yaml of a login node that nobody needs to reach to refuse what makes no sense there."""
    (clusterctl.folder / "cluster.yaml").write_text(
        "backend: slurm\nimage: /shared/x.sif\nnodes:\n"
        "  login: {login: ann@nowhere.invalid, run_dir: /shared/runs, data_dir: /shared/data}\n"
    )
    return clusterctl


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch", "--push"], "--push: the nodes of a Slurm cluster take the image from its disk"),
        (["launch", "--spares", "1"], "--spares: Slurm chooses the nodes"),
        (["launch", "--nodes", "2:4"], "--nodes 2:4: Slurm gives as many as asked for"),
        (["launch", "--slurm", "nodes=3"], "--slurm nodes=...: clusterctl sets it"),
        (["launch", "--backend", "ssh"], "--backend ssh: cluster.yaml is of a Slurm cluster"),
        (["launch", "--backend", "local", "--partition", "gpu"], "--slurm partition=gpu: only Slurm takes it"),
        (["image", "push"], "cluster.yaml: Apptainer takes a SIF file from the cluster's disk"),
    ],
)
def test_what_makes_no_sense_on_a_cluster_is_refused_in_one_line(on_a_cluster, words, message):
    code, text = on_a_cluster.run(*words)
    assert (code, text.startswith(f"error: {message}"), "Traceback" in text) == (2, True, False), text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("backend: ssh\nslurm: {time: 10}\nnodes: [a]\n", "only Slurm takes these options"),
        ("backend: slurm\nnodes: [a, b]\n", "a Slurm cluster has one node here, its login node"),
        ("backend: ssh\nnodes:\n  a: {runtime: apptainer}\n", "runtime apptainer and pyxis are for Slurm"),
        ("backend: slurm\nslurm: {array: 0-3}\nnodes: [a]\n", "clusterctl sets it"),
    ],
)
def test_a_cluster_yaml_that_mixes_the_two_is_refused_with_its_line(text, message):
    with pytest.raises(UsageError, match=message) as refused:
        from_yaml(text, "cluster.yaml")
    assert refused.value.message.startswith("cluster.yaml:")


def test_a_node_that_ended_because_the_job_was_cancelled_says_so_and_it_is_not_started_again():
    said = [NodeStatus("node-0", "exited", 135, "", 5.0), SAID[1]]
    statuses = seen(line("CANCELLED"), said=said)
    assert {each.detail for each in statuses} == {slurm.CANCELLED}
    view = rendezvous.fold(rendezvous.start(PLAN, 1.0), statuses, [], 6.0)
    past = [restarts.failure(view, "failed")]
    assert restarts.refusal(JOB, view, "failed", past) == "it was cancelled with scancel"
