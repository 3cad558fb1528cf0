"""The container image: its users, the owners of its files, and the size of a rebuild."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cluster.spec.image import DEFAULT_IMAGE
from tests.unit.yolo_folder import squares

pytestmark = pytest.mark.engine

PROJECT = Path(__file__).parents[2]
STRANGER = 1234  # a uid that is not in the image's /etc/passwd


def docker(*argv: str) -> str:
    """Return the command's output; fail the test if the command fails."""
    completed = subprocess.run(["docker", *argv], capture_output=True, text=True, timeout=240, check=False)
    assert completed.returncode == 0, f"docker {argv}\n{completed.stdout}{completed.stderr}"
    return completed.stdout


@pytest.fixture(scope="module")
def image() -> str:
    """The image that `make image` builds, which must be the launcher's default."""
    makefile = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "image"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert makefile.stdout.split() == ["packaging/image.sh", DEFAULT_IMAGE]
    return DEFAULT_IMAGE


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder that belongs to an unknown uid, if this test runs as root."""
    folder = tmp_path / "run"
    folder.mkdir()
    tmp_path.chmod(0o755)
    if os.getuid() == 0:
        os.chown(folder, STRANGER, STRANGER)
    return folder


def run_with(image: str, run_dir: Path, user: str, *command: str) -> str:
    mount = ["--volume", f"{run_dir}:/mnt/run", "--env", "CLUSTER_RUN_DIR=/mnt/run"]
    return docker("run", "--rm", "--user", user, *mount, image, *command)


@pytest.mark.parametrize("user", ["the caller's", "root"])
def test_files_belong_to_the_owner_of_the_run_folder(image: str, run_dir: Path, user: str) -> None:
    owner = run_dir.stat()
    named = "0:0" if user == "root" else f"{owner.st_uid}:{owner.st_gid}"
    run_with(image, run_dir, named, "sh", "-c", "mkdir /mnt/run/sub && echo text > /mnt/run/sub/file")
    written = (run_dir / "sub" / "file").stat()
    assert (written.st_uid, written.st_gid) == (owner.st_uid, owner.st_gid)


def test_a_run_folder_of_another_user_is_an_error_before_the_start(image: str, run_dir: Path) -> None:
    run_dir.chmod(0o755)
    owner = run_dir.stat()
    argv = ["docker", "run", "--rm", "--user", "4321:4321", "--volume", f"{run_dir}:/mnt/run"]
    completed = subprocess.run(
        [*argv, "--env", "CLUSTER_RUN_DIR=/mnt/run", image, "echo", "started"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (completed.returncode, completed.stdout) == (2, "")
    assert f"--user {owner.st_uid}:{owner.st_gid}" in completed.stderr


def test_uid_without_passwd_entry_can_use_every_package(image: str) -> None:
    code = (
        "import getpass, pathlib, torch, torchvision, cv2, matplotlib.pyplot, trainer, cluster;"
        "from torch._inductor.runtime.cache_dir_utils import cache_dir;"
        "(pathlib.Path.home() / 'file').write_text(getpass.getuser()); pathlib.Path(cache_dir()).mkdir(exist_ok=True)"
    )
    stranger = f"{STRANGER}:{STRANGER}"
    docker("run", "--rm", "--user", stranger, image, "python3", "-W", "error::UserWarning", "-c", code)
    two_ranks = ("torchrun", "--standalone", "--nproc-per-node", "2", "--no-python")
    command = ("sh", "-c", "echo rank $RANK of $USER")
    printed = docker("run", "--rm", "--user", stranger, image, *two_ranks, *command)
    assert sorted(printed.split("\n")[:2]) == [f"rank {rank} of uid-{STRANGER}" for rank in (0, 1)]


def test_image_alone_prints_help_as_an_ordinary_user(image: str) -> None:
    assert "usage" in docker("run", "--rm", image).lower()
    assert docker("run", "--rm", image, "id", "-u").strip() == "1000"
    docker("run", "--rm", image, "clusterctl", "--help")


def test_nothing_of_the_build_machine_is_kept(image: str) -> None:
    files = "find /run/secrets /mnt /tmp /root/.cache /etc/pip.conf -type f 2>/dev/null || true"
    assert docker("run", "--rm", "--user", "0:0", image, "sh", "-c", files) == ""
    environment = docker("image", "inspect", "--format", "{{json .Config.Env}}", image)
    assert "PIP_" not in environment
    assert "file:/" not in environment


def test_labels_name_the_version_and_its_commit(image: str) -> None:
    found = json.loads(docker("image", "inspect", "--format", "{{json .Config.Labels}}", image))
    labels = {
        name.rpartition(".")[2]: value
        for name, value in found.items()
        if name.startswith("org.opencontainers.")
    }
    assert labels.keys() >= {"title", "description", "licenses"}
    assert labels["version"] == docker("run", "--rm", image, "clusterctl", "--version").split()[-1]
    if (PROJECT / ".git").exists():
        commit = ["git", "show", "--no-patch", "--format=%cI", labels["revision"].removesuffix("-dirty")]
        date = subprocess.run(commit, cwd=PROJECT, capture_output=True, text=True, check=True).stdout.strip()
        assert labels["created"] == date


def test_changed_line_of_our_code_rebuilds_a_thin_layer(image: str, tmp_path: Path) -> None:
    """The new image shares all but its last layers with the old one: under 2 % of the bytes are new."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("cluster", "trainer", "packaging", "requirements"):
        shutil.copytree(PROJECT / name, tmp_path / name, ignore=ignored)
    for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "setup.py", "LICENSE", "README.md"):
        if (PROJECT / name).exists():
            shutil.copy2(PROJECT / name, tmp_path / name)
    with (tmp_path / "trainer" / "__init__.py").open("a") as file:
        file.write("\nCHANGED = True\n")

    changed = "trainer-test:changed"
    try:
        build = ["packaging/image.sh", changed]
        subprocess.run(build, cwd=tmp_path, check=True, capture_output=True, timeout=240)
        assert (
            docker("run", "--rm", changed, "python3", "-c", "import trainer; print(trainer.CHANGED)")
            == "True\n"
        )
        layers, new_layers = (
            docker("image", "inspect", "--format", "{{join .RootFS.Layers \"\\n\"}}", name).split()
            for name in (image, changed)
        )  # fmt: skip
        shared = sum(old == new for old, new in zip(layers, new_layers, strict=False))
        sizes = docker("history", "--human=false", "--format", "{{.Size}}", changed).split()
        sizes = [int(size) for size in sizes if size != "0"][::-1]  # from the base up, as the layers are
        rebuilt = sum(sizes[-(len(new_layers) - shared) :])
        assert shared < len(new_layers)
        assert rebuilt < 0.02 * sum(sizes)
    finally:
        subprocess.run(["docker", "image", "rm", "--force", changed], capture_output=True, check=False)


def test_with_64_mb_of_shared_memory_there_are_fewer_workers_and_a_warning(image: str, run_dir: Path) -> None:
    data = squares(run_dir.parent / "set", train=16)
    data.write_text("path: /mnt/set\ntrain: images/train\nval: images/val\nnames: [green, red]\n")
    shutil.copy(PROJECT / "tests" / "unit" / "tiny.yaml", data.parent)
    arguments = [
        "--data",
        "/mnt/set/data.yaml",
        "--imgsz",
        "640",
        "--batch",
        "8",
        "--epochs",
        "1",
        "--workers",
        "4",
    ]
    arguments += ["--cfg", "/mnt/set/tiny.yaml"]
    printed = docker(
        *(
            "run",
            "--rm",
            "--user",
            "0:0",
            "--shm-size",
            "64m",
            "--volume",
            f"{run_dir.parent / 'set'}:/mnt/set",
        ),
        *("--volume", f"{run_dir}:/mnt/run", "--env", "CLUSTER_RUN_DIR=/mnt/run", image),
        *("trainer", "train", *arguments, "--noval"),
    )
    assert "/dev/shm has room for" in printed
    assert ": starting" in printed
    assert "done in" in printed
