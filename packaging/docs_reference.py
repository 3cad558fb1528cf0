"""Make the parts of the site that come from the program: a page for each command, and the tables of files' keys.

It also replaces the diagrams by their drawings (packaging/diagrams.py). mkdocs.yml names this file as a hook.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).parents[1]


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


diagrams = _module(ROOT / "packaging/diagrams.py")
setup = _module(ROOT / "setup.py")

#: The page that lists the commands, and the folder of their pages.
PAGE = "reference/cli/index.md"
FOLDER = "reference/cli"
#: What the search shows after the other pages, which explain the words that these only list.
LAST = "---\nsearch: {boost: 0.3}\n---\n"
#: Where a page has a table of keys: `<!-- keys of cluster.yaml -->`.
KEYS = re.compile(r"^<!-- keys of (\S+) -->$", re.MULTILINE)
#: A link to a file outside of docs/, as it is written on a page in a folder of docs/.
OUTSIDE = re.compile(r"\[([^]]+)\]\(\.\./\.\./([^)]+)\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages of the commands, and their entries to the navigation below the page that lists them."""
    from mkdocs.structure.files import File

    pages = reference()
    for name, text in pages.items():
        files.append(File.generated(config, file_of(name), content=LAST + text))
    for program in PROGRAMS:
        entries = [
            {name.partition(" ")[2]: file_of(name)} for name in pages if name.partition(" ")[0] == program
        ]
        _navigation(config.nav).append({program: entries})
    return files


def _navigation(entries: list[Any]) -> list[Any]:
    """Return the list in the navigation that has the page `PAGE`."""
    for entry in entries:
        inner = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if inner == PAGE:
            return entries
        if isinstance(inner, list) and (found := _navigation(inner)):
            return found
    return []


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Insert the list of commands, the tables of keys where a page has their mark, and the drawings of diagrams.

    Links to files outside of docs/ lead to the repository, or become plain text while that has no address.
    """
    from mkdocs.utils import get_relative_url

    def drawing(match: re.Match[str]) -> str:
        file = diagrams.file_of(match[1])
        if not (diagrams.DOCS / file).exists():
            raise SystemExit(f"{page.file.src_uri}: a diagram has changed; type: make diagrams")
        address = get_relative_url(file, page.url)
        return f'<div class="diagram"><img alt="{diagrams.title_of(match[1])}" src="{address}"></div>'

    text = KEYS.sub(lambda match: TABLES[match[1]](), markdown)
    text = diagrams.BLOCK.sub(drawing, text)
    repository = setup.addresses()["repository"]
    text = OUTSIDE.sub(rf"[\1]({repository}/blob/HEAD/\2)" if repository else r"\1", text)
    return f"{text}\n{commands()}" if page.file.src_uri == PAGE else text


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
            key |= {
                "$ref": "",
                "description": f"Settings of the backend, as the section `{name}` of cluster.yaml.",
            }
    return "\n".join(_keys(made))


def keys_of_hyp_files() -> str:
    """Return the table of the hyperparameters, with the defaults of each task."""
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
    "hyperparameter-files": keys_of_hyp_files,
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


PROGRAMS = ("clusterctl", "trainer")


def file_of(name: str) -> str:
    """Return the path of a command's page in docs/."""
    return f"{FOLDER}/{name.replace(' ', '-')}.md"


def _programs() -> dict[str, Any]:
    import cluster.cli.main
    import trainer.cli

    return dict(
        zip(PROGRAMS, map(typer.main.get_command, (cluster.cli.main.app, trainer.cli.app)), strict=True)
    )


def commands() -> str:
    """Return each program's own options, and a table of its commands and what they do."""
    return "\n".join(
        line
        for name, command in _programs().items()
        for line in (*_command(name, command, 2), _table(name, command))
    )


def reference() -> dict[str, str]:
    """Return the page of each command as Markdown, by its name. A group's page has its commands' texts too."""
    pages = {}
    for program, command in _programs().items():
        for each, subcommand in command.commands.items():
            if not subcommand.hidden:
                pages[f"{program} {each}"] = "\n".join(_command(f"{program} {each}", subcommand, 1))
    return pages


def _table(name: str, command: Any) -> str:
    """Return a table of the commands of a program, with links to their pages."""
    rows = ["| command | |", "|---|---|"]
    for each, subcommand in command.commands.items():
        if not subcommand.hidden:
            first = re.split(r"\n{2,}|(?<=\.)\s", subcommand.help or "")[0]
            link = Path(file_of(f"{name} {each}")).relative_to(Path(PAGE).parent)
            rows.append(f"| [`{each}`]({link}) | {' '.join(first.split())} |")
    return "\n".join([*rows, ""])


def _command(name: str, command: Any, level: int) -> Iterator[str]:
    """The lines of a command: usage, text, parameters; then, in a group below a program, its subcommands."""
    context = typer.Context(command, info_name=name)
    yield f"{'#' * level} {name}\n"
    yield f"```text\n{name} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    for paragraph in re.split(r"\n{2,}", command.help or ""):
        yield f"{' '.join(paragraph.split())}\n"
    if rows := [row for parameter in command.params if (row := _row(parameter, context))]:
        yield "| argument or option | meaning |\n|---|---|"
        yield from [*rows, ""]
    if command.epilog:
        yield f"{command.epilog}\n"
    if " " not in name:
        return
    for each, subcommand in getattr(command, "commands", {}).items():
        if not subcommand.hidden:
            yield from _command(f"{name} {each}", subcommand, level + 1)


def _row(parameter: Any, context: typer.Context) -> str:
    """One row of the table. Hidden options and `--help` have none."""
    record = parameter.get_help_record(context)
    if record is None or "--help" in parameter.opts:
        return ""
    names, text = (" ".join(part.split()).replace("|", "\\|") for part in record)
    return f"| `{names}` | {text} |"
