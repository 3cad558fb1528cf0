"""The keys of cluster.yaml and their types, as pydantic's models: what is no such key is an error, with its line."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, WithJsonSchema

from cluster.errors import UsageError
from cluster.model import Device
from cluster.source import Source, dotted

#: What pydantic puts into the location of an error besides keys; a node's name has no spaces.
_TAGS = ("a map of nodes", "a list of names", "a list of ids", "a number")

Gpus = Annotated[
    Annotated[int, Tag("a number")] | Annotated[list[int], Tag("a list of ids")],
    Discriminator(lambda value: "a list of ids" if isinstance(value, list) else "a number"),
]
#: Any scalar, taken as it is written.
_Value = Annotated[str, WithJsonSchema({"type": ["string", "number", "boolean", "null"]})]


class _Keys(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Place(_Keys):
    gpus: Gpus | None = Field(
        default=None, description="How many GPUs jobs may use (the first ones), or a list of their ids."
    )
    run_dir: str | None = Field(
        default=None, description="One folder per job is made here; ~/clusterctl/runs unless said."
    )
    data_dir: str | None = Field(
        default=None, description="What `clusterctl sync` sends goes here; ~/clusterctl/data unless said."
    )
    runtime: Literal["docker", "podman", "apptainer", "pyxis", "none"] | None = Field(
        default=None, description="What starts the job's containers."
    )


class Defaults(_Place):
    """What holds for every node that does not say otherwise."""

    user: str | None = Field(default=None, description="The user to log in as.")
    port: int | None = Field(default=None, description="The port of the nodes' sshd.", ge=1, le=65535)


class Machine(_Place):
    """A node: everything that is left out is looked for on the machine."""

    login: str | None = Field(
        default=None,
        description='[USER@]HOST[:PORT], or a name from ~/.ssh/config; the node\'s name unless said. "": this machine.',
    )
    address: str | None = Field(default=None, description="The number that the other nodes dial, for example 10.0.0.5.")
    labels: list[str] = Field(default=[], description="Words to choose nodes by.")


class File(_Keys):
    """The machines that clusterctl may run jobs on."""

    model_config = ConfigDict(title="cluster.yaml")

    backend: Literal["ssh", "slurm"] = Field(
        default="ssh",
        description="ssh: jobs run on the machines here; slurm: the one node is the login node of a cluster.",
    )
    slurm: dict[str, _Value] = Field(
        default={}, description="Options of sbatch for every job: partition, time, account, qos, mem and so on."
    )
    image: str = Field(default="", description="The container image of jobs that name none.")
    device: Device = Field(default="cuda", description="cuda: GPUs or an error; cpu; any: leave it to the program.")
    ssh_config: str = Field(default="", description="A file to read instead of ~/.ssh/config.")
    env: dict[str, _Value] = Field(
        default={}, description="Variables of every job. Not for secrets: use launch --env NAME."
    )
    mounts: list[str] = Field(default=[], description="SOURCE[:TARGET[:rw]] for the containers of every job.")
    defaults: Defaults = Defaults()
    nodes: Annotated[
        Annotated[dict[str, Machine | None], Tag("a map of nodes")] | Annotated[list[str], Tag("a list of names")],
        Discriminator(lambda value: "a list of names" if isinstance(value, list) else "a map of nodes"),
    ]


def schema() -> dict[str, Any]:
    """The JSON Schema of cluster.yaml, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **File.model_json_schema()}


def validated(text: str, source: Source) -> File:
    """The keys that a cluster.yaml has; raises UsageError that names the line of every one that does not fit."""
    content = source.read(
        text, lambda key: key[:1] in (("env",), ("slurm",)) or (len(key) == 2 and isinstance(key[1], int))
    )
    if not isinstance(content, dict):
        raise UsageError(
            f"{source.path}: " + ("it is empty" if content is None else "not a file of keys and values"),
            "clusterctl init gpu-a gpu-b writes one",
        )
    try:
        return File.model_validate(content)
    except ValidationError as error:
        found = [_explained(each, source) for each in error.errors(include_url=False)]
        hints = list(dict.fromkeys(hint for _, hint in found if hint))
        raise UsageError("\n       ".join(what for what, _ in found), "; ".join(hints)) from None


def _explained(error: Any, source: Source) -> tuple[str, str]:
    key = [part for part in error["loc"] if part not in _TAGS]
    where, shown = source.where(key), dotted(key)
    if error["type"] == "extra_forbidden":
        kind: type[_Keys] = File
        if len(key) > 1:
            kind = Defaults if key[0] == "defaults" else Machine
        near = difflib.get_close_matches(str(key[-1]), kind.model_fields, 1)
        known = ", ".join(kind.model_fields)
        return f"{where}: {shown}: unknown key", f"did you mean {near[0]}?" if near else f"there are: {known}"
    if error["type"] == "missing":
        return f"{where}: {shown} is missing", "for example: nodes: [gpu-a, gpu-b]" if shown == "nodes" else ""
    if error["type"] in ("dict_type", "model_type"):
        return (
            f"{where}: {shown}: {error['input']!r}: must be keys and values",
            f"for example: {key[-1]}: {{key: value}}",
        )
    hint = 'in quotes it is a text: "..."' if error["type"] == "string_type" and error["input"] is not None else ""
    return f"{where}: {shown}: {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}", hint
