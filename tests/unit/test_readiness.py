"""What a node lacks for a job, from what the look at it printed."""

import sys
from dataclasses import replace

import pytest

from cluster import readiness, resources
from cluster.backends import BACKENDS
from cluster.errors import NameTakenError
from cluster.model import Job, Node
from cluster.shells.local import LocalShell

HOSTS = tuple(
    Node(name, f"10.0.0.{k}", (0, 1), login=name, run_dir="/r", runtime="docker") for k, name in enumerate("ab")
)
PLAN = BACKENDS["ssh"].plan(
    Job("job", ("-m", "trainer"), 2, 2, "/runs", image="trainer:0.1", hosts=HOSTS), attempt=1, port=20000
)
ID = "sha256:" + "1" * 64


@pytest.mark.parametrize(
    ("line", "why", "hint"),
    [
        ("no_image", "b: no image trainer:0.1", "clusterctl image push b"),
        ("no_runtime docker", "b: there is no docker", "clusterctl init"),
        ("engine permission denied while trying to connect", "b: docker does not answer", "usermod -aG docker"),
        (f"image {ID} arm64 x86_64", "b: trainer:0.1 is an image for arm64, and the machine is x86_64", "--image NAME"),
        ("no_way 10.0.0.0:20000: No route to host", "b: cannot reach the master at 10.0.0.0:20000: No route", "doctor"),
        ("no_gpu 1", "b: it has no GPU 1", "cluster.yaml"),
        ("no_rsync", "b: rsync is not installed", "apt-get install rsync"),
    ],
)
def test_what_is_missing_is_said_with_the_nodes_name_and_the_next_command(line, why, hint):
    ((message, advice),) = readiness.problems(PLAN, HOSTS[1], [line])
    assert message.startswith(why)
    assert hint in advice


def test_a_path_that_is_missing_is_synced_but_for_a_program_that_sees_the_machines_own_files():
    node = Node("b", "", (), "ann@b", "/runs", "/data", "docker")
    assert readiness.bring(node, "/data/home/ann/coco") == "clusterctl sync /home/ann/coco"
    assert "the same path must be there" in readiness.bring(replace(node, runtime="none"), "/home/ann/coco")


def test_a_machine_that_has_everything_lacks_nothing():
    assert readiness.problems(PLAN, HOSTS[1], [f"image {ID} amd64 x86_64", f"image {ID} arm64 aarch64"]) == []


def test_nodes_with_another_image_are_named():
    seen = {"a": [f"image {ID} amd64 x86_64"], "b": ["image sha256:222222222 amd64 x86_64"]}
    ((name, (message, hint)),) = readiness.different(PLAN, seen).items()
    assert name == "b"
    assert message == "b: its image trainer:0.1 is 222222222, that of a is 111111111111"
    assert "clusterctl image push a b" in hint
    podman = [f"image {ID.removeprefix('sha256:')} amd64 x86_64"]  # which names the same image without the algorithm
    assert readiness.different(PLAN, {"a": seen["a"], "b": seen["a"], "c": podman}) == {}


def test_gpus_are_held_only_by_other_jobs_and_only_where_they_are_the_same():
    assert readiness.held(PLAN, HOSTS[0], ["held other 1"]) == {"other"}
    assert readiness.held(PLAN, HOSTS[0], ["held other 2", "held job 0"]) == set()


def test_this_machine_in_an_inventory_has_gpus_to_hold_and_a_network_like_the_others():
    box = Node("box", "10.0.0.7", (0, 1), run_dir="/r", runtime="none")
    plan = BACKENDS["ssh"].plan(
        Job("job", ("-m", "trainer"), 2, 2, "/runs", hosts=(box, HOSTS[1])), attempt=1, port=20000
    )
    assert readiness.held(plan, box, ["held other 1"]) == {"other"}
    ((message, hint),) = readiness.problems(plan, box, ["engine no answer"])
    assert (message.startswith("box: "), hint) == (True, "clusterctl doctor --only box")
    for step in plan.steps:
        ((_, text),) = step.files.items()
        assert "NODE_ADDRESS=10.0.0." in text
        assert "GLOO_SOCKET_IFNAME=lo" not in text


def test_a_folder_or_a_process_of_that_name_is_another_jobs():
    with pytest.raises(NameTakenError, match="b: /r/job is there already"):
        readiness.refuse_taken("job", {"a": [], "b": ["exists /r/job"]})
    with pytest.raises(NameTakenError, match="a: a job job is there already: process 7"):
        readiness.refuse_taken("job", {"a": ["held other 1", "runs process 7"], "b": []})


@pytest.mark.parametrize(("limit", "said"), [("unlimited", []), ("0", ["run_dir "])], ids=["room", "no room"])
def test_a_folder_in_which_nothing_can_be_written_is_told_whatever_the_rights(tmp_path, limit, said):
    """No file may grow there, as on a full disk."""
    words = ["none", "", str(tmp_path / "runs"), "cpu", "", sys.executable, "", "", "", ""]
    text = f"ulimit -f {limit}; trap '' XFSZ\n{resources.text('agent/common.sh', 'agent/check.sh')}"
    done = LocalShell().run(["bash", "-c", text, "prepare", *words], timeout_s=60)
    assert done.out.splitlines() == [f"{each}{tmp_path / 'runs'}" for each in said]
    assert list((tmp_path / "runs").iterdir()) == []
