"""Text of the scripts and archive of the agent, which are sent to nodes without this package, and shell quoting."""

import base64
import functools
import io
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]

#: A variable of a script: a text or number, or an array of texts.
Value = str | int | Sequence[str]
#: The word of a runtime's command that agent/node.sh replaces by the options of the machine.
OPTIONS = "@options@"


@functools.cache
def text(*names: str) -> str:
    """Return the concatenated files `names`, relative to the package `cluster`."""
    return "".join((_PACKAGE / name).read_text(encoding="utf-8") for name in names)


def command(name: str, /, *words: str, **values: Value) -> list[str]:
    """Return the command that runs agent/NAME.sh, or a backend's script, such as backends/slurm/poll; see `bash`."""
    folder, _, _ = name.rpartition("/")
    return command_after(folder or "agent", name if folder else f"agent/{name}", *words, **values)


def command_after(folder: str, name: str, /, *words: str, **values: Value) -> list[str]:
    """Return the command that runs a script after the functions that it may call; see `bash`.

    These are the agent's, and those in environment.sh and common.sh of a backend's folder.
    """
    files = ("agent/common.sh", "agent/own_folder.sh", f"{folder}/environment.sh", f"{folder}/common.sh")
    functions = [file for file in dict.fromkeys(files) if (_PACKAGE / file).exists()]
    own_name = name.rpartition("/")[2]  # $0, which errors of bash begin with
    return ["bash", "-c", variables(**values) + text(*functions, f"{name}.sh"), own_name, *words]


def prologue(lines: str, failed: str, own: Sequence[str] = (), log: str = "/dev/null") -> str:
    """Return shell text that runs the job's lines, or "" if there are none; `failed` is run with a sentence as `$1`.

    The lines cannot change the variables `own`. `log` is the shell word of the file that gets their output.
    """
    if not lines.strip():
        return ""
    head = variables(prologue=lines, own=tuple(own)) + f"prologue_log={log}\n"
    return f"{head}prologue_failed() {{ {failed}; }}\n" + text("agent/prologue.sh")


def bash(name: str, /, *words: str, **values: Value) -> list[str]:
    """Return the command that runs the script `name`, relative to the package `cluster`.

    `values` are the script's variables. Its arguments `words` are for a command, or a list of any length: Linux takes
    2 MB of arguments, but only 128 KB in one of them. Both are on a command line, which all users can read.
    """
    return ["bash", "-c", variables(**values) + text(name), name, *words]


def variables(**values: Value) -> str:
    """Return one line per variable that sets it to a text or number, or to an array of texts."""
    quoted = {
        name: shlex.quote(str(v)) if isinstance(v, str | int) else f"({line(v)})"
        for name, v in values.items()
    }
    return "".join(f"{name}={value}\n" for name, value in quoted.items())


@functools.cache
def archive() -> bytes:
    """Return agent.pyz, the agent as an archive that Python runs. Without dates, equal sources give equal bytes."""
    import zipfile

    folder = _PACKAGE / "agent" / "app"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        for path in sorted(folder.rglob("*.py")):
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix())
            made.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return file.getvalue()


def archive_line() -> str:
    """Return agent.pyz in one line of Base64, as the scripts that start a node or submit a job read it."""
    return base64.b64encode(archive()).decode() + "\n"


def exports(values: Mapping[str, str]) -> str:
    """Return one `export NAME=value` line per variable, quoted for a POSIX shell."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in values.items())


def line(words: Sequence[str]) -> str:
    """Return the words as one quoted shell command."""
    return shlex.join(words)


def csv(fields: Sequence[str]) -> str:
    """Return one line of CSV, the syntax of `--mount`: a path may contain ':', ',' and quotes."""
    return ",".join(
        '"' + field.replace('"', '""') + '"' if set(field) & set(',"\n') else field for field in fields
    )
