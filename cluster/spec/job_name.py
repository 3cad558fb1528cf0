"""The name of a job that has none. Pure."""

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import PurePosixPath

from cluster.spec.model import Job
from cluster.spec.trainer_arguments import data_set


def default_name(new: Job) -> str:
    """Return a name like `digits-7f3a`: the data set or program, and four hex digits of the job's hash."""
    digest = hashlib.sha256(json.dumps(asdict(new), sort_keys=True).encode()).hexdigest()
    return f"{_subject(new)}-{digest[:4]}"


def _subject(new: Job) -> str:
    """Return what the job is about."""
    if data := data_set(new.command):
        return stem(data)
    if new.says_ready:
        return "digits"
    is_module = new.command[0] == "-m" and len(new.command) > 1
    return stem(new.command[1] if is_module else new.command[0])


def numbered(name: str, nth: int) -> str:
    """Return the nth of the names `digits-7f3a`, `digits-7f3a-2`, `digits-7f3a-3`, ..."""
    return name if nth == 1 else f"{name[:44]}-{nth}"


def stem(text: str) -> str:
    """Return a file's name as a part of a job's name; a file named `data` has its folder's."""
    path = PurePosixPath(text)
    is_general = path.stem in ("data", "dataset") and path.parent.name
    words = re.sub(r"[^a-z0-9]+", "-", (path.parent.name if is_general else path.stem).lower())
    return words.strip("-")[:30] or "job"
