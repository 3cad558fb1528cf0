"""cluster.yaml: pydantic models, reading, writing; YAML checks that job.yaml shares. Errors name file, line and key."""

from __future__ import annotations

import ipaddress
import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    StringConstraints,
    ValidationError,
    create_model,
)

from cluster.errors import UsageError, near_or_all
from cluster.runtimes import ENGINES, RUNTIMES
from cluster.spec import environment, inventory, mount
from cluster.spec.job_text import yaml_text
from cluster.spec.model import Device, Gpu, Inventory, Machine
from cluster.spec.traits import Table, Traits

_Key = tuple[str | int, ...]

_ABSOLUTE = r"^(/|~/)"
_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*\*?$"
_USER = r"^[^\s@:/-][^\s@:/]*$"
#: The expected value in errors, by pattern.
_EXPECTED = {
    _ABSOLUTE: "an absolute path, or one below ~/, for example /data/runs",
    _USER: "a user name without '@', ':' and '/'",
    _PATTERN: "the name of a variable, or the beginning of one and *, for example NCCL_*",
    environment.NAME: "the name of a variable: letters, digits and '_'",
    inventory.NAME: "a node's name: letters, digits, '.', '_' and '-', 100 at most, a letter or digit first",
}
#: The tags of nodes without an explicit tag.
_TAGS = {
    yaml.ScalarNode: yaml.BaseLoader.DEFAULT_SCALAR_TAG,
    yaml.SequenceNode: yaml.BaseLoader.DEFAULT_SEQUENCE_TAG,
    yaml.MappingNode: yaml.BaseLoader.DEFAULT_MAPPING_TAG,
}


class Plain(str):
    """A scalar without quotes. It is a text, except where a section has fields of any type (`typed`)."""

    __slots__ = ()


