import os
from pathlib import Path

import pytest
import yaml

from cluster.backends import BACKENDS
from cluster.cli.launch import read_secrets, secret_values
from cluster.errors import UsageError
from cluster.spec.model import Job


def test_values_of_a_file_are_read_unchanged(tmp_path):
    file = tmp_path / "tokens.env"
    file.write_text('# mine\nTOKEN=a\'b c=d\n\nexport QUOTED="x y"\nEMPTY=\n')
    assert read_secrets(str(file)) == {"TOKEN": "a'b c=d", "QUOTED": "x y", "EMPTY": ""}
    assert read_secrets("") == {}


def test_an_error_names_the_number_of_a_bad_line_not_its_text(tmp_path):
    file = tmp_path / "tokens.env"
    file.write_text("A=1\nhunter2\n")
    with pytest.raises(UsageError, match="line 2") as refused:
        read_secrets(str(file))
    assert "hunter2" not in refused.value.message + refused.value.hint


def test_values_come_from_the_file_or_the_environment(monkeypatch):
    monkeypatch.setenv("FROM_HERE", "here")
    monkeypatch.setenv("A", "of the environment, which the file overrides")
    monkeypatch.delenv("NOWHERE", raising=False)
    assert secret_values(["A", "FROM_HERE"], {"A": "1"}) == {"A": "1", "FROM_HERE": "here"}
    with pytest.raises(UsageError, match="NOWHERE: this variable is not set in your environment"):
        secret_values(["NOWHERE"], {})


def test_compose_gets_secrets_and_the_ids_of_images_on_its_standard_input(tmp_path, monkeypatch):
    """Only docker is a fake. Its image has an ID, because the name may get another image."""
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\ncase $1 in image) echo sha256:12 ;; *) cat > '{tmp_path}/stdin' ;; esac\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = Job("job", ("x.py",), 2, 1, str(tmp_path), image="trainer:0.1", setup="true", secrets=("TOKEN",))
    plan = BACKENDS["compose"].plan(job, attempt=1, port=20000)
    Path(plan.attempt_dir).mkdir(parents=True)
    BACKENDS["compose"].submit(plan, {"TOKEN": "a$b"})
    services = yaml.safe_load((tmp_path / "stdin").read_text())["services"].values()
    found = [(each["environment"]["CLUSTER_IMAGE"], each["environment"]["TOKEN"]) for each in services]
    assert found == [("trainer:0.1 sha256:12", "a$$b")] * 2
