"""Help texts: `--help` describes a command's common options, `--help-all` all of them under headings.

The launcher and the trainer have the same file, because neither imports the other.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

#: Settings of all commands. rich's panels would double the time of `--help`, and take a fifth of the width.
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
#: Characters of a first sentence, which is never cut.
_WHOLE = 1000
#: The base of typer's errors for unknown options, missing arguments and the like; typer does not export it.
_UsageError: Any = typer.BadParameter.__base__
_DEFAULT = re.compile(r"\s*(\[[^\[\]]*(default|required|x[<>])[^\[\]]*\])$")


class HelpCommand(TyperCommand):
    """A command whose options without a `rich_help_panel` are the common ones; a panel's name is a heading.

    `--help` prints the first paragraph of each text, and `--help-all` everything. A command whose options have no
    headings is short, and has no `--help-all`: its `--help` prints everything.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with --help-all if some options have a heading."""
        params = super().get_params(ctx)
        return [*params, self._help_all] if any(map(_heading, self.params)) else params

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the description."""
        for text in re.split(r"\n{2,}", inspect.cleandoc(self.help or "")):
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(text)
            if not self._is_full(ctx):
                break

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options, by heading."""
        params = [(param, row) for param in self.get_params(ctx) if (row := param.get_help_record(ctx))]
        is_full = self._is_full(ctx)
        _section(
            formatter,
            "Arguments",
            (row for param, row in params if param.param_type_name == "argument"),
            is_full,
        )
        options = [(_heading(param), row) for param, row in params if param.param_type_name == "option"]
        headings = list(dict.fromkeys(heading for heading, _ in options))
        for heading in sorted(headings, key=bool) if is_full else [""]:
            rows = (row for own, row in options if own == heading)
            _section(
                formatter, heading or ("Common options" if len(headings) > 1 else "Options"), rows, is_full
            )

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the example or the tables at the end without wrapping them."""
        for text in inspect.cleandoc(self.epilog or "").split("\n\n")[: None if self._is_full(ctx) else 1]:
            formatter.write_paragraph()
            formatter.write("".join(f"  {line}\n" for line in text.splitlines()))

    def _is_full(self, ctx: Any) -> bool:
        return bool(ctx.meta.get(__name__)) or not any(map(_heading, self.params))

    @functools.cached_property
    def _help_all(self) -> TyperOption:
        def show(ctx: Any, _: Any, is_given: bool) -> None:
            if is_given and not ctx.resilient_parsing:
                ctx.meta[__name__] = True
                typer.echo(ctx.get_help(), color=ctx.color)
                ctx.exit()

        text = f"Show all {sum(param.param_type_name == 'option' for param in self.params)} options and exit."
        how: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": show}
        return TyperOption(param_decls=["--help-all"], default=False, help=text, **how)


class HelpGroup(TyperGroup):
    """A program whose commands are listed under the headings of their `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, then the program's own options."""
        commands = [(name, command) for name, command in self.commands.items() if not command.hidden]
        for heading, group in groupby(commands, lambda each: _heading(each[1])):
            rows = [(name, command.get_short_help_str(_WHOLE)) for name, command in group]
            _section(formatter, heading or "Commands", rows, is_full=True)
        TyperCommand.format_options(self, ctx, formatter)  # type: ignore[arg-type]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the program's own options."""
        with _reported(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Parse the options of the command, and run it."""
        with _reported(ctx):
            return super().invoke(ctx)


@contextlib.contextmanager
def _reported(ctx: Any) -> Iterator[None]:
    """Print a mistake on the command line as `error:` and `hint:` lines, as any other, and exit with 2."""
    try:
        yield
    except _UsageError as error:
        message = error.format_message().removesuffix(".")
        if message.startswith("Usage:"):  # the whole help, for a group without a command
            raise
        command = f"{ctx.command_path} {ctx.invoked_subcommand or ''}".strip()
        if error.ctx and len(error.ctx.command_path) > len(command):
            command = error.ctx.command_path
        typer.echo(f"error: {message[0].lower()}{message[1:]}", err=True)
        typer.echo(f"hint: to list what it takes: {command} --help", err=True)
        raise SystemExit(error.exit_code) from None


def _heading(described: Any) -> str:
    return getattr(described, "rich_help_panel", None) or ""


def _section(formatter: Any, title: str, rows: Iterable[tuple[str, str]], is_full: bool) -> None:
    """Write rows of names and texts under a title; unless `is_full`, the first paragraph and the default of each."""
    shown = []
    for names, text in rows:
        first, _, rest = text.partition("\n\n")
        default = _DEFAULT.search(rest)
        short = f"{first}  {default[1]}" if default else first
        shown.append((names, " ".join(text.split()) if is_full else short))
    if shown:
        with formatter.section(title):
            formatter.write_dl(shown)
