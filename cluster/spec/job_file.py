"""job.yaml: reads the keys, which request.py declares, into options. job_text.py writes them. Pure."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, create_model

from cluster.spec import schema
from cluster.spec.job_text import ENV, SECRETS
from cluster.spec.request import Declared, keyed
from cluster.spec.schema import Environment, EnvName, Keys, Text
from cluster.spec.traits import Table

_SECRETS_HELP = (
    "Names of variables whose values come from your environment. The values are in no plan or record, and are masked "
    "in logs."
)


class JobFile(Keys):
    """A job of clusterctl. Each key is an option of `clusterctl launch`, and the option overrides it."""


def file_type(table: Table) -> type[JobFile]:
    """Return the model of job.yaml, with the names and sections of the backends in `table`."""
    made: dict[str, Any] = {}
    for keyed_option in keyed():
        made[keyed_option.key_name] = (_type(keyed_option, table), _field(keyed_option))
        if keyed_option.key_name == ENV:
            made[SECRETS] = (list[EnvName], Field(default_factory=list, description=_SECRETS_HELP))
    return create_model(
        "JobFile", __base__=JobFile, __doc__=JobFile.__doc__, **made, **schema.sections(table)
    )


def _field(each: Declared) -> Any:
    """Return the default and the description of an option's key."""
    description = " ".join((each.key.help or each.help).split())
    if each.key_name == ENV:
        return Field(default_factory=dict, description=description)
    if isinstance(each.default, list):
        return Field(default_factory=list, description=description)
    return Field(
        default=each.key.write(each.default) if each.default else each.default, description=description
    )


def _type(each: Declared, table: Table) -> Any:
    """Return pydantic's type of an option's key."""
    key = each.key
    kind = each.type
    if each.key_name == ENV:
        return Environment
    if each.key_name == "backend":
        names = ("auto", "here", *table)
        return Literal[names]
    if key.read:
        return Annotated[
            kind, BeforeValidator(key.read, json_schema_input_type=_at_least(key.takes, key.least))
        ]
    if key.choices:
        return Literal[key.choices]
    if key.item:
        return list[Annotated[str, AfterValidator(_checked(key.item))]]
    return list[Text] if get_origin(kind) is list else _at_least(kind, key.least)


def _at_least(kind: Any, least: int | None) -> Any:
    """Return a type whose numbers must not be smaller than `least`."""
    if least is None or get_origin(kind) is Literal:
        return kind
    if kind in (int, float):
        return Annotated[kind, Field(ge=least)]
    inner = tuple(_at_least(argument, least) for argument in get_args(kind))
    if get_origin(kind) is list:
        return list[inner]  # type: ignore[valid-type]
    return Union[inner] if inner else kind  # noqa: UP007 (the operator takes no tuple)


def _checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """Return a validator that returns the text which it has checked."""

    def validator(text: str) -> str:
        check(text)
        return text

    return validator


def json_schema(table: Table) -> dict[str, Any]:
    """Return the JSON Schema of job.yaml."""
    return schema.json_schema(file_type(table))


def read(text: str, path: str, table: Table) -> dict[str, Any]:
    """Return the values of a job file by their option's field. Raises one UsageError with all invalid keys."""
    source = schema.Source(text, path)
    file: Any = schema.validate(file_type(table), source, "for example: command: train.py --lr 0.1")
    given = file.model_fields_set
    if file.command and file.args:
        hint = "args are for the trainer of the image"
        raise source.error(("args",), "command and args cannot be used together", hint)
    values = {
        keyed_option.field: getattr(file, keyed_option.key_name)
        for keyed_option in keyed()
        if keyed_option.key_name in given
    }
    if given & {ENV, SECRETS}:
        values["env"] = [*(f"{name}={value}" for name, value in file.env.items()), *file.secrets]
    if settings := _settings(source.data, table):
        values["settings"] = settings
    return values


def _settings(keys: Any, table: Table) -> list[str]:
    """Return the sections of backends in a valid file as values of --set."""
    return [
        f"{name}.{key}={_setting(value)}"
        for name, backend in table.items()
        if backend.section
        for key, value in (keys.get(name) or {}).items()
    ]


def _setting(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else schema.flow(value)
