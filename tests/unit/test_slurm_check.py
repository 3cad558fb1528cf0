"""The preflight check of the login node runs; only Slurm's programs are fakes."""

import os
import subprocess
from pathlib import Path

import pytest

from cluster.backends.slurm import login_check
from cluster.runtimes import RUNTIMES
from cluster.spec.model import Job, Machine, Node, Queue


def report(folder: Path, runtime: str, image: str, help_text: str) -> str:
    """Return the messages about an image, in a folder that has a.sqsh and a.sif."""
    for name in ("sbatch", "squeue", "scancel", "scontrol", "sinfo", "srun"):
        (folder / name).write_text(f"#!/bin/sh\necho '{help_text}'\n")
        (folder / name).chmod(0o755)
    for name in ("a.sqsh", "a.sif"):
        (folder / name).touch()
    login = Machine("login", "", runtime=runtime)
    job = Job("job", ("true",), 1, 1, "/", image=image, queue=Queue(login))
    command = login_check.command(job, run_dir=str(folder))
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    has: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        word, _, text = line.partition(" ")
        has.setdefault(word, []).append(text)
    has.pop("partition", None)
    return "\n".join(" ".join(problem) for problem in login_check.problems(job, has, "login"))


@pytest.mark.parametrize(
    ("runtime", "image", "missing"),
    [
        ("pyxis", "a.sqsh", ""),
        ("pyxis", "./a.sqsh", ""),
        ("pyxis", "b.sqsh", "no image ./b.sqsh"),
        ("pyxis", "/none/b.sqsh", "no image /none/b.sqsh"),
        ("pyxis", "nvcr.io#nvidia/pytorch:25.01-py3", ""),
        ("pyxis", "ubuntu", ""),
        ("enroot", "a.sqsh", ""),
        ("enroot", "b.sqsh", "no image b.sqsh"),
        ("apptainer", "a.sif", ""),
        ("apptainer", "b.sif", "no image b.sif"),
    ],
)
def test_a_missing_image_file_is_found_before_the_submission(tmp_path, runtime, image, missing):
    said = report(tmp_path, runtime, image, "--container-image")
    assert (missing in said) if missing else (said == ""), said


def test_a_cluster_without_pyxis_is_found_before_the_submission(tmp_path):
    assert "the runtime pyxis is not installed" in report(tmp_path, "pyxis", "ubuntu", "no such option")
    assert report(tmp_path, "apptainer", "a.sif", "no such option") == ""


@pytest.mark.parametrize(
    ("image", "given"), [("a.sqsh", "./a.sqsh"), ("d/a.sqsh", "./d/a.sqsh"), ("a:1", "a:1")]
)
def test_pyxis_does_not_take_a_file_for_a_name_in_a_registry(image, given):
    login = Machine("login", "", runtime="pyxis")
    words = RUNTIMES["pyxis"].run(Job("job", ("true",), 1, 1, "/", image=image), Node("n", login), (), ())
    assert f"--container-image={given}" in words
