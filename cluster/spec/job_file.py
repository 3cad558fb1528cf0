"""job.yaml: the keys of a job file, and the Request (request.py) that a file gives. job_text.py writes it. Pure."""

import shlex
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    create_model,
)

from cluster.errors import UsageError
from cluster.spec import schema
from cluster.spec.counts import gpus_per_node, node_range
from cluster.spec.duration import seconds
from cluster.spec.job_text import PARAMETERS
from cluster.spec.request import Request
from cluster.spec.schema import Environment, EnvName, Keys, MountText, Text
from cluster.spec.shell_words import split
from cluster.spec.traits import Table

#: The endings of a job file's name.
ENDINGS = (".yaml", ".yml")


def _words(value: Any) -> Any:
    """Return a list of words; a text is split as by a shell."""
    if isinstance(value, str):
        return split(value, repr(value))
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise UsageError(f"{value!r} is not a text or a list of words", "for example: train.py --lr 0.1")
    return value


def _names(value: Any) -> Any:
    return value.replace(" ", "").split(",") if isinstance(value, str) else value


def _gpu_counts(value: Any) -> Any:
    """Return the value of --gpus. A list has one number per node."""
    numbers = value if isinstance(value, list) else [value]
    if not numbers or not all(isinstance(number, str | int) for number in numbers):
        raise UsageError(f"{value!r} is not a number, a list of numbers or all", "for example: gpus: 2, or [2, 1]")
    text = ",".join(map(str, numbers))
    gpus_per_node(text)
    return text


Words = Annotated[list[str], BeforeValidator(_words, json_schema_input_type=str | list[str])]
Names = Annotated[list[str], BeforeValidator(_names, json_schema_input_type=str | list[str])]
Time = Annotated[Text, AfterValidator(lambda text: text and (seconds(text, "--grace"), text)[1])]
GpuCounts = Annotated[
    str,
    BeforeValidator(_gpu_counts, json_schema_input_type=PositiveInt | list[PositiveInt] | Literal["all"]),
]
Count = Annotated[Text, AfterValidator(lambda text: node_range(text, 1) and text)]


class JobFile(Keys):
    """A job of clusterctl. Each key is an option of `clusterctl launch`, and the option overrides it."""

    name: str = ""
    nodes: Count = ""
    gpus: GpuCounts = Field(default="1", json_schema_extra={"default": 1})
    command: Words = Field(default_factory=list)
    args: Words = Field(
        default_factory=list,
        description="Arguments of the trainer, as after `--`: `train --data coco.yaml`. Not together with `command`.",
    )
    workdir: str = ""
    send_secrets: bool = False
    prologue: str = ""
    setup: str = ""
    image: str = ""
    build: str = ""
    backend: str = "auto"
    device: Literal["auto", "cuda", "cpu", "any"] = "auto"
    env: Environment = Field(default_factory=dict, description="Environment variables of the program, by name.")
    secrets: list[EnvName] = Field(
        default_factory=list,
        description="Names of variables whose values come from your environment. The values are in no plan or record, "
        "and are masked in logs.",
    )
    env_file: str = Field(default="", description="File with more secrets, one `NAME=VALUE` per line.")
    mounts: list[MountText] = Field(
        default_factory=list,
        description="`SOURCE[:TARGET[:rw]]`: folders for the containers. Paths in `args` are mounted automatically.",
    )
    run_options: list[Text] = Field(
        default_factory=list,
        description="Options of docker run or podman run for the containers: `[--memory=32g, --ulimit nofile=65536]`.",
    )
    array: str = Field(
        default="",
        description="Slurm: file with the arguments of one job per line, which are appended to `args` or `command`.",
    )
    array_limit: PositiveInt = Field(default=256, description="Slurm: how many jobs of the array may run at a time.")
    spares: NonNegativeInt = 0
    max_restarts: NonNegativeInt | None = None
    rendezvous_timeout: NonNegativeFloat = Field(default=300.0, description="Seconds to wait for all nodes to join.")
    stall_timeout: NonNegativeFloat | None = Field(
        default=None,
        description="Seconds without progress after which the job fails; 0: never. By default 300, and 0 with "
        "`command`, where output and the use of CPU or GPU are progress.",
    )
    grace: Time = ""
    master_port: Text = "auto"
    run_dir: str = ""
    python: str = ""
    inventory: str = Field(
        default="", description="File with the machines. By default `cluster.yaml` in the current folder, if it exists."
    )
    hosts: Names = Field(
        default_factory=list,
        description="Machines instead of an inventory: `[USER@]HOST[:PORT]`, or names from `~/.ssh/config`.",
    )
    hostfile: str = Field(default="", description="Hostfile of DeepSpeed or MPI instead of an inventory.")
    ssh_config: str = Field(default="", description="SSH configuration to read instead of `~/.ssh/config`.")
    only: Names = Field(default_factory=list, description="Only these nodes of the inventory, by name or label.")


def file_type(table: Table) -> type[JobFile]:
    """Return the model of job.yaml, with the names and sections of the backends in `table`."""
    names = ("auto", "here", *table)
    fields: dict[str, Any] = {**schema.sections(table), "backend": (Literal[names], "auto")}
    return create_model("JobFile", __base__=JobFile, __doc__=JobFile.__doc__, **fields)


def json_schema(table: Table) -> dict[str, Any]:
    """Return the JSON Schema of job.yaml, where a key is described as its option, unless it has a description."""
    made = schema.json_schema(file_type(table))
    hints = get_type_hints(Request, include_extras=True)
    for key, described in made["properties"].items():
        if "description" not in described and (hint := hints.get(PARAMETERS.get(key, key))):
            described["description"] = " ".join(hint.__metadata__[0].help.split())
    return made


def read(text: str, path: str, table: Table) -> dict[str, Any]:
    """Return the values of a job file by their option's parameter. Raises one UsageError with all invalid keys."""
    source = schema.Source(text, path)
    file = schema.validate(file_type(table), source, "for example: command: train.py --lr 0.1")
    if file.command and file.args:
        raise source.error(
            ("args",), "command and args cannot be used together", "args are for the trainer of the image"
        )
    values = {PARAMETERS.get(key, key): getattr(file, key) for key in file.model_fields_set}
    if "command" in values:
        values["command"] = shlex.join(file.command)
    if values.keys() & {"env", "secrets"}:
        values["env"] = [*(f"{name}={value}" for name, value in file.env.items()), *file.secrets]
        values.pop("secrets", None)
    sections: Any = source.data
    settings = []
    for name in values.keys() & {each.name for each in table.values() if each.section}:
        del values[name]
        for key, value in (sections[name] or {}).items():
            text = value if isinstance(value, str) else "" if value is None else schema.flow(value)
            settings.append(f"{name}.{key}={text}")
    if settings:
        values["settings"] = settings
    for key in values.keys() & {"hosts", "only"}:
        values[key] = ",".join(values[key])
    return values
