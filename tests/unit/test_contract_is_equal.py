import re
from pathlib import Path

import pytest
import typer

import cluster.agent
import cluster.contract
import trainer.cli
import trainer.contract
from cluster.agent.app.node_agent import settings
from trainer.distributed import spawn

ROOT = Path(__file__).parents[2]
#: What both halves need, though neither may import the other. A package for both would have to be in the image, in the
#: wheel and on the launching machine, for some 300 lines.
COPIES = {
    "cluster/contract.py": "trainer/contract.py",
    "cluster/cli/help.py": "trainer/cli/help.py",
    "cluster/cli/streams.py": "trainer/streams.py",
    "cluster/transport/archive.py": "trainer/data/formats/archive.py",
}


@pytest.mark.parametrize(("ours", "theirs"), COPIES.items())
def test_both_halves_have_the_same_file(ours, theirs):
    assert (ROOT / ours).read_bytes() == (ROOT / theirs).read_bytes(), (
        f"run: cp {ours} {theirs}, or the reverse"
    )


def test_the_launcher_knows_the_trainers_commands():
    assert {*cluster.contract.COMMANDS} == {*typer.main.get_group(trainer.cli.app).commands}


def test_the_agent_which_imports_neither_half_has_the_same_values():
    ours = {
        name: getattr(cluster.contract, name) for name in dir(cluster.contract) if hasattr(settings, name)
    }
    assert ours.keys() >= {"STOP_GRACE_S", "GRACE_MARGIN_S", "GRACE_FILE", "EVENT_MARK", "EXIT_RUN_ME_AGAIN"}
    assert {name: getattr(settings, name) for name in ours if name.isupper()} == {
        name: value for name, value in ours.items() if name.isupper()
    }


def test_in_a_job_a_program_with_ranks_of_its_own_waits_longer_than_any_agent(monkeypatch):
    monkeypatch.delenv(cluster.contract.JOB_ID, raising=False)
    assert spawn.stop_grace_s() == cluster.contract.STOP_GRACE_S
    monkeypatch.setenv(cluster.contract.JOB_ID, "job")
    assert spawn.stop_grace_s() > cluster.contract.MAX_GRACE_S + cluster.contract.GRACE_MARGIN_S


def test_every_name_is_described():
    """Those that only the launcher and its agent share are described at the agent."""
    page = ROOT.joinpath("docs/reference/contract.md").read_text()
    for name, value in vars(cluster.contract).items():
        if name.isupper() and isinstance(value, str):
            assert f"`{value}`" in page or re.search(rf"{re.escape(value)}\b", cluster.agent.__doc__), name
