"""The package ultralytics: whether it is there, its version, and its view of the arguments."""

import contextlib
import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import cache_folders
from trainer.config import yaml_file
from trainer.distributed.machine_lock import one_per_machine
from trainer.errors import TrainerError
from trainer.ultralytics.arguments import TASKS, parse

NAME = "ultralytics"
#: The versions with which the tests run. Later ones of the same line are accepted, and others refused.
TESTED = ("8.3.253", "8.4.190")
_NEXT = (8, 5)
_COLOURS = re.compile("\x1b\\[[0-9;]*m")
REQUIREMENT = f"ultralytics>={TESTED[0]},<8.5"


def check_version() -> str:
    """Return the installed version. Raise TrainerError if the package is missing, or of a line that is not tested."""
    install = f'install it: pip install "{REQUIREMENT}"; for a job: clusterctl launch --setup \'pip install "{REQUIREMENT}"\''
    try:
        version = importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        raise TrainerError(f"yolo: the package {NAME} is not installed here", install) from None
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())
    lowest = tuple(map(int, TESTED[0].split(".")))
    if not lowest <= numbers < _NEXT:
        raise TrainerError(f"yolo: {NAME} {version} is not supported, only {TESTED[0]} to 8.4", install)
    return version


def load(environment: Mapping[str, str] = os.environ) -> None:
    """Import the package.

    In a job it keeps settings and downloads in the node's cache folder, unless the user has settings of their own: it
    would write them into the home folder and the current folder, which a container often lacks, or cannot write.
    """
    own = environment.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111 (Path.home can raise)
    settings = Path(environment.get("YOLO_CONFIG_DIR") or own, "Ultralytics", "settings.json")
    if cache := cache_folders.of_node(environment):
        folder = cache / NAME
        folder.mkdir(parents=True, exist_ok=True)
        if not settings.is_file():
            os.environ["YOLO_CONFIG_DIR"] = str(folder)
            settings = folder / "Ultralytics" / "settings.json"
        os.chdir(folder)  # where it stores the weights that it downloads
    load_opencv()
    # The first import on a machine writes the settings, which another rank must not read half written.
    with contextlib.nullcontext() if settings.is_file() else one_per_machine(settings.parent):
        importlib.import_module(NAME)


def load_opencv() -> None:
    """Import OpenCV, which the package imports: the first one on the path that can be loaded.

    The package installs `opencv-python`, which needs libraries of a desktop. A slim container image lacks them, and has
    `opencv-python-headless`, which the other one hides.
    """
    before = list(sys.path)
    causes = []
    for first in ([], *([entry] for entry in before if Path(entry, "cv2").is_dir())):
        sys.path[:] = [*first, *before]
        try:
            importlib.import_module("cv2")
            return
        except ImportError as error:
            causes.append(first_line(error))
            # What a failed import leaves, and would take for a recursion.
            for name in [name for name in sys.modules if name.partition(".")[0] == "cv2"]:
                del sys.modules[name]
            vars(sys).pop("OpenCV_LOADER", None)
        finally:
            sys.path[:] = before
    hint = "replace it: pip uninstall --yes opencv-python && pip install --force-reinstall opencv-python-headless"
    raise TrainerError(f"yolo: OpenCV cannot be loaded: {causes[0]}", hint)


def first_line(error: Exception) -> str:
    """Return the first line of a message of the package, without its colours."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def read_arguments(words: Sequence[str]) -> tuple[str, dict[str, Any], Any]:
    """Return the task ("": the model's), the typed arguments, and all arguments with the package's defaults.

    The package converts and checks the values. Those of a file `cfg=` are read too; the command line wins over them.
    Raise TrainerError if arguments are invalid.
    """
    cfg = importlib.import_module(f"{NAME}.cfg")
    found = parse(words, cfg.DEFAULT_CFG_DICT)
    logger = importlib.import_module(f"{NAME}.utils").LOGGER
    before = logger.disabled
    logger.disabled = True  # it would print the package's whole help after an unknown argument
    try:
        values = dict(cfg.parse_key_value_pair(f"{name}={value}") for name, value in found.values.items())
        if file := values.pop("cfg", None):
            values = {**_read_file(Path(str(file))), **values}
        task = str(found.task or values.pop("task", None) or "")
        resolved = cfg.get_cfg(overrides={key: value for key, value in values.items() if key != "task"})
    except (
        SyntaxError,
        TypeError,
        ValueError,
        AssertionError,
    ) as error:  # as the package reports what is wrong
        raise TrainerError(f"yolo: {first_line(error)}", "the arguments and their values: yolo cfg") from None
    finally:
        logger.disabled = before
    values.pop("task", None)
    if task and task not in TASKS:
        raise TrainerError(
            f"cfg=: its task {task} does not train on several machines", f"use {', '.join(TASKS)}"
        )
    if isinstance(resolved.data, (list, tuple)):
        raise TrainerError("data= names several datasets, but a job trains on one", "launch a job for each")
    return task, values, resolved


def _read_file(path: Path) -> dict[str, Any]:
    """Return the arguments in a file `cfg=`, except its mode."""
    if not path.is_file():
        raise TrainerError(f"cfg={path}: no such file", "check the path; for the defaults, omit it")
    return {key: value for key, value in yaml_file.read(path).values.items() if key not in ("mode", "cfg")}
