"""Batch scripts, which submitit renders. A module of its own, because importing submitit takes 0.1 s."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import submitit

from cluster.errors import UsageError
from cluster.spec.model import Job

#: Slurm sends USR2 to the batch script alone (B), 90 s before the time limit, as submitit does by default.
_SIGNAL = "B:USR2@90"


class _Executor(submitit.SlurmExecutor):
    """submitit's executor. It only renders scripts here: nothing is pickled, and a `Shell` submits them."""

    @classmethod
    def affinity(cls) -> int:
        """Return a positive value: rendering a script needs no Slurm on this machine."""
        return 2


def render(
    job: Job, command: str, *, path: str, run_dir: str, output: str, setup: Sequence[str], **array: int
) -> tuple[str, tuple[str, ...]]:
    """Return the batch script with the job's options, and the command that submits it from `path`.

    `setup` has the lines before the command, `output` is the script's log, `array` has submitit's parameters of arrays.
    Raises UsageError.
    """
    assert job.queue is not None
    more: dict[str, Any] = {"signal": _SIGNAL, "requeue": True, "output": output}
    if job.device == "cuda" and not {"gres", "gpus-per-node"} & {*job.queue.options}:
        more["gpus-per-node"] = job.procs_per_node
    more |= {name: value or True for name, value in job.queue.options.items()}
    executor = _Executor(run_dir)
    try:
        executor.update_parameters(
            job_name=job.name,
            nodes=job.nodes,
            ntasks_per_node=1,
            time=None,
            wckey=None,
            stderr_to_stdout=True,
            use_srun=False,
            setup=list(setup),
            additional_parameters=more,
        )
    except ValueError as error:
        raise UsageError(f"--slurm: {error}") from error
    executor.parameters.update(array)
    text = str(executor._make_submission_file_text(command, ""))
    return text, tuple(executor._make_submission_command(Path(path)))
