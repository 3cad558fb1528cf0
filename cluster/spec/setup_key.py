"""The key of a --setup environment: jobs with equal keys share it. Pure."""

import hashlib
import posixpath
import re
from collections.abc import Mapping

from cluster.spec.here import Here
from cluster.spec.paths import absolute

#: Variables that change what pip and uv install.
_INSTALLER_VARIABLES = ("PIP_", "UV_")
#: The files and folders that a requirements file includes.
_INCLUDES = re.compile(
    rb"^\s*(?:(?:-r|-c|-e|--requirement|--constraint|--editable)[ \t=]*|(?=\.\.?(?:/|$)|/\w))(\S+)",
    re.MULTILINE,
)


def setup_key(text: str, prologue: str, env: Mapping[str, str], workdir: str, here: Here) -> str:
    """Return a hash of the setup commands, of the prologue, and of the files and variables that the commands use.

    "" if they name a folder, such as `.`, or a file that is too large: the environment then is the job's own.
    """
    if not text or (files := _named_files(text, workdir, here)) is None:
        return ""
    parts = [text.encode(errors="surrogateescape"), *files]
    parts += [prologue.encode(errors="surrogateescape")] if prologue else []
    used = {name for name in env if any(re.search(rb"\b%b\b" % name.encode(), part) for part in parts)}
    used |= {name for name in env if name.startswith(_INSTALLER_VARIABLES)}
    parts += [f"{name}={env[name]}".encode(errors="surrogateescape") for name in sorted(used)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d:%b" % (len(part), part))
    return digest.hexdigest()[:16]


def _named_files(text: str, workdir: str, here: Here) -> list[bytes] | None:
    """Return the content of the files that commands name, and of the requirement files that those include.

    None if one of them is a folder, or too large to read.
    """
    text = re.sub(r">+\s*\S+", " ", text)  # a file that the commands write
    commands = [re.split(r"[\s=()<]+", command.strip()) for command in re.split(r"[;&|\n]+", text)]
    # The shell finds the first word in PATH, unless it has a slash.
    words = [word for command in commands for word in command[0 if "/" in command[0] else 1 :]]
    pending = [_file_of(word, workdir) for word in reversed(words) if word]
    contents: dict[str, bytes] = {}
    while pending:
        path = pending.pop()
        if path in contents:
            continue
        content = here.read(path)
        if content is None or here.is_folder(path):
            return None
        contents[path] = content
        included = [word.decode(errors="replace") for word in _INCLUDES.findall(content)]
        pending += [_file_of(word, posixpath.dirname(path)) for word in included]
    return [content for content in contents.values() if content]


def _file_of(word: str, folder: str) -> str:
    """Return the path that a word of a command names, without quotes and pip's extras: `'.[dev]'`."""
    return absolute(word.strip("'\"").partition("[")[0], folder)
