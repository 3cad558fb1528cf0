"""Checks of this machine, which a launch needs as well as the nodes: its programs, and the disk of the results."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from cluster.backends import BACKENDS
from cluster.checks.findings import Finding
from cluster.checks.machine import DISK_NEEDED_KB
from cluster.spec.model import Inventory

#: The programs that reach a machine over SSH, and how to install them on Debian.
_PROGRAMS = {"ssh": "sudo apt-get install openssh-client", "rsync": "sudo apt-get install rsync"}
_NAME = "this machine"


def examine(inventory: Inventory) -> list[Finding]:
    """Return the findings on this machine."""
    problems = [*_missing_programs(inventory), *_full_disk(Path.cwd())]
    if problem := BACKENDS[inventory.backend].problem():
        why, fix = problem
        problems.append(Finding("here", _NAME, "failure", why.removeprefix(f"{_NAME}: "), fix))
    return problems or [Finding("here", _NAME, "ok", "it has what a launch needs")]


def _missing_programs(inventory: Inventory) -> Iterable[Finding]:
    if not any(machine.login for machine in inventory.machines):
        return
    for program, fix in _PROGRAMS.items():
        if not shutil.which(program):
            yield Finding("here", _NAME, "failure", f"{program} is not installed", fix)


def _full_disk(folder: Path) -> Iterable[Finding]:
    free_kb = shutil.disk_usage(folder).free >> 10
    if free_kb < DISK_NEEDED_KB:
        fix = f"free space (df -h {folder}), or launch from another folder"
        yield Finding("here", _NAME, "failure", f"{free_kb >> 10} MB free for the results in {folder}", fix)
