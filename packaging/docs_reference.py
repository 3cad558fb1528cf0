"""Write the reference pages from the program: options from the parsers, keys of files from their models.

mkdocs.yml names this file as a hook.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import typer

PAGE = "reference/cli.md"
#: Where a page has a table of keys: `<!-- keys of cluster.yaml -->`.
KEYS = re.compile(r"^<!-- keys of (\S+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Append the reference of the commands to its page, and insert the tables of keys where a page has their mark."""
    text = KEYS.sub(lambda match: TABLES[match[1]](), markdown)
    return f"{text}\n{reference()}" if page.file.src_uri == PAGE else text


def keys_of_cluster_yaml() -> str:
    """Return the tables of cluster.yaml's keys."""
    from cluster.backends import BACKENDS
    from cluster.spec import schema

    return "\n".join(_keys(schema.json_schema(schema.file_type(BACKENDS))))


def keys_of_job_yaml() -> str:
    """Return the table of a job file's keys. The backends' sections are described with cluster.yaml."""
    from cluster.backends import BACKENDS
    from cluster.spec import job_file

    made = job_file.json_schema(BACKENDS)
    for name, key in made["properties"].items():
        if name in BACKENDS:
            key |= {"$ref": "", "description": f"Settings of the backend, as the section `{name}` of cluster.yaml."}
    return "\n".join(_keys(made))


def keys_of_hyp_files() -> str:
    """Return the table of the hyper-parameters, with the defaults of each task."""
    from trainer.config import TASKS, hyp_keys, preset_for

    used = {task: hyp_keys(task) for task in TASKS}
    rows = [f"| key | {' | '.join(TASKS)} | meaning |", "|---|" + "---|" * (len(TASKS) + 1)]
    for key, meaning in {key: text for keys in used.values() for key, text in keys.items()}.items():
        values = [getattr(preset_for("", task).hyp, key) if key in used[task] else None for task in TASKS]
        cells = ("" if value is None else f"{value:g}" for value in values)
        rows.append(f"| `{key}` | {' | '.join(cells)} | {meaning} |")
    return "\n".join(rows)


TABLES: dict[str, Callable[[], str]] = {
    "cluster.yaml": keys_of_cluster_yaml,
    "job.yaml": keys_of_job_yaml,
    "hyper-parameter-files": keys_of_hyp_files,
}


def _keys(schema: dict[str, Any]) -> Iterator[str]:
    """The lines of a JSON Schema's tables: its own keys, then the keys of the mappings in it."""
    models = schema.get("$defs", {})
    waiting: list[tuple[str, dict[str, Any]]] = [("", schema)]
    while waiting:
        path, model = waiting.pop(0)
        if path:
            yield f"\n### {path}\n\n{model.get('description', '')}\n"
        yield "| key | meaning |\n|---|---|"
        inner = []
        for name, key in model["properties"].items():
            found = re.search(r"'\$ref': '#/\$defs/(\w+)'", str(key))
            if found:
                each = ".NAME" if "patternProperties" in str(key) else ""
                inner.append((f"{path}.{name}{each}".lstrip("."), models[found[1]]))
            text = key.get("description") or (models[found[1]]["description"] if found else "")
            yield f"| `{name}` | {_text(text, key)} |"
        waiting = inner + waiting


def _text(text: str, key: dict[str, Any]) -> str:
    """Return the description of a key with what its text does not say: the values and the default."""
    text = re.sub(r"\[default: (.+)\]$", r"Default: \1.", text)
    choices = key.get("enum", ())
    if not {*choices} <= {*re.findall(r"\w+", text)}:
        text += f" One of {', '.join(f'`{each}`' for each in choices)}."
    default = key.get("default")
    if default not in (None, "", False, [], {}) and not re.search("[Bb]y default|Default: ", text):
        shown = f"[{', '.join(default)}]" if isinstance(default, list) else str(default).removesuffix(".0")
        text += f" Default: `{shown}`."
    return text.replace("|", "\\|")


def reference() -> str:
    """Return the reference of both programs as Markdown."""
    import cluster.cli.main
    import trainer.cli

    apps = {"clusterctl": cluster.cli.main.app, "trainer": trainer.cli.app}
    return "\n".join(line for name, app in apps.items() for line in _command(name, typer.main.get_command(app)))


def _command(name: str, command: Any) -> Iterator[str]:
    """The lines of a command: usage, text, parameters; then its subcommands."""
    depth = name.count(" ")
    context = typer.Context(command, info_name=name)
    yield f"{'##' if not depth else '###'} {name}\n"
    yield f"```text\n{name} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    for paragraph in re.split(r"\n{2,}", command.help or ""):
        yield f"{' '.join(paragraph.split())}\n"
    if rows := [row for parameter in command.params if (row := _row(parameter, context))]:
        yield "| argument or option | meaning |\n|---|---|"
        yield from [*rows, ""]
    if command.epilog:
        yield f"{command.epilog}\n"
    for each, subcommand in getattr(command, "commands", {}).items():
        if subcommand.hidden:
            continue
        yield from _command(f"{name} {each}", subcommand)


def _row(parameter: Any, context: typer.Context) -> str:
    """One row of the table. Hidden options and `--help` have none."""
    record = parameter.get_help_record(context)
    if record is None or "--help" in parameter.opts:
        return ""
    names, text = (" ".join(part.split()).replace("|", "\\|") for part in record)
    return f"| `{names}` | {text} |"
