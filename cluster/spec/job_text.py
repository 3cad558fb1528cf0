"""Writes job.yaml for a request. Every launch does, so this file works without pydantic, which is slow to import."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import yaml

from cluster.spec.request import LaunchOptions, keyed
from cluster.spec.traits import Table, Traits

#: The key of the variables of --env that have a value, and the key of the names of the others.
ENV = "env"
SECRETS = "secrets"
_HEAD = "# clusterctl launch FILE runs this job. Relative paths are relative to the current folder.\n"


def write(options: LaunchOptions, backend: str, table: Table) -> str:
    """Return the job file of these options for a backend."""
    values: dict[str, Any] = {}
    for keyed_option in keyed():
        value = getattr(options, keyed_option.field)
        if keyed_option.key_name == ENV:
            variables = [text.partition("=") for text in options.env]
            values[ENV] = {name: text for name, mark, text in variables if mark}
            values[SECRETS] = [name for name, mark, _ in variables if not mark]
        elif value != keyed_option.default:
            values[keyed_option.key_name] = keyed_option.key.write(value)
    for name in table:
        if settings := options.given_settings(name, table, unnamed=name == backend):
            values[name] = _section(settings, table[name])  # which imports the backend
    return _HEAD + yaml_text({key: value for key, value in values.items() if value not in (None, "", [], {})})


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
    section: dict[str, Any] = {}
    for key, text in settings.items():
        value: Any = _Unquoted(text) if text.strip() else ""
        if text[:1] in ("[", "{"):
            with suppress(yaml.YAMLError):  # the backend refuses it
                value = yaml.load(text, _Loader)
        *outer, last = backend.words_of(key)
        inner = section
        for word in outer:
            inner = inner.setdefault(word, {})
        inner[last] = value
    return section