class _Loader(yaml.SafeLoader):
    """Knows numbers, booleans and null, and no dates, which JSON does not have."""


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in found if not tag.endswith(":timestamp")]
    for letter, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def typed(value: Any) -> Any:
    """Return a value of a file with the types that YAML gives to scalars without quotes."""
    if isinstance(value, dict):
        return {name: typed(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [typed(inner) for inner in value]
    return yaml.load(value, _Loader) if isinstance(value, Plain) and _is_number_or_word(value) else value


def _is_number_or_word(text: str) -> bool:
    """Return whether YAML takes a scalar without quotes for something other than a text."""
    tag: str = _Loader("").resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    return not tag.endswith((":str", ":value", ":merge"))


def flow(value: Any) -> str:
    """Return a value of a file as YAML in one line, in which texts have quotes, and what `typed` converts has none."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(name)}: {flow(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(flow, value))}]"
    if value is None:
        return "null"
    return str(value) if isinstance(value, Plain) and _is_number_or_word(value) else json.dumps(value)


def _gpus(value: Any) -> Any:
    """Return the ids of GPUs and UUIDs of MIG slices; a number N means the first N."""
    ids = [*range(int(value))] if isinstance(value, str) and re.fullmatch("[0-9]{1,4}", value) else value
    words = [str(number) for number in ids] if isinstance(ids, list) else [""]
    if len(set(words)) < len(words) or not all(
        re.fullmatch(r"[0-9]{1,4}|MIG-[\w-]+", word) for word in words
    ):
        hint = "for example: gpus: 4, or [0, 2], or UUIDs of MIG slices (nvidia-smi -L): [MIG-...]"
        raise UsageError(f"{value!r} is not a number or list of GPUs", hint)
    return [int(word) if word.isdigit() else word for word in words]


def _address(text: str) -> str:
    try:
        number = ipaddress.ip_address(text)
    except ValueError:
        why = f"{text!r} is not an IP address; a name may resolve differently on other machines"
        hint = "list addresses there with: ip address; or omit the key, and clusterctl chooses one"
        raise UsageError(why, hint) from None
    if number.is_unspecified or number.is_multicast or (number.version == 6 and number.is_link_local):
        hint = "use the machine's own address, for example 10.0.0.5"
        raise UsageError(f"no other machine can connect to {text}", hint)
    return text


def _named(value: Any) -> Any:
    """Return nodes by name; a list has names only."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return value
    for name in value:
        if value.count(name) > 1:
            raise UsageError(f"{name!r} occurs twice", "name each machine once")
    return dict.fromkeys(value)


Folder = Annotated[str, StringConstraints(pattern=_ABSOLUTE), AfterValidator(posixpath.normpath)]
Gpus = Annotated[
    tuple[Gpu, ...],
    BeforeValidator(_gpus, json_schema_input_type=NonNegativeInt | list[NonNegativeInt | str]),
]
Name = Annotated[str, StringConstraints(pattern=inventory.NAME)]
#: Any scalar, as the text in the file.
Text = Annotated[
    str,
    BeforeValidator(
        lambda value: "" if value is None else value, json_schema_input_type=str | float | bool | None
    ),
]
EnvName = Annotated[str, StringConstraints(pattern=environment.NAME)]
Environment = dict[EnvName, Text]
MountText = Annotated[str, AfterValidator(lambda text: mount.parse(text, "/") and text)]
if TYPE_CHECKING:
    RuntimeName = str
else:
    RuntimeName = Literal[tuple(RUNTIMES)]


class Keys(BaseModel):
    """A mapping of a YAML file: any other key is an error."""

    model_config = ConfigDict(extra="forbid", defer_build=True)


class _NodeKeys(Keys):
    gpus: Gpus | None = Field(
        default=None,
        description="GPUs that jobs may use: a number (the first N), or a list of ids and of MIG slices' UUIDs, as in "
        "`nvidia-smi -L`. By default all of them.",
    )
    run_dir: Folder | None = Field(
        default=None,
        description="Folder on the node for the run directories of jobs. By default `~/clusterctl/runs`.",
    )
    data_dir: Folder | None = Field(
        default=None, description="Folder on the node that `sync` copies to. By default `~/clusterctl/data`."
    )
    runtime: RuntimeName | None = Field(
        default=None,
        description="How jobs enter their container: `docker`, `podman` or `none`, and on Slurm also `apptainer`, "
        "`pyxis` or `enroot`. By default docker if it answers, else podman, else none; on Slurm apptainer.",
    )


class Defaults(_NodeKeys):
    """The values for nodes that do not have these keys."""

    user: str | None = Field(default=None, pattern=_USER, description="User name of logins that have none.")
    port: int | None = Field(default=None, ge=1, le=65535, description="SSH port of logins that have none.")


class MachineKeys(_NodeKeys):
    """A node: clusterctl finds everything that is left out on the machine."""

    login: Annotated[str, AfterValidator(inventory.valid_login)] | None = Field(
        default=None,
        description='`[USER@]HOST[:PORT]` or a name from `~/.ssh/config`; `""` is this machine. By default the node\'s '
        "name.",
    )
    address: Annotated[str, AfterValidator(_address)] | None = Field(
        default=None,
        description="IP address, not a name, that the other nodes connect to. By default looked up.",
    )
    labels: tuple[str, ...] = Field(default=(), description="Words that `--only` may select the node by.")


_NONE_IS_EMPTY = BeforeValidator(
    lambda keys: {} if keys is None else keys, json_schema_input_type=MachineKeys | None
)


class File(Keys):
    """The machines that clusterctl may run jobs on."""

    backend: str = "ssh"
    image: str = Field(
        default="",
        description="Container image of jobs that name none. By default `trainer:0.1`, which `make image` builds; "
        "apptainer, pyxis and enroot have no default.",
    )
    device: Device = Field(
        default="cuda",
        description="`cuda`: GPUs or an error; `cpu`; `any`: the program decides what it uses.",
    )
    ssh_config: str = Field(default="", description="SSH configuration to read instead of `~/.ssh/config`.")
    env: Environment = Field(
        default={}, description="Environment variables of every job. No secrets: use `--env NAME`."
    )
    pass_env: list[Annotated[str, StringConstraints(pattern=_PATTERN)]] = Field(
        default=list(environment.PASS_ENV), description="Variables of a machine that its containers get, too."
    )
    prologue: str = Field(
        default="",
        description="Shell lines that every job runs first on each node: `module load cuda`. The job's lines follow.",
    )
    mounts: list[MountText] = Field(
        default=[], description="`SOURCE[:TARGET[:rw]]`: folders of the node that every container gets."
    )
    defaults: Defaults = Field(
        default_factory=Defaults, description="Values for nodes that do not have these keys."
    )
    nodes: Annotated[
        dict[Name, Annotated[MachineKeys, _NONE_IS_EMPTY]],
        BeforeValidator(_named, json_schema_input_type=list[str] | dict[Name, MachineKeys | None]),
    ] = Field(
        default={},
        description="List of names, or map from names to the keys below; on Slurm only the login node, and none on a "
        "cluster without one.",
    )


def sections(table: Table) -> dict[str, Any]:
    """Return the sections of the backends in `table`, as fields for `pydantic.create_model`."""
    kinds = {name: backend.section_type() for name, backend in table.items() if backend.section}
    return {
        name: (kind, Field(default_factory=kind if isinstance(kind, type) else dict))
        for name, kind in kinds.items()
    }


def file_type(table: Table) -> type[File]:
    """Return the model of cluster.yaml with the section of each backend in `table`."""
    names = tuple(name for name, backend in table.items() if backend.machines != "here")
    what = "Where jobs run: on the machines in `nodes` (`ssh`), or on a cluster of this kind."
    fields: dict[str, Any] = {
        **sections(table),
        "backend": (Literal[names], Field(default="ssh", description=what)),
    }
    return create_model("File", __base__=File, __doc__=File.__doc__, **fields)


Keys_ = TypeVar("Keys_", bound=Keys)


def json_schema(model: type[Keys]) -> dict[str, Any]:
    """Return the JSON Schema of a file for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}


class Source:
    """A YAML text as plain `data`, with the line of every key. Raises UsageError if it is not YAML.

    Scalars are the text in the file (`010`, `yes`); an empty value is None. There are no aliases, which allow cycles
    and exponential expansion, and no tags.
    """

    def __init__(self, text: str, path: str) -> None:
        self.path = path
        self._lines: dict[_Key, int] = {}
        try:
            for event in yaml.parse(text, yaml.BaseLoader):
                if isinstance(event, yaml.AliasEvent):
                    raise _at(event, "aliases (*name) are not supported")
            root = yaml.compose(text, yaml.BaseLoader)
            self.data = None if root is None else self._value(root, ())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f"{path}:{mark.line + 1}" if mark else path
            raise UsageError(f"{where}: {error.problem or error.context}") from None
        except yaml.YAMLError as error:
            raise UsageError(f"{path}: {' '.join(str(error).split())}") from None
        except RecursionError:
            raise UsageError(f"{path}: nested too deeply") from None

    def error(self, key: _Key, problem: str, hint: str = "") -> UsageError:
        """Return an error with the line of the key, or of the nearest enclosing key in the file."""
        known = next((key[:end] for end in range(len(key), 0, -1) if key[:end] in self._lines), ())
        line = f":{self._lines[known]}" if known else ""
        return UsageError(f"{self.path}{line}: {'.'.join(map(str, key))}: {problem}", hint)

    def _value(self, node: yaml.Node, key: _Key) -> Any:
        self._lines.setdefault(key, node.start_mark.line + 1)
        if node.tag != _TAGS[type(node)]:
            raise _at(node, f"the tag {node.tag} is not supported")
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*key, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            if "\0" in node.value:  # no path or argument can contain one
                raise _at(node, "a NUL character is not allowed")
            if node.style is not None:
                return node.value
            return None if node.value in ("", "~", "null") else Plain(node.value)
        mapping: dict[str, Any] = {}
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise _at(name, "a key must be a scalar")
            if name.value in mapping:
                raise _at(name, f"the key {name.value!r} occurs twice")
            inner = (*key, name.value)
            self._lines[inner] = name.start_mark.line + 1
            mapping[name.value] = self._value(value, inner)
        return mapping


def _at(event: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def validate(model: type[Keys_], source: Source, hint: str) -> Keys_:
    """Return the file's keys and values. Raises one UsageError with all invalid keys; `hint` is for an empty one."""
    if not isinstance(source.data, dict):
        problem = "is empty" if source.data is None else "must contain keys and values"
        raise UsageError(f"{source.path} {problem}", hint)
    try:
        return model.model_validate(source.data)
    except ValidationError as error:
        errors = [_translate(detail, model, source) for detail in error.errors(include_url=False)]
        hints = dict.fromkeys(invalid.hint for invalid in errors if invalid.hint)
        raise UsageError("\n       ".join(invalid.message for invalid in errors), "; ".join(hints)) from None


def _translate(error: Any, model: type[Keys], source: Source) -> UsageError:
    """Convert an error of pydantic: line, key, expected value, and the closest known key."""
    key = tuple(error["loc"])
    if key[-1] == "[key]":
        key = key[:-1]
    kind = error["type"]
    given = error["input"]
    context = error.get("ctx", {})
    raised = context.get("error")
    if isinstance(raised, UsageError):
        return source.error(key, re.sub(r"^--[a-z-]+ ", "", raised.message), raised.hint)
    problem = f"{given!r}: {error['msg'][0].lower()}{error['msg'][1:]}"
    hint = ""
    if kind == "extra_forbidden":
        known = list(model_at(model, key[:-1]).model_fields)
        problem = "unknown key"
        hint = near_or_all(str(key[-1]), known)
    elif kind in ("dict_type", "model_type"):
        problem = f"{given!r}: must be keys and values"
        hint = f"for example: {key[-1]}: {{key: value}}"
    elif kind == "tuple_type":
        problem = f"{given!r}: must be a list"
        hint = f"for example: {key[-1]}: [a, b]"
    elif kind == "string_pattern_mismatch":
        problem = f"{given!r}: expected {_EXPECTED[context['pattern']]}"
    return source.error(key, problem, hint)


def model_at(model: type[BaseModel], key: Sequence[str | int]) -> type[BaseModel]:
    """Return the model of the mapping at a key, for example of `nodes.gpu-a`."""
    for word in key:
        if isinstance(word, str) and word in model.model_fields:
            inner = _models_in(model.model_fields[word].annotation)
            model = inner[0] if inner else model
    return model


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in a type such as `dict[str, MachineKeys]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]


def read(text: str, path: str, table: Table, cwd: str = "/") -> Inventory:
    """Return the inventory of a cluster.yaml. Relative paths in it are relative to its folder.

    `path` is the file's name for errors, relative to `cwd`; `table` has the backends. Raises one UsageError with every
    invalid key.
    """
    source = Source(text, path)
    more = " --force" if source.data is None else ""  # an empty file may be replaced, any other text may not
    to = path if source.data is None else "example.yaml"
    file = validate(file_type(table), source, f"to write one: clusterctl init gpu-a gpu-b -o {to}{more}")
    backend = table[file.backend]
    for other in table.values():
        if other is not backend and other.name in file.model_fields_set:
            problem = f"only backend {other.name} supports this key"
            raise source.error((other.name,), problem, f"set backend: {other.name}")
    _check_nodes(file, backend, table, source)
    folder = posixpath.dirname(posixpath.join(cwd, path))
    machines = tuple(_machine(name, keys, file, backend, source, folder) for name, keys in file.nodes.items())
    section = getattr(file, backend.name) if backend.section else {}
    made = Inventory(
        machines=machines or (backend.login_node(file.image),),
        backend=backend.name,
        is_assigned=backend.machines == "assigned",
        settings=section.model_dump(mode="json", exclude_defaults=True)
        if isinstance(section, BaseModel)
        else section,
        image=file.image,
        device=file.device,
        env=file.env,
        pass_env=tuple(file.pass_env),
        prologue=file.prologue,
        mounts=tuple(mount.parse(text, folder) for text in file.mounts),
        path=path,
    )
    _refuse_addresses(made.machines, source)
    return made


def _check_nodes(file: File, backend: Traits, table: Table, source: Source) -> None:
    """Raise UsageError for nodes that do not fit the backend."""
    for name in sorted({node.runtime for node in (file.defaults, *file.nodes.values()) if node.runtime}):
        if not backend.fits(RUNTIMES[name]):
            other = next(
                traits.name
                for traits in table.values()
                if traits.machines != "here" and traits.fits(RUNTIMES[name])
            )
            hint = f"set backend: {other}, or runtime: {next(iter(ENGINES))}"
            raise source.error(("nodes",), f"runtime {name} needs backend {other}", hint)
    if backend.machines == "assigned" and len(file.nodes) > backend.has_login_node:
        expected = "expected one node, the login node" if backend.has_login_node else "expected no node"
        raise source.error(("nodes",), expected, f"{backend.name} chooses the nodes of a job")
    if backend.machines == "assigned" and not backend.has_login_node:
        for key in ("defaults", "ssh_config", "pass_env", "prologue"):
            if key in file.model_fields_set:
                problem = f"backend {backend.name} has no machines that it could be for"
                raise source.error((key,), problem, f"omit it; the keys of {backend.name} are in its section")
    if not file.nodes and (backend.machines == "listed" or backend.has_login_node):
        raise source.error(("nodes",), "no node", "for example: nodes: [gpu-a, gpu-b]")


def _machine(
    name: str, keys: MachineKeys, file: File, backend: Traits, source: Source, folder: str
) -> Machine:
    """Return a machine with its own values, or the `defaults`."""
    defaults = file.defaults
    values: dict[str, Any] = {
        "address": "",
        "login": name,
        "runtime": backend.default_runtime,
        "ssh_config": file.ssh_config
        if file.ssh_config[:1] in ("", "~")
        else posixpath.join(folder, file.ssh_config),
        **defaults.model_dump(exclude_none=True, exclude={"user", "port"}),
        **keys.model_dump(exclude_none=True),
    }
    if values.get("gpus") == () and file.device == "cuda":
        where = ("nodes", name) if keys.gpus is not None else ("defaults",)
        raise source.error(
            (*where, "gpus"), "no GPU, but device is cuda", "set device: cpu at the top, or omit gpus"
        )
    login = values["login"]
    if login and defaults.user and "@" not in login:
        login = f"{defaults.user}@{login}"
    user, mark, host = login.rpartition("@")
    has_port = host.count(":") == 1 or "]:" in host
    if login and defaults.port and not has_port:
        host = f"[{host.strip('[]')}]" if ":" in host else host
        login = f"{user}{mark}{host}:{defaults.port}"
    return Machine(name, **{**values, "login": login})


def _refuse_addresses(nodes: Sequence[Machine], source: Source) -> None:
    """Raise UsageError if two nodes have the same address, or if one of several nodes has a loopback address."""
    seen: dict[str, str] = {}
    for node in nodes:
        key = ("nodes", node.name, "address")
        if node.address and node.address in seen:
            raise source.error(
                key, f"{node.address} is also {seen[node.address]}'s address", "name each machine once"
            )
        seen[node.address] = node.name
    loopback = [node for node in nodes if node.address and ipaddress.ip_address(node.address).is_loopback]
    if loopback and len(loopback) < len(nodes):
        raise source.error(
            ("nodes", loopback[0].name, "address"),
            f"no other node can reach the loopback address {loopback[0].address}",
            f"find the addresses: clusterctl init {' '.join(each.name for each in nodes)}",
        )


def write(found: Inventory, notes: Mapping[str, Sequence[str]], head: Sequence[str]) -> str:
    """Return the cluster.yaml of machines that `init` found; `notes` are comments above a node, by its name."""
    text = "".join(f"# {_one_line(line)}\n" for line in head)
    text += yaml_text({"device": found.device})
    if found.machines[0].ssh_config:
        text += yaml_text({"ssh_config": found.machines[0].ssh_config})
    text += "nodes:\n"
    for node in found.machines:
        first = node.gpus == tuple(range(len(node.gpus)))
        keys = {key: getattr(node, key) for key in ("address", "run_dir", "data_dir", "runtime")}
        keys["gpus"] = len(node.gpus) if first else list(node.gpus)
        machine = {key: value for key, value in keys.items() if value}
        if node.login != node.name:
            machine = {"login": node.login, **machine}
        text += "".join(f"  # {_one_line(note)}\n" for note in notes.get(node.name, ()))
        text += yaml_text({"nodes": {node.name: machine or None}}).partition("\n")[2]
    return text


def _one_line(text: str) -> str:
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())
