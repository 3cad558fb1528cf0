"""Options on the command line: a job's are declared in spec/request.py, those that other commands share are here."""

import functools
import inspect
import shlex
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_type_hints

import typer

from cluster.backends import BACKENDS, SUMMARIES
from cluster.errors import UsageError
from cluster.spec import request
from cluster.spec.model import Inventory
from cluster.spec.request import HERE_AND_AUTO, MachineOptions
from cluster.store import JobStore


def flag(text: str, *names: str) -> Any:
    """Return typer's option for a flag; `text` is its help."""
    return typer.Option(*names, help=text)


def _job_names(incomplete: str) -> list[str]:
    """Return the names of recorded jobs, for completion."""
    return [name for record in JobStore() if (name := record.plan.job_id).startswith(incomplete)]


def _backend_names(incomplete: str) -> list[str]:
    """Return the values of --backend, for completion."""
    return [name for name in ("auto", "here", *BACKENDS) if name.startswith(incomplete)]


#: The endings by which a first argument is a job file.
JOB_FILE_ENDINGS = (".yaml", ".yml")
JobName = Annotated[
    str,
    typer.Argument(metavar="JOB", help="The job's name, as in `clusterctl ps`.", autocompletion=_job_names),
]
JobNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB]...", help="Names of jobs, as in `clusterctl ps`.", autocompletion=_job_names
    ),
]
# Single options of groups, for commands that take no others of the group.
if TYPE_CHECKING:
    InventoryFile: TypeAlias = str
    Hostfile: TypeAlias = str
    SshConfig: TypeAlias = str
else:
    _HINTS = get_type_hints(MachineOptions, include_extras=True)
    InventoryFile = _HINTS["inventory"]
    Hostfile = _HINTS["hostfile"]
    SshConfig = _HINTS["ssh_config"]
Backend = Annotated[
    str,
    typer.Option(
        "--backend",
        "-b",
        metavar="NAME",
        help=f"Where to run: {', '.join(BACKENDS)}, here or auto.\n\n"
        + "".join(f"{name}: {summary}. " for name, summary in SUMMARIES.items())
        + HERE_AND_AUTO,
        autocompletion=_backend_names,
    ),
]
Logs = Annotated[
    Literal["master", "all"], typer.Option(help="Show the log of the first node or of all nodes.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True)
class NodeOptions(MachineOptions):
    """Options that choose machines."""

    def load(self, *, complete: bool = True, backend: str = "auto") -> Inventory | None:
        """Return the chosen inventory, or None if the options name none and there is no cluster.yaml.

        With `complete`, query the nodes for values that the file omits. Raise ClusterError if a node does not answer.
        """
        from cluster.transport import discovery

        loaded = discovery.load(
            BACKENDS, self.inventory, self.hosts, self.hostfile, self.ssh_config, self.only, backend=backend
        )
        return discovery.complete(loaded) if loaded and complete else loaded

    def need(self, *, complete: bool = True) -> Inventory:
        """Return the chosen inventory; raise UsageError if there is none."""
        loaded = self.load(complete=complete)
        if loaded is None:
            raise UsageError("no machines: this folder has no cluster.yaml", "clusterctl init gpu-a gpu-b")
        return loaded


@dataclass(frozen=True)
class LaunchOptions(NodeOptions, request.LaunchOptions):
    """All options of a job, which a job file may have, too."""


def read_text(path: str, option: str = "", hint: str = "check the path") -> str:
    """Return the content of a file. Raise UsageError for an unreadable one."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option}{path}: {getattr(error, 'strerror', 'not UTF-8 text')}", hint) from error


def with_job_file(context: typer.Context, given: LaunchOptions) -> LaunchOptions:
    """Return the options with the values of the job file that is the first argument, if one is.

    An option on the command line overrides its key; what may be repeated is added to it. Raises UsageError.
    """
    if not given.arguments[:1] or not given.arguments[0].endswith(JOB_FILE_ENDINGS):
        return given
    from cluster.spec import job_file

    path, *rest = given.arguments
    text = read_text(path, hint="check the path of the job file; arguments for the trainer follow after --")
    values = job_file.read(text, path, BACKENDS)
    sources = {name: context.get_parameter_source(name) for name in context.params}
    typed = {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
    if "command" in typed:
        values.pop("arguments", None)
    elif "command" in values:
        values["command"] = shlex.join([*shlex.split(values["command"]), *rest])
        rest = []
    values["arguments"] = [*values.get("arguments", []), *rest]
    for name in values.keys() & typed - {"arguments"}:
        value = getattr(given, name)
        values[name] = [*values[name], *value] if isinstance(value, list) else value
    return replace(given, **values)


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a dataclass of options by its fields, for typer."""
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group: type[Any] = parameter.annotation
        if not is_dataclass(group):
            parameters.append(parameter)
            continue
        groups[parameter.name] = group
        hints = get_type_hints(group, include_extras=True)
        if "backend" in hints:  # `Request` cannot list the backends: its package is below cluster.backends
            hints["backend"] = Backend
        declared_here = inspect.get_annotations(group)
        # Inherited options come last.
        for option in sorted(fields(group), key=lambda option: option.name not in declared_here):
            default = option.default if option.default_factory is MISSING else option.default_factory()
            parameters.append(
                parameter.replace(name=option.name, default=default, annotation=hints[option.name])
            )

    @functools.wraps(command)
    def called(**values: Any) -> None:
        built = {}
        for name, group in groups.items():
            built[name] = group(**{option.name: values.pop(option.name) for option in fields(group)})
        command(**built, **values)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {shown.name: shown.annotation for shown in parameters}
    return called
