"""The wheel, as `python -m build` makes it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("cluster", "trainer")


def test_the_wheel_has_every_file_of_the_packages_and_plans_a_job(tmp_path):
    source = tmp_path / "source"
    installed = tmp_path / "installed"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = source.glob("clusterctl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    for name in PACKAGES:
        assert _files(installed / name) == _files(ROOT / name)
        assert (installed / name / "py.typed").is_file()
    argv = [sys.executable, "-m", "cluster", "plan", "--nodes", "2", "--backend", "local"]
    env = {**os.environ, "PYTHONPATH": str(installed)}
    plan = subprocess.run(argv, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout
    assert "PET_NODE_RANK=1" in plan
    assert "PET_NNODES=2" in plan


def _files(folder):
    return {
        path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
