"""Missing layers, archive heads, and the refusal of nodes that cannot take an image."""

import hashlib
import subprocess

import pytest

from cluster.agent import scripts
from cluster.errors import UsageError
from cluster.images import chain_ids, engine, missing, push, refuse_name
from cluster.images.engine import Engine
from cluster.spec.model import Machine
from cluster.transport.parallel import together

OURS = ("sha256:base", "sha256:packages", "sha256:code")


@pytest.mark.parametrize(
    ("held", "lacks"),
    [
        ([], 3),
        ([OURS], 0),
        ([(*OURS, "sha256:more")], 0),
        ([OURS[:2]], 1),
        ([OURS[:1], (*OURS[:2], "sha256:old code"), ()], 1),
        # The engine has these layers on another base and cannot use them.
        ([("sha256:other", *OURS[1:])], 3),
        ([OURS[1:]], 3),
    ],
)
def test_node_lacks_the_layers_above_the_longest_common_prefix(held, lacks):
    assert missing(OURS, held) == lacks


def test_chain_id_covers_all_lower_layers():
    first, second, third = chain_ids(["sha256:a", "sha256:b", "sha256:c"])
    assert first == "sha256:a"
    assert second == "sha256:" + hashlib.sha256(b"sha256:a sha256:b").hexdigest()
    assert third == "sha256:" + hashlib.sha256(f"{second} sha256:c".encode()).hexdigest()


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({"platform": "linux/arm64"}, "gpu-b: the image is for linux/amd64, but the machine is linux/arm64"),
        ({"containerd": True}, "gpu-b: the engine keeps images in containerd's store there, but not here"),
    ],
)
def test_nothing_is_sent_unless_all_nodes_can_take_the_image(monkeypatch, there, said):
    fits = {
        "program": "docker",
        "version": (20,),
        "platform": "linux/amd64",
        "root": "/docker",
        "driver": "overlay2",
    }
    engines = {
        "this machine": Engine(**fits, id="sha256:1"),
        "gpu-a": Engine(**fits),
        "gpu-b": Engine(**fits | there),
    }
    monkeypatch.setattr(engine, "inspect", lambda node, image: engines[node.name])
    results = push([Machine("gpu-a", ""), Machine("gpu-b", "")], "trainer:0.1", pytest.fail, pytest.fail)
    assert results["gpu-a"].message == "gpu-a: nothing was sent, because of gpu-b"
    assert results["gpu-b"].message.startswith(said)
    assert results["gpu-b"].hint
    with pytest.raises(UsageError):
        together(results)


@pytest.mark.parametrize("image", ["", "-v", "a b", "$(touch x)", "a@sha256:0", "a\nb"])
def test_invalid_image_name_is_an_error(image):
    with pytest.raises(UsageError, match="not an image's name"):
        refuse_name(image)
    with pytest.raises(UsageError, match="not an image's name"):
        push([Machine("gpu-b", "", login="user@127.0.0.1:1")], image, pytest.fail, pytest.fail)


@pytest.mark.parametrize(
    ("program", "version", "takes"),
    [("docker", (20, 10, 24), False), ("docker", (23, 0, 0), True), ("podman", (4, 3, 1), True)],
)
def test_zstd_needs_docker_23_or_podman(program, version, takes):
    assert Engine(program, version, "linux/amd64").takes_zstd is takes


def test_a_sif_file_is_not_begun_on_a_disk_without_room_for_its_build(tmp_path):
    command = scripts.bash(
        "images/sif.sh", target=f"{tmp_path}/a/b.sif", size=10**16, environment="", runscript=""
    )
    done = subprocess.run(command, input="", capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.startswith(f"{tmp_path} has ")
    assert done.stderr.endswith(" GB free, and the build needs about 25000000 GB\n")
    assert not any(tmp_path.iterdir())
