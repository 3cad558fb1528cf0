from dataclasses import replace

import pytest

import trainer.config
from cluster import config
from cluster.config import Here, Request
from cluster.errors import UsageError
from cluster.model import Mount, one_box

LAPTOP = Here(cwd="/home/ann/work", user="1000:1000", python="/venv/bin/python", gpus=())
GPU_BOX = Here(cwd="/home/ann/work", user="1000:1000", python="/venv/bin/python", gpus=(0, 1, 2, 3))


def job(here=LAPTOP, backend="compose", **request):
    return config.job(Request(**request), here, backend)


def test_without_a_gpu_the_processes_are_said_to_run_on_the_cpu():
    made, notes = job(nodes=2, gpus=2)
    assert made.device == "cpu"
    assert made.command[-2:] == ("--device", "cpu")
    assert notes == ["no GPU on this machine: 2 CPU processes per node over gloo (--device cuda makes this an error)"]


def test_device_cuda_without_gpus_is_an_error():
    with pytest.raises(UsageError, match="no GPU, and 2 x 2 need 4"):
        job(nodes=2, gpus=2, device="cuda")


def test_too_few_gpus_are_an_error_when_asked_for_and_a_loud_note_otherwise():
    with pytest.raises(UsageError, match="only 4 GPUs, and 2 x 4 need 8"):
        job(GPU_BOX, nodes=2, gpus=4, device="cuda")
    made, notes = job(GPU_BOX, nodes=2, gpus=4)
    assert made.device == "cpu"
    assert "only 4 GPUs on this machine and 8 needed" in notes[0]


def test_enough_gpus_are_used_without_a_word():
    made, notes = job(GPU_BOX, nodes=2, gpus=2)
    assert (made.device, notes) == ("cuda", [])
    assert made.command == ("-m", "trainer", "train", "--device", "cuda")


def test_a_device_among_the_trainer_arguments_is_left_alone():
    made, _ = job(arguments=("--device", "cpu"))
    assert made.command == ("-m", "trainer", "train", "--device", "cpu")


def test_a_named_file_is_mounted_read_only_at_its_own_path():
    here = Here("/home/ann/work", "1:1", "py", (), existing=frozenset({"/home/ann/data/coco.yaml"}))
    made, _ = job(here, arguments=("train", "--data", "../data/coco.yaml", "--epochs", "3"))
    assert "/home/ann/data/coco.yaml" in made.command
    assert made.mounts == (Mount("/home/ann/data", "/home/ann/data", read_only=True),)


def test_a_file_that_is_not_there_stops_the_launch_unless_it_is_in_a_mount():
    with pytest.raises(UsageError, match=r"--data /d/coco\.yaml: no such file"):
        job(arguments=("--data", "/d/coco.yaml"))
    with pytest.raises(UsageError, match="no such file"):
        job(arguments=("--data=../coco.yaml",))
    made, _ = job(arguments=("--data", "/d/coco.yaml"), mounts=("/home/ann/coco:/d",))
    assert "/d/coco.yaml" in made.command


def test_a_word_is_left_alone_even_when_a_folder_has_that_name():
    folders = frozenset({"/home/ann/work/digits", "/home/ann/work/train", "/home/ann/work/SGD"})
    here = Here("/home/ann/work", "1:1", "py", (), existing=folders, folders=folders)
    made, _ = job(here, arguments=("train", "--data", "digits", "--optimizer", "SGD"))
    assert made.mounts == ()
    assert made.command[2:7] == ("train", "--data", "digits", "--optimizer", "SGD")


def test_a_folder_of_pictures_needs_no_slash():
    folders = frozenset({"/home/ann/work/pictures"})
    here = Here("/home/ann/work", "1:1", "py", (), existing=folders, folders=folders)
    for arguments in (("--data", "pictures"), ("--data=pictures",)):
        made, _ = job(here, arguments=("train", *arguments))
        assert "/home/ann/work/pictures" in made.command
        assert made.mounts == (Mount("/home/ann/work/pictures", "/home/ann/work/pictures"),)


def test_the_trainers_data_sets_are_known_by_name():
    names = {*trainer.config.PRESETS, *trainer.config.CLASSIFY_PRESETS, *trainer.config.SEGMENT_PRESETS}
    assert set(config.DATA_SETS) == names


def test_a_foreign_program_gets_the_current_folder_and_is_not_asked_for_events():
    made, _ = job(command="train.py --lr '0.1 0.2'")
    assert made.command == ("train.py", "--lr", "0.1 0.2")
    assert made.workdir == "/home/ann/work"
    assert made.mounts == (Mount("/home/ann/work", "/home/ann/work", read_only=False),)
    assert not made.says_ready


