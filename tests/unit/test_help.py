"""Help texts of both programs: `--help` fits a screen, `--help-all` has every option, and completion as well."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import cluster.cli.help
import cluster.cli.main
import cluster.cli.streams
import trainer.cli
import trainer.cli.help
import trainer.streams
from cluster.backends import BACKENDS, SUMMARIES
from cluster.cli.help import HelpCommand

PROGRAMS: dict[str, Any] = {"clusterctl": cluster.cli.main.app, "trainer": trainer.cli.app}


def shown(line: str, width: int = 100) -> list[str]:
    """Return the lines that a command prints."""
    program, *words = line.split()
    result = CliRunner().invoke(PROGRAMS[program], words, prog_name=program, terminal_width=width)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def commands_of(name: str, command: Any) -> list[tuple[str, Any]]:
    """Return all commands below `command` with their names."""
    nested = getattr(command, "commands", {})
    below = [found for key, each in nested.items() for found in commands_of(f"{name} {key}", each)]
    return [(name, command), *below]


COMMANDS = [
    found for name, app in PROGRAMS.items() for found in commands_of(name, typer.main.get_command(app))
]


@pytest.mark.parametrize(
    "line", ["clusterctl", "clusterctl launch", "clusterctl plan", "trainer", "trainer train"]
)
def test_help_fits_a_screen(line: str) -> None:
    lines = shown(f"{line} --help")
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("line", "second"),
    [("clusterctl gc", "no job record is needed"), ("trainer export", "Outputs: `boxes` (batch, n, 4)")],
)
def test_a_command_without_headings_has_its_whole_text_in_help(line: str, second: str) -> None:
    text = " ".join(" ".join(shown(f"{line} --help")).split())
    assert "--help-all" not in text
    assert second in text


@pytest.mark.parametrize("line", ["clusterctl launch", "clusterctl plan"])
def test_help_says_where_each_backend_runs_jobs(line: str) -> None:
    text = " ".join(" ".join(shown(f"{line} --help-all")).split())
    assert f"Where to run: {', '.join(BACKENDS)}, here or auto." in text
    assert all(f"{name}: {summary}. " in text for name, summary in SUMMARIES.items())


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("clusterctl launch", ["auto", "here", *BACKENDS]),
        ("clusterctl init", [name for name, each in BACKENDS.items() if "discover" in vars(type(each))]),
    ],
)
def test_completion_offers_the_backends(line: str, names: list[str]) -> None:
    words = {"COMP_WORDS": f"{line} --backend ", "COMP_CWORD": "3", "_CLUSTERCTL_COMPLETE": "complete_bash"}
    result = CliRunner().invoke(PROGRAMS["clusterctl"], [], prog_name="clusterctl", env=words)
    assert result.output.split() == names


@pytest.mark.parametrize("line", ["clusterctl launch", "clusterctl plan", "trainer train"])
def test_help_has_the_common_options_and_help_all_the_others_under_headings(line: str) -> None:
    """The descriptions of all options, and everything that `--help` says, are in `--help-all`."""
    common = "\n".join(shown(f"{line} --help"))
    everything = "\n".join(shown(f"{line} --help-all"))
    command = dict(COMMANDS)[line]
    headings = {parameter.rich_help_panel for parameter in command.params} - {None}
    assert len(headings) >= 4
    for parameter in command.params:
        name = next((option for option in parameter.opts if option.startswith("--")), "")
        if name:
            is_common = re.search(rf"^  (-\w, )?{name}\b", common, re.MULTILINE) is not None
            assert is_common == (parameter.rich_help_panel is None), name
            assert re.search(rf"^  (-\w, )?{name}\b", everything, re.MULTILINE), name
    for heading in headings:
        assert f"\n{heading}:\n" in everything
        assert f"\n{heading}:\n" not in common
    numbers = re.findall(r"Show all (\d+) options", common)
    assert numbers == [str(sum(each.param_type_name == "option" for each in command.params))]
    words = " ".join(everything.split())
    for row in re.findall(r"^  -.*?(?=^  -|\Z|^$)", common, re.MULTILINE | re.DOTALL):
        text = " ".join(row.split()).partition(" [default: ")[0]
        assert text in words or "--help" in text, text


def test_defaults_are_at_the_end_of_a_description() -> None:
    """They are values in brackets: `[default: 3; with --command: 0]`."""
    for name, command in COMMANDS:
        for parameter in command.params:
            text = " ".join((parameter.help or "").split())
            assert "(default" not in text, (name, parameter.name)
            assert "by default" not in text.lower() or parameter.name == "device", (name, parameter.name)
            assert "[default" not in text or text.endswith("]"), (name, parameter.name)


@pytest.mark.parametrize("line", ["clusterctl launch", "trainer train"])
def test_completion_offers_every_option(line: str) -> None:
    command = dict(COMMANDS)[line]
    offered = {item.value for item in command.shell_complete(typer.Context(command), "--")}
    assert {max(each.opts, key=len) for each in command.params if each.param_type_name == "option"} <= offered
    assert {"--help", "--help-all"} <= offered


def test_only_commands_with_headings_have_help_all() -> None:
    for name, command in COMMANDS:
        if isinstance(command, HelpCommand):
            has_headings = any(getattr(each, "rich_help_panel", None) for each in command.params)
            names = {option for each in command.get_params(typer.Context(command)) for option in each.opts}
            assert ("--help-all" in names) == has_headings, name


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_command_is_listed_with_a_description(program: str) -> None:
    rows = dict(re.findall(r"^  ([a-z-]+) +(\S.*)", "\n".join(shown(f"{program} --help")), re.MULTILINE))
    names = {
        name.removeprefix(f"{program} "): each for name, each in COMMANDS if name.startswith(f"{program} ")
    }
    assert {name for name, each in names.items() if " " not in name and not each.hidden} <= rows.keys()


@pytest.mark.parametrize(
    ("of_launcher", "of_trainer"),
    [(cluster.cli.help, trainer.cli.help), (cluster.cli.streams, trainer.streams)],
)
def test_both_programs_have_the_same_module(of_launcher: Any, of_trainer: Any) -> None:
    assert Path(of_launcher.__file__).read_text() == Path(of_trainer.__file__).read_text()
