"""Importers: a batch script, a SkyPilot task or a torchrun command line as the keys of a job file. Pure."""

import re
import shlex
from collections.abc import Mapping
from string import Template
from typing import Any

from cluster.errors import UsageError
from cluster.spec import schema, slurm
from cluster.spec.defaults import split
from cluster.spec.job_file import JobFile

#: torchrun's options without a value, and those that clusterctl sets for each node.
_FLAGS = ("standalone", "no-python", "module", "run-path")
_SET_PER_NODE = ("node-rank", "master-addr", "master-port", "local-addr", "rdzv-backend", "rdzv-endpoint", "rdzv-id")
_SHORT = {"-m": "--module", "-r": "--redirects", "-t": "--tee"}
#: sbatch's short options.
_SBATCH_SHORT = {
    "-A": "account",
    "-C": "constraint",
    "-G": "gpus",
    "-J": "job-name",
    "-N": "nodes",
    "-c": "cpus-per-task",
    "-e": "error",
    "-n": "ntasks",
    "-o": "output",
    "-p": "partition",
    "-q": "qos",
    "-t": "time",
    "-w": "nodelist",
    "-x": "exclude",
}
#: Options of sbatch that have no meaning for a job of clusterctl, or that clusterctl sets.
_IMPLIED = ("ntasks", "ntasks-per-node", "output", "error", "requeue", "open-mode", "signal", "gpus", "exclusive")
_LAUNCHERS = re.compile(r"(^|[\s/])(torchrun|torch\.distributed\.(run|launch))\s")
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(\S*|\"[^\"]*\"|'[^']*')")
#: Lines that print something, or find the master, which clusterctl does, too.
_IGNORED = re.compile(r"set -|echo |date\b|hostname\b|wait\b|(export )?(MASTER\w*|master\w*|head_node\w*|nodes\w*)=")
_INSTALLS = re.compile(r"(python3? -m )?(pip3?|uv pip|conda|mamba|apt-get) install ")


