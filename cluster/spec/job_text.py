"""Writes job.yaml for a request. Every launch does, so this file works without pydantic, which is slow to import."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

import yaml

from cluster.spec.request import Request
from cluster.spec.traits import Table, Traits

#: The keys of `job_file.JobFile`, in their order.
KEYS = (
    *(
        "name",
        "nodes",
        "gpus",
        "command",
        "args",
        "workdir",
        "send_secrets",
        "prologue",
        "setup",
        "image",
        "build",
        "backend",
        "device",
    ),
    *("env", "secrets", "env_file", "mounts", "run_options", "array", "array_limit", "spares", "max_restarts"),
    *("rendezvous_timeout", "stall_timeout", "grace", "master_port", "run_dir", "python"),
    *("inventory", "hosts", "hostfile", "ssh_config", "only"),
)
#: Keys with another name than the option's parameter.
PARAMETERS = {
    "args": "arguments",
    "run_dir": "run_root",
    "rendezvous_timeout": "timeout_s",
    "stall_timeout": "stall_timeout_s",
}
_HEAD = "# clusterctl launch FILE runs this job. Relative paths are relative to the current folder.\n"


def write(request: Request, backend: str, more: Mapping[str, str], table: Table) -> str:
    """Return the job file of a request for a backend; `more` has keys that no request has (inventory, env_file)."""
    keys = {PARAMETERS.get(key, key): key for key in KEYS}
    given = [(each, getattr(request, each.name)) for each in fields(request) if each.name in keys]
    found = {keys[each.name]: value for each, value in given if value not in (each.default, [], "")}
    if request.nodes.isdecimal():
        found["nodes"] = int(request.nodes)
    if "gpus" in found and found["gpus"] != "all":
        numbers = [int(number) for number in found["gpus"].split(",")]
        found["gpus"] = numbers if numbers[1:] else numbers[0]
    env = [text.partition("=") for text in request.env]
    sections = {name: request.given_settings(name, table, unnamed=name == backend) for name in table}
    found |= {
        "env": {name: value for name, mark, value in env if mark},
        "secrets": [name for name, mark, _ in env if not mark],
        **{name: _section(settings, table[name]) for name, settings in sections.items() if settings},
        **more,
    }
    ordered = {key: found[key] for key in (*KEYS, *table) if found.get(key) not in (None, "", [], {})}
    return _HEAD + yaml_text(ordered)


def yaml_text(values: Mapping[str, Any]) -> str:
    """Return YAML with the keys in their order."""
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**20))


class _Unquoted(str):
    """A scalar that a user has typed without quotes: a number for a field of any type, else a text."""

    __slots__ = ()


class _Loader(yaml.BaseLoader):
    """Reads all scalars as texts, and tells which of them have no quotes."""

    def construct_scalar(self, node: yaml.ScalarNode) -> str:
        text = str(super().construct_scalar(node))
        return _Unquoted(text) if node.style is None and text else text


class _Dumper(yaml.SafeDumper):
    """Writes a scalar as it was typed."""


def _represent(dumper: yaml.SafeDumper, text: _Unquoted) -> yaml.Node:
    tag: str = dumper.resolve(yaml.ScalarNode, str(text), (True, False))  # type: ignore[no-untyped-call]
    return yaml.ScalarNode(tag, str(text))


_Dumper.add_representer(_Unquoted, _represent)


def _section(settings: Mapping[str, str], backend: Traits) -> dict[str, Any]:
    """Return the section of a job file with these settings. In a setting, lists and mappings are YAML."""
    found: dict[str, Any] = {}
    for key, text in settings.items():
        value: Any = _Unquoted(text) if text.strip() else ""
        if text[:1] in ("[", "{"):
            with suppress(yaml.YAMLError):  # the backend refuses it
                value = yaml.load(text, _Loader)
        *outer, last = backend.words_of(key)
        inner = found
        for word in outer:
            inner = inner.setdefault(word, {})
        inner[last] = value
    return found
