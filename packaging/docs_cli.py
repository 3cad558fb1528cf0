"""Write the command-line reference from the parsers. mkdocs.yml names this file as a hook."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

PAGE = "reference/cli.md"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Append the reference to its page."""
    return f"{markdown}\n{reference()}" if page.file.src_uri == PAGE else markdown


def reference() -> str:
    """Return the reference of both programs as Markdown."""
    import cluster.cli.main
    import trainer.cli

    apps = {"clusterctl": cluster.cli.main.app, "trainer": trainer.cli.app}
    return "\n".join(line for name, app in apps.items() for line in _command(name, typer.main.get_command(app)))


def _command(name: str, command: Any) -> Iterator[str]:
    """The lines of a command: usage, text, parameters; then its subcommands."""
    depth = name.count(" ")
    context = typer.Context(command, info_name=name)
    yield f"{'##' if not depth else '###'} {name}\n"
    yield f"```text\n{name} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    for paragraph in re.split(r"\n{2,}", command.help or ""):
        yield f"{' '.join(paragraph.split())}\n"
    if rows := [row for parameter in command.params if (row := _row(parameter, context))]:
        yield "| argument or option | meaning |\n|---|---|"
        yield from [*rows, ""]
    if command.epilog:
        yield f"{command.epilog}\n"
    for each, subcommand in getattr(command, "commands", {}).items():
        if subcommand.hidden:
            continue
        yield from _command(f"{name} {each}", subcommand)


def _row(parameter: Any, context: typer.Context) -> str:
    """One row of the table. Hidden options and `--help` have none."""
    record = parameter.get_help_record(context)
    if record is None or "--help" in parameter.opts:
        return ""
    names, text = (" ".join(part.split()).replace("|", "\\|") for part in record)
    return f"| `{names}` | {text} |"