class Imported:
    """Keys of a job file, and `notes`: what was not taken over, and why."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {}
        self.notes: list[str] = []
        #: Variables with a known value.
        self.variables: dict[str, str] = {}

    def text(self) -> str:
        """Return the job file, with the notes as comments."""
        ordered = {key: self.keys[key] for key in JobFile.model_fields if self.keys.get(key) not in (None, "", {}, [])}
        return "".join(f"# Not taken over: {note}\n" for note in self.notes) + schema.yaml_text(ordered)

    def command_line(self, line: str, where: str) -> None:
        """Take over `[srun ...] torchrun OPTIONS PROGRAM ARGUMENTS`. Raises UsageError if it is none."""
        line = Template(line).safe_substitute(self.variables)
        words = split(line, where)
        names = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
        at = next((nth for nth, word in enumerate(words) if word.rpartition("/")[2] in names), None)
        if at is None:
            raise UsageError(f"{where}: no torchrun command", "expected: torchrun OPTIONS PROGRAM ARGUMENTS")
        options, program = _torchrun(words[at + 1 :])
        if not program:
            raise UsageError(f"{where}: torchrun has no program", "expected: torchrun OPTIONS PROGRAM ARGUMENTS")
        for name, value in options.items():
            self._torchrun_option(name, value)
        prefix = [f"--{flag}" if flag == "no-python" else "-m" for flag in ("no-python", "module") if flag in options]
        self.keys["command"] = shlex.join([*prefix, *program])
        if unknown := re.findall(r"\$\{?\w+\}?", " ".join(program)):
            self.notes.append(f"{where}: variables in the command: {', '.join(dict.fromkeys(unknown))}")

    def _torchrun_option(self, name: str, value: str) -> None:
        if name == "standalone":
            self.keys.setdefault("nodes", 1)
        elif "$" in value or name in _FLAGS or name in _SET_PER_NODE:
            pass
        elif name == "nnodes":
            self.keys.setdefault("nodes", _number(value))
        elif name == "nproc-per-node" and value.isdecimal():
            self.keys["gpus"] = int(value)
        elif name == "max-restarts":
            self.keys["max_restarts"] = int(value)
        else:
            self.notes.append(f"torchrun --{name} {value}".rstrip())

    def shell(self, text: str, where: str) -> None:
        """Take over variables, installations and the torchrun command of a shell script. Raises UsageError."""
        found, setup, other = "", [], []
        for number, line in _lines(text):
            assignment = _ASSIGNMENT.fullmatch(line)
            if _LAUNCHERS.search(f" {line}"):
                if found:
                    self.notes.append(f"{where}:{number}: a second torchrun command")
                found = found or line
            elif assignment and "$" not in line and "`" not in line:
                value = shlex.split(assignment[2])[0] if assignment[2] else ""
                self.variables[assignment[1]] = value
                if line.startswith("export "):
                    self.keys.setdefault("env", {}).setdefault(assignment[1], value)
            elif _INSTALLS.match(line):
                setup.append(line)
            elif not _IGNORED.match(line):
                other.append(f"{where}:{number}: {line}")
        if setup:
            self.keys["setup"] = "\n".join([*filter(None, [self.keys.get("setup")]), *setup])
        self.notes += other
        if not found:
            raise UsageError(f"{where}: no torchrun command", "expected a line such as: srun torchrun train.py")
        self.command_line(found, where)

    def sbatch(self, name: str, value: str) -> None:
        """Take over an option of sbatch."""
        if name == "nodes":
            self.keys["nodes"] = _number(value.replace("-", ":"))
        elif name == "job-name":
            self.keys["name"] = _name(value)
        elif name in ("gpus-per-node", "gres") and (count := re.search(r"(?:^|:)(\d+)$", value)):
            self.keys["gpus"] = int(count[1])
            if name == "gres" and not re.fullmatch(r"gpu:\d+", value):
                self.keys.setdefault("slurm", {})[name] = value
        elif name not in _IMPLIED:
            try:
                slurm.checked({name: value})
            except UsageError as error:
                self.notes.append(f"sbatch --{name}={value}: {error.message.removeprefix('--slurm ')}")
                return
            self.keys.setdefault("slurm", {})[name] = value


def read(text: str, path: str) -> Imported:
    """Return the keys of a SkyPilot task (`*.yaml`), of a batch script, or of a shell script with torchrun.

    Raises UsageError if the file has no torchrun command, or is malformed.
    """
    if path.endswith((".yaml", ".yml")):
        return _task(schema.Source(text, path).data, path)
    made = Imported()
    for line in text.splitlines():
        match = re.match(r"#SBATCH\s+(.*)", line)
        words = shlex.split(match[1], comments=True) if match else []
        while words:
            name, _, value = words.pop(0).partition("=")
            if not value and words and not words[0].startswith("-"):
                value = words.pop(0)
            made.sbatch(_SBATCH_SHORT.get(name, name.lstrip("-")), value)
    if made.keys:
        made.keys["backend"] = "slurm"
    made.shell(text, path)
    return made


def command_line(line: str) -> Imported:
    """Return the keys of a torchrun command line. Raises UsageError."""
    made = Imported()
    made.command_line(line, "the command line")
    return made


def _task(task: Any, path: str) -> Imported:
    """Return the keys of a SkyPilot task."""
    if not isinstance(task, Mapping) or not isinstance(task.get("run"), str):
        raise UsageError(f"{path}: not a SkyPilot task: no key `run`", "a job file needs no import: clusterctl launch")
    made = Imported()
    for name in ("name", "workdir", "setup"):
        if isinstance(value := task.get(name), str):
            made.keys[name] = _name(value) if name == "name" else value.strip()
    if task.get("num_nodes"):
        made.keys["nodes"] = _number(task["num_nodes"])
    for key in ("envs", "secrets"):
        for name, value in (task.get(key) or {}).items():
            if value is None or key == "secrets":
                made.keys.setdefault("secrets", []).append(name)
            else:
                made.keys.setdefault("env", {})[name] = str(value)
                made.variables[name] = str(value)
    resources = task.get("resources") or {}
    for name, value in resources.items() if isinstance(resources, Mapping) else ():
        if name == "accelerators" and isinstance(value, str):
            made.keys["gpus"] = int(count[1]) if (count := re.search(r":(\d+)$", value)) else 1
        elif name == "image_id" and isinstance(value, str) and value.startswith("docker:"):
            made.keys["image"] = value.removeprefix("docker:")
        else:
            made.notes.append(f"resources.{name}: {value}")
    known = {"name", "workdir", "setup", "num_nodes", "envs", "secrets", "resources", "run"}
    made.notes += [f"{name}: {value}" for name, value in task.items() if name not in known]
    made.shell(task["run"], f"{path}: run")
    return made


def _number(value: Any) -> Any:
    return int(value) if str(value).isdecimal() else value


def _name(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:48]


def _lines(text: str) -> list[tuple[int, str]]:
    """Return the lines of a shell script with their numbers; a line that ends with a backslash continues."""
    found, pending, first = [], "", 0
    for number, line in enumerate(text.splitlines(), 1):
        first = first if pending else number
        pending += line.strip()
        if pending.endswith("\\"):
            pending = pending[:-1]
        else:
            if pending and not pending.startswith("#"):
                found.append((first, pending))
            pending = ""
    return found


def _torchrun(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return torchrun's options by their long name, and the program with its arguments."""
    options: dict[str, str] = {}
    while words and words[0].startswith("-"):
        name, mark, value = _SHORT.get(words[0], words[0]).partition("=")
        words = words[1:]
        name = name.lstrip("-").replace("_", "-")
        if not mark and name not in _FLAGS and words:
            value, words = words[0], words[1:]
        options[{"nproc": "nproc-per-node"}.get(name, name)] = value
    return options, words
