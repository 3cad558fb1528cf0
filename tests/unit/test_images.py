"""Which layers a node lacks, the archive that brings them, and whether nodes have the same image."""

import hashlib
import io
import json
import tarfile

import pytest

from cluster.errors import UsageError
from cluster.images import _Layers, _Push, push, refuse_name
from cluster.images.compare import chain_ids, head, missing
from cluster.images.engine import Engine
from cluster.model import Node

OURS = ("sha256:base", "sha256:packages", "sha256:code")


@pytest.mark.parametrize(
    ("held", "lacks"),
    [
        ([], 3),
        ([OURS], 0),
        ([(*OURS, "sha256:more")], 0),
        ([OURS[:2]], 1),
        ([OURS[:1], (*OURS[:2], "sha256:old code"), ()], 1),
        # the engine has the very layers, but on another base: it cannot use them
        ([("sha256:other", *OURS[1:])], 3),
        ([OURS[1:]], 3),
    ],
)
def test_a_node_lacks_what_is_above_the_longest_common_run_from_below(held, lacks):
    assert missing(OURS, held) == lacks


def test_a_layer_is_named_after_all_below_it():
    first, second, third = chain_ids(["sha256:a", "sha256:b", "sha256:c"])
    assert first == "sha256:a"
    assert second == "sha256:" + hashlib.sha256(b"sha256:a sha256:b").hexdigest()
    assert third == "sha256:" + hashlib.sha256(f"{second} sha256:c".encode()).hexdigest()


def test_an_archive_continues_where_its_head_ends():
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as rest:
        entry = tarfile.TarInfo("code.zst")
        entry.size = 3
        rest.addfile(entry, io.BytesIO(b"abc"))
    begin = head('{"config": "ü"}', "trainer:0.1", OURS, "zst")
    with tarfile.open(fileobj=io.BytesIO(begin + layer.getvalue())) as archive:
        assert archive.getnames() == ["manifest.json", "config.json", "code.zst"]
        (manifest,) = json.load(archive.extractfile("manifest.json"))
        assert archive.extractfile(manifest["Config"]).read().decode() == '{"config": "ü"}'
        assert manifest["Layers"] == ["base.zst", "packages.zst", "code.zst"]
        assert manifest["RepoTags"] == ["trainer:0.1"]


HERE = Engine("docker", (26, 1), "linux/amd64", id="sha256:1", size=10_000_000_000, layers=OURS)
LAYERS = _Layers("{}", (4_000_000_000, 5_000_000_000, 1_000_000_000), OURS, ())


@pytest.mark.parametrize(
    ("there", "layers", "words"),
    [
        ({"free": 15_000_000_000}, LAYERS, None),
        ({"free": None}, LAYERS, None),
        ({"free": 14_000_000_000}, LAYERS, ["/docker has 14.0 GB free", "15.0 GB"]),
        ({"free": 2_000_000_000, "held": (OURS[:2],)}, LAYERS, None),
        ({"free": 1_000_000_000, "held": (OURS[:2],)}, LAYERS, ["/docker has 1.0 GB free", "1.5 GB"]),
        ({"free": 2_000_000_000, "held": (OURS[:2],)}, None, ["15.0 GB"]),
        ({"free": 2_000_000_000, "held": (OURS[:2],), "program": "podman"}, LAYERS, ["15.0 GB"]),
        ({"platform": "linux/arm64"}, LAYERS, ["the image is for linux/amd64, the machine is linux/arm64"]),
        ({"containerd": True}, LAYERS, ["containerd's store there, but not here"]),
    ],
)
def test_a_node_that_cannot_take_the_image_is_refused(there, layers, words):
    node = Node("gpu-b", "")
    found = Engine(**{"program": "docker", "version": (26,), "platform": "linux/amd64", "root": "/docker", **there})
    refusal = _Push("trainer:0.1", HERE, {"gpu-b": found}, layers, None)._refusal(node)
    if words is None:
        assert refusal is None
    else:
        assert refusal.message.startswith("gpu-b: ")
        assert refusal.hint
        assert all(word in refusal.message for word in words), refusal.message


@pytest.mark.parametrize("image", ["", "-v", "a b", "$(touch x)", "a@sha256:0", "a\nb"])
def test_a_hostile_name_is_no_image(image):
    with pytest.raises(UsageError, match="not an image's name"):
        refuse_name(image)
    with pytest.raises(UsageError, match="not an image's name"):
        push([Node("gpu-b", "", login="nobody@127.0.0.1:1")], image, None)