def test_the_name_comes_from_the_job_and_changes_with_it():
    first, _ = job(nodes=2)
    again, _ = job(nodes=2)
    other, _ = job(nodes=3)
    assert first.name == again.name != other.name
    assert first.name.startswith("digits-")
    there = Here("/", "1:1", "py", (), existing=frozenset({"/d/Bccd/data.yaml"}))
    assert job(there, arguments=("--data", "/d/Bccd/data.yaml"))[0].name.startswith("bccd-")
    assert job(arguments=("--data", "coco128.yaml"))[0].name.startswith("coco128-")


def test_a_module_gives_its_name_to_the_job():
    names = [job(command=text)[0].name for text in ("-m acme.train --lr 0.1", "acme/train.py --lr 0.1", "-m")]
    assert [name.rpartition("-")[0] for name in names] == ["acme", "train", "m"]


def test_automatic_ports_are_fixed_by_the_name_and_outside_the_ephemeral_range():
    assert config.auto_port("digits") == config.auto_port("digits")
    assert config.auto_port("digits", 1) != config.auto_port("digits")
    assert all(20000 <= config.auto_port(f"job-{i}", i) < 30000 for i in range(500))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"nodes": 0}, "--nodes 0"),
        ({"gpus": -1}, "--gpus -1"),
        ({"name": "Not/Good"}, "--name 'Not/Good'"),
        ({"name": "a'; echo foo"}, "--name"),
        ({"master_port": "http"}, "--master-port 'http'"),
        ({"master_port": "80"}, "--master-port 80"),
        ({"device": "gpu"}, "--device 'gpu'"),
        ({"env": ("1FOO",)}, "--env '1FOO'"),
        ({"env": ("A;B=1",)}, "--env 'A;B=1'"),
        ({"mounts": ("a:b",)}, "absolute"),
        ({"mounts": ("/a:/b:rx",)}, "--mount"),
        ({"command": "x 'y"}, "--command"),
        ({"command": " "}, "empty"),
        ({"command": "x", "arguments": ("train",)}, "exclude"),
        ({"timeout_s": 0.0}, "--timeout"),
    ],
)
def test_a_request_that_makes_no_sense_names_the_option(request_, message):
    with pytest.raises(UsageError, match=message) as caught:
        job(**request_)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("backend", "given"),
    [
        ("local", {"user": "1000:1000"}),
        ("compose", {"python": "python3"}),
        ("local", {"image": "trainer:0.1"}),
        ("local", {"mounts": ("/data",)}),
        ("local", {"build": "."}),
        ("local", {"spares": 1}),
    ],
)
def test_an_option_that_a_backend_cannot_honour_is_refused(backend, given):
    (option,) = given
    with pytest.raises(UsageError, match=f"--{option.removesuffix('s')}"):
        job(backend=backend, **given)


def test_a_range_of_nodes_is_for_machines_that_can_be_lost():
    assert job(nodes=2, min_nodes=2)[0].nodes == 2
    with pytest.raises(UsageError, match="--nodes 2:4: this machine gives as many as asked for"):
        job(nodes=4, min_nodes=2)


LISTED = """\
GPU 0: NVIDIA GeForce GTX 1080 (UUID: GPU-1111)
  MIG 1g.18gb     Device  0: (UUID: MIG-5555)
GPU 1: NVIDIA GeForce RTX 4090 (UUID: GPU-2222)
GPU 2: NVIDIA GeForce RTX 4090 (UUID: GPU-3333)
"""


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("2,1", (2, 1)),
        ("1, 7,2", (1,)),  # as CUDA does: nothing behind a wrong one
        ("GPU-33,0", (2, 0)),
        ("1,1", (1,)),
        ("-1", ()),
    ],
)
def test_only_the_visible_gpus_of_a_machine_are_taken(visible, gpus):
    assert config.visible_gpus(LISTED, visible) == gpus


def test_nodes_of_one_machine_share_the_gpus_that_are_there():
    here = replace(GPU_BOX, gpus=(3, 1))
    made, _ = job(here, nodes=2, gpus=1)
    assert [node.gpus for node in one_box(made, ["", ""])] == [(3,), (1,)]
    assert job(here, nodes=2, gpus=1, device="any")[0].gpus == (3, 1)
    assert job(here, nodes=2, gpus=2, device="any")[0].gpus == ()  # it sees both and chooses
    assert job(here, nodes=2, gpus=1, device="cpu")[0].gpus == ()


def test_a_range_of_nodes_has_the_fewest_first():
    assert config.node_range("2:4", 1) == (2, 4)
    with pytest.raises(UsageError, match="the fewest come first") as refused:
        config.node_range("4:2", 1)
    assert "--nodes 2:4" in refused.value.hint
