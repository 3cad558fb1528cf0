"""job.yaml: the keys of a job file, and the Request (request.py) that a file gives. Pure."""

import shlex
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from cluster.errors import UsageError
from cluster.spec import schema
from cluster.spec.defaults import node_range, seconds, split
from cluster.spec.request import Request
from cluster.spec.schema import Environment, EnvName, Keys, MountText, Options, Text

#: The endings of a job file's name.
ENDINGS = (".yaml", ".yml")
#: Keys with another name than the option's parameter.
_PARAMETERS = {
    "args": "arguments",
    "run_dir": "run_root",
    "rendezvous_timeout": "timeout_s",
    "stall_timeout": "stall_timeout_s",
}
_HEAD = "# clusterctl launch FILE runs this job. Relative paths are relative to the current folder.\n"


def _words(value: Any) -> Any:
    """Return a list of words; a text is split as by a shell."""
    if isinstance(value, str):
        return split(value, repr(value))
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise UsageError(f"{value!r} is not a text or a list of words", "for example: train.py --lr 0.1")
    return value


def _names(value: Any) -> Any:
    return value.replace(" ", "").split(",") if isinstance(value, str) else value


Words = Annotated[list[str], BeforeValidator(_words, json_schema_input_type=str | list[str])]
Names = Annotated[list[str], BeforeValidator(_names, json_schema_input_type=str | list[str])]
Time = Annotated[Text, AfterValidator(lambda text: text and (seconds(text, "--grace"), text)[1])]
Count = Annotated[Text, AfterValidator(lambda text: node_range(text, 1) and text)]


class JobFile(Keys):
    """A job of clusterctl. Each key is an option of `clusterctl launch`, and the option overrides it."""

    name: str = ""
    nodes: Count = ""
    gpus: PositiveInt = 1
    command: Words = Field(default_factory=list)
    args: Words = Field(default_factory=list)
    workdir: str = ""
    setup: str = ""
    image: str = ""
    build: str = ""
    backend: Literal["auto", "here", "local", "compose", "ssh", "slurm"] = "auto"
    device: Literal["auto", "cuda", "cpu", "any"] = "auto"
    env: Environment = Field(default_factory=dict)
    secrets: list[EnvName] = Field(default_factory=list)
    env_file: str = ""
    mounts: list[MountText] = Field(default_factory=list)
    slurm: Options = Field(default_factory=dict)
    array: str = ""
    array_limit: PositiveInt = 256
    spares: NonNegativeInt = 0
    max_restarts: NonNegativeInt | None = None
    rendezvous_timeout: NonNegativeFloat = 300.0
    stall_timeout: NonNegativeFloat | None = None
    grace: Time = ""
    master_port: Text = "auto"
    run_dir: str = ""
    python: str = ""
    inventory: str = ""
    hosts: Names = Field(default_factory=list)
    hostfile: str = ""
    ssh_config: str = ""
    only: Names = Field(default_factory=list)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of job.yaml, with the options' help as descriptions."""
    made = schema.json_schema(JobFile)
    hints = get_type_hints(Request, include_extras=True)
    for key, described in made["properties"].items():
        if hint := hints.get(_PARAMETERS.get(key, key)):
            described["description"] = hint.__metadata__[0].help
    return made


def read(text: str, path: str) -> dict[str, Any]:
    """Return the values of a job file by their option's parameter. Raises one UsageError with all invalid keys."""
    source = schema.Source(text, path)
    file = schema.validate(JobFile, source, "for example: command: train.py --lr 0.1")
    if file.command and file.args:
        raise source.error(("args",), "command and args exclude each other", "args are for the trainer of the image")
    values = {_PARAMETERS.get(key, key): getattr(file, key) for key in file.model_fields_set}
    if "command" in values:
        values["command"] = shlex.join(file.command)
    if values.keys() & {"env", "secrets"}:
        values["env"] = [*(f"{name}={value}" for name, value in file.env.items()), *file.secrets]
        values.pop("secrets", None)
    if "slurm" in values:
        values["slurm"] = [f"{name}={value}" for name, value in file.slurm.items()]
    for key in values.keys() & {"hosts", "only"}:
        values[key] = ",".join(values[key])
    return values


def write(request: Request, more: Mapping[str, str], head: str = "") -> str:
    """Return the job file of a request; `more` has keys that are not in a request (inventory, env_file)."""
    keys = {_PARAMETERS.get(key, key): key for key in JobFile.model_fields}
    given = [(each, getattr(request, each.name)) for each in fields(request) if each.name in keys]
    found = {keys[each.name]: value for each, value in given if value not in (each.default, [], "")}
    if request.nodes.isdecimal():
        found["nodes"] = int(request.nodes)
    env = [text.partition("=") for text in request.env]
    found |= {
        "env": {name: value for name, mark, value in env if mark},
        "secrets": [name for name, mark, _ in env if not mark],
        "slurm": request.for_sbatch(),
        **more,
    }
    ordered = {key: found[key] for key in JobFile.model_fields if found.get(key) not in (None, "", [], {})}
    return head + _HEAD + schema.yaml_text(ordered)
