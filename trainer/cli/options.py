"""Options of a command, made from the fields of its settings."""

import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from trainer.config.settings import option_of


def takes(settings: type[Any], **more: tuple[Any, Any]) -> Callable[[Any], Any]:
    """Return a decorator for a command that takes the fields of `settings`, and `more` options of (type, default)."""
    kinds = typing.get_type_hints(settings)
    fields = [
        (field.name, _kind_of(field, kinds[field.name]), field.default)
        for field in dataclasses.fields(settings)
    ]
    fields.sort(key=lambda field: field[2] is not dataclasses.MISSING)  # required options first
    fields += [(name, kind, default) for name, (kind, default) in more.items()]
    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for name, kind, default in fields:
        default = inspect.Parameter.empty if default is dataclasses.MISSING else default
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        )

    def declare(command: Any) -> Any:
        command.__signature__ = inspect.Signature(parameters)
        return command

    return declare


def _kind_of(setting: dataclasses.Field[Any], kind: Any) -> Any:
    """Return the type of a setting in the form that typer reads."""
    declared = setting.metadata
    if setting.name == "hyp":
        kind = str  # a file
    elif setting.default is None:
        kind = typing.Optional[kind]  # noqa: UP045 (`kind` is a value)
    names = declared["names"] or (option_of(setting.name),)
    shown = setting.default not in (None, "")
    text = declared["help"]
    heading = declared["heading"]
    option = typer.Option(
        *names, help=text, metavar=declared["metavar"], show_default=shown, rich_help_panel=heading
    )
    return Annotated[kind, option]


def typed_options(context: typer.Context) -> frozenset[str]:
    """Return the names of the settings that the user typed."""
    typed = {
        k
        for k in context.params
        if (source := context.get_parameter_source(k)) and source.name == "COMMANDLINE"
    }
    return frozenset(typed | ({"schedule"} if "cos_lr" in typed else set()))
