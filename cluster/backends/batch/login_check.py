"""The preflight check on the login node of a batch system: programs, run directory, runtime, image and paths. Pure."""

from collections.abc import Mapping, Sequence

from cluster.agent import scripts
from cluster.runtimes import RUNTIMES
from cluster.spec.model import Job

#: A message and a hint.
Problem = tuple[str, str]


def command(
    job: Job,
    backend: str,
    title: str,
    programs: Sequence[str],
    *,
    run_dir: str,
    new: str = "",
    name: str = "",
    needs: Sequence[str] = (),
) -> list[str]:
    """Return the command of the preflight check on the login node; see check.sh."""
    assert job.queue is not None
    kind = RUNTIMES[job.queue.login.runtime]
    version = kind.version if kind.is_on_login_node else ()
    where = {"image": kind.image_file(job.image), "run_dir": run_dir, "new": new, "name": name}
    lists = {"programs": tuple(programs), "version": version, "needs": tuple(needs)}
    folder = f"backends/{backend}"
    return scripts.command_after(
        folder, "backends/batch/check", scheduler=title, runtime=kind.name, **lists, **where
    )


def problems(job: Job, has: Mapping[str, Sequence[str]], where: str, title: str, ping: str) -> list[Problem]:
    """Return the problems that prevent a submission to any batch system, from the output of check.sh by key.

    `title` is the batch system's name, and `ping` the command that shows whether it answers.
    """
    assert job.queue is not None
    hints = {
        "no_program": ("{} not found", f"set login in cluster.yaml to a login node of the {title} cluster"),
        "down": (f"{title} does not answer: {{}}", f"check it: {ping}"),
        "run_dir": (
            "cannot write to the run directory {}",
            "run_dir in cluster.yaml, or --run-dir: a shared folder",
        ),
        "no_runtime": (
            "the runtime {} is not installed",
            "ask the administrator, or set another runtime in cluster.yaml",
        ),
        "no_image": ("no image {}", RUNTIMES[job.queue.login.runtime].image_command(job.image)),
        "missing": ("{} does not exist", ""),
    }
    return [
        (f"{where}: {message.format(text)}", hint or job.queue.login.hint_for_missing(text))
        for word, (message, hint) in hints.items()
        for text in has.get(word, ())
    ]
