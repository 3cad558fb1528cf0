"""Exported task files: the keys that SkyPilot and dstack read, and what is said of the rest."""

import shlex
from typing import Any

import pytest
import yaml

from cluster.errors import UsageError
from cluster.spec import exporters
from cluster.spec.here import Here
from cluster.spec.request import Request

HERE = Here("/home/ann/work", "1000:1000", "python3", exists=lambda path: path == "/home/ann/coco/data.yaml")
IMAGE = "registry.example/trainer:0.1"


def task(to: str, **options: Any) -> tuple[dict[str, Any], str]:
    """Return the keys of the exported file, and its comments."""
    text = exporters.export(Request(**{"nodes": "2", "gpus": 4, "image": IMAGE, **options}), HERE, to)
    return yaml.safe_load(text), "\n".join(line for line in text.splitlines() if line.startswith("#"))


def test_a_program_with_its_folder_setup_and_secrets() -> None:
    options = {"command": "train.py --name 'a b'", "setup": "pip install -e .", "env": ["A=b", "TOKEN"]}
    found, said = task("skypilot", **options)
    assert (found["num_nodes"], found["workdir"]) == (2, HERE.cwd)
    assert found["resources"]["image_id"] == f"docker:{IMAGE}"
    assert set(found["resources"]["accelerators"].values()) == {4}
    assert (found["envs"], found["secrets"], found["setup"]) == (
        {"A": "b"},
        {"TOKEN": None},
        "pip install -e .",
    )
    assert shlex.split(found["run"])[-3:] == ["train.py", "--name", "a b"]
    assert "--secret TOKEN" in said

    found, _ = task("dstack", **options)
    assert (found["type"], found["nodes"], found["image"], found["resources"]) == (
        "task",
        2,
        IMAGE,
        {"gpu": 4},
    )
    assert found["files"] == [f"{HERE.cwd}:{found['working_dir']}"]
    assert found["env"] == ["A=b", "TOKEN"]
    assert found["commands"][0] == "pip install -e ."
    assert shlex.split(found["commands"][1])[-3:] == ["train.py", "--name", "a b"]


@pytest.mark.parametrize("to", exporters.FORMATS)
def test_the_trainer_with_its_data(to: str) -> None:
    found, _ = task(to, arguments=["--data", "../coco/data.yaml"], device="cpu")
    command = found["run"] if to == "skypilot" else found["commands"][-1]
    assert command.endswith("-m trainer train --data /home/ann/coco/data.yaml --device cpu")
    mounted = found.get("file_mounts") or dict(reversed(text.split(":")) for text in found["files"])
    assert list(mounted) == list(mounted.values())
    assert "accelerators" not in found.get("resources", {})
    assert "gpu" not in found.get("resources", {})


def test_the_prologue_precedes_the_setup_and_the_program() -> None:
    options = {"command": "train.py", "setup": "pip list", "prologue": "module load cuda"}
    found, _ = task("skypilot", **options)
    assert found["setup"] == "module load cuda\npip list"
    assert found["run"].startswith("module load cuda\ntorchrun")
    assert task("dstack", **options)[0]["commands"][:2] == ["module load cuda", "pip list"]


@pytest.mark.parametrize("to", exporters.FORMATS)
@pytest.mark.parametrize(("gpus", "number"), [("4,1", 4), ("all", 2)])
def test_a_task_has_one_number_for_all_nodes(to: str, gpus: str, number: int) -> None:
    with pytest.raises(UsageError) as caught:
        task(to, gpus=gpus)
    assert caught.value.message == f"--gpus {gpus}: a task file has one number for all nodes"
    assert caught.value.hint == f"give all nodes one number: --gpus {number}"
    task(to, gpus=str(number))


@pytest.mark.parametrize("to", exporters.FORMATS)
def test_what_is_not_taken_over_is_said(to: str) -> None:
    left_out = {
        "spares": 1,
        "partition": "gpu",
        "settings": ["mem=3G"],
        "run_root": "out",
        "stall_timeout_s": 9.0,
    }
    left_out |= {"run_options": ["--memory=3g"], "grace": "90s", "rendezvous_timeout_s": 9.0}
    said = task(to, nodes="2:4", **left_out)[1]
    for option in (
        "--spares",
        "--set partition",
        "--set mem",
        "--run-dir",
        "--stall-timeout",
        "--nodes 2:4",
        "--run-option",
        "--grace",
        "--rendezvous-timeout",
    ):
        assert f"not taken over: {option}" in said
    assert task(to, nodes="2:4")[0]["num_nodes" if to == "skypilot" else "nodes"] == 4


def test_an_image_of_this_machine_and_an_unknown_launcher_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot pull"):
        task("dstack", image="")
    with pytest.raises(UsageError, match="unknown"):
        task("ray")
