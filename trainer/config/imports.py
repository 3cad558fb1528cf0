"""Import of a user's code by a path, package.module:name."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

from trainer.errors import TrainerError

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_import_path(text: str) -> bool:
    """Whether `text` has the form package.module:name."""
    return bool(_PATH.fullmatch(text))


def load(path: str, option: str) -> Any:
    """Return the function or class of an import path; the current folder is searched too."""
    module, _, name = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise TrainerError(
            f"{option} {path}: no module {error.name}", f"searched in {here} and Python's path (PYTHONPATH)"
        ) from error
    except Exception as error:  # the user's code can raise anything
        raise TrainerError(
            f"{option} {path}: importing {module} raised {type(error).__name__}: {error}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise TrainerError(f"{option} {path}: {module} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise TrainerError(f"{option} {path}: it is a {type(found).__name__}, not a function or class")
    return found
