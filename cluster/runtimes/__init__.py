"""How to enter the place where the program runs: one file and one line of this table per runtime."""

from __future__ import annotations

from typing import Protocol

from cluster.model import Job
from cluster.runtimes import none


class Runtime(Protocol):
    """Spells command lines and does nothing else."""

    def run(self, job: Job) -> tuple[str, ...]:
        """The command that starts torchrun for one node; torchrun's options come from the environment."""
        ...


RUNTIMES: dict[str, Runtime] = {"none": none.NoRuntime()}
