"""The preflight check: problems of a node, from the output of agent/check.sh."""

from dataclasses import replace

import pytest

from cluster.backends import BACKENDS, preflight
from cluster.errors import GpusHeldError, NameTakenError, PortTakenError, UsageError
from cluster.spec.model import Job, Machine
from cluster.transport.local import LocalShell

HOSTS = tuple(
    Machine(name, f"10.0.0.{k}", (0, 1), login=name, run_dir="/r", runtime="docker")
    for k, name in enumerate("ab")
)
PLAN = BACKENDS["ssh"].plan(
    Job("job", ("-m", "trainer"), 2, 2, "/runs", image="trainer:0.1", hosts=HOSTS), attempt=1, port=20000
)
ID = "sha256:" + "1" * 64


@pytest.mark.parametrize(
    ("line", "why", "hint"),
    [
        ("no_image", "b: no image trainer:0.1", "add --push"),
        ("no_runtime docker", "b: docker is not installed", "clusterctl init"),
        (
            "engine permission denied while trying to connect",
            "b: docker does not answer",
            "usermod -aG docker",
        ),
        (
            f"image {ID} arm64 x86_64",
            "b: trainer:0.1 is an image for arm64, but the machine is x86_64",
            "--image NAME",
        ),
        (
            "no_way 10.0.0.0:20000: No route to host",
            "b: cannot reach the master at 10.0.0.0:20000: No route",
            "doctor",
        ),
        ("no_python", "b: there is no program python3", "--python PATH"),
        ("no_rsync", "b: rsync is not installed", "apt-get install rsync"),
    ],
)
def test_a_problem_has_the_nodes_name_and_a_hint(line, why, hint):
    (error,) = preflight.problems(PLAN, HOSTS[1], [line])
    assert error.message.startswith(why)
    assert hint in error.hint


def test_compatibility_libraries_of_the_image_make_an_older_driver_sufficient():
    plan = replace(PLAN, job=replace(PLAN.job, device="cuda"))
    report = [
        "listed GPU 0: A (UUID: GPU-a)",
        "listed GPU 1: A (UUID: GPU-b)",
        "driver=535.183.01",
        "cuda=13.0",
    ]
    (error,) = preflight.problems(plan, HOSTS[1], report)
    assert error.message == "b: driver 535.183.01 is too old: CUDA 13.0 needs 580 or newer"
    assert preflight.problems(plan, HOSTS[1], [*report, "compat=yes"]) == []


def test_the_hint_for_a_missing_path_is_sync_or_with_runtime_none_a_common_disk():
    node = Machine("b", "", (), "ann@b", "/runs", "/data", "docker")
    assert node.hint_for_missing("/data/home/ann/coco") == "clusterctl sync /home/ann/coco"
    assert "provide the same path there" in replace(node, runtime="none").hint_for_missing("/home/ann/coco")


def test_a_complete_machine_has_no_problems():
    assert preflight.problems(PLAN, HOSTS[1], [f"image {ID} amd64 x86_64", f"image {ID} arm64 aarch64"]) == []


def test_nodes_with_another_image_are_named():
    seen = {"a": [f"image {ID} amd64 x86_64"], "b": ["image sha256:222222222 amd64 x86_64"]}
    ((name, error),) = preflight.different(PLAN, seen).items()
    assert name == "b"
    assert error.message == "b: its image trainer:0.1 is 222222222, but on a it is 111111111111"
    assert "--push" in error.hint
    podman = [f"image {ID.removeprefix('sha256:')} amd64 x86_64"]  # podman omits the algorithm of the id
    assert preflight.different(PLAN, {"a": seen["a"], "b": seen["a"], "c": podman}) == {}


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        ("held other 1", GpusHeldError, "b: job other is using its GPUs"),
        ("exists /r/job", NameTakenError, "b: /r/job already exists"),
        ("runs process 7", NameTakenError, "b: a job job already exists: process 7"),
        ("port taken by pid 7", PortTakenError, "b: port 20000 is taken by pid 7"),
        (
            'port taken users:(("python",pid=7,fd=3))',
            PortTakenError,
            "b: port 20000 is taken by python (pid=7)",
        ),
    ],
)
def test_a_conflict_with_another_job_has_its_kind(line, kind, message):
    (error,) = preflight.conflicts(PLAN, HOSTS[1], [line, "held job 0"])
    assert (type(error), error.message) == (kind, message)


def test_one_error_lists_all_problems_else_the_conflicts_of_one_kind():
    missing = [UsageError("a: no image", "push"), UsageError("b: no image", "push")]
    taken = preflight.conflicts(PLAN, HOSTS[0], ["port taken", "held other 1", "held other 0"])
    with pytest.raises(UsageError) as error:
        preflight.refuse([*taken, *missing])
    assert (error.value.message.split("\n       "), error.value.hint) == (
        ["a: no image", "b: no image"],
        "push",
    )
    with pytest.raises(UsageError) as error:
        preflight.refuse(taken)
    assert error.value.message == "a: job other is using its GPUs"
    preflight.refuse([])


def test_this_machine_in_an_inventory_is_checked_like_the_others():
    box = Machine("box", "10.0.0.7", (0, 1), run_dir="/r", runtime="none")
    plan = BACKENDS["ssh"].plan(
        Job("job", ("-m", "trainer"), 2, 2, "/runs", hosts=(box, HOSTS[1])), attempt=1, port=20000
    )
    (error,) = preflight.problems(plan, box, ["engine no answer"])
    assert (error.message.startswith("box: "), error.hint) == (True, "clusterctl doctor --only box")
    for step in plan.steps:
        ((_, text),) = step.files.items()
        assert "NODE_ADDRESS=10.0.0." in text
        assert "GLOO_SOCKET_IFNAME=lo" not in text


@pytest.mark.parametrize(
    ("limit", "lines"), [("unlimited", []), ("0", ["run_dir "])], ids=["space", "no space"]
)
def test_a_run_directory_without_space_is_reported_despite_its_permissions(tmp_path, limit, lines):
    """A file size limit of 0 acts as a full disk."""
    plan = replace(PLAN, job=replace(PLAN.job, device="cpu", python="true"))
    *bash, text, name = preflight.command(plan, Machine("n", "", run_dir=str(tmp_path / "runs")))
    done = LocalShell().run([*bash, f"ulimit -f {limit}; trap '' XFSZ\n{text}", name], timeout_s=60)
    assert done.out.splitlines() == [f"{each}{tmp_path / 'runs'}" for each in lines]
    assert list((tmp_path / "runs").iterdir()) == []
