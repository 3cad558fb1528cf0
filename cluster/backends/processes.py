"""The processes and containers of a launch on a machine: how they are stopped."""

import math
from collections.abc import Sequence

from cluster.agent import scripts
from cluster.errors import ClusterError
from cluster.spec.model import Machine
from cluster.transport import reach


def stop(
    machine: Machine,
    launch_id: str,
    grace_s: float,
    engines: Sequence[str],
    *,
    timeout_s: float,
    attempt: int | None = None,
    folder: str = "",
) -> None:
    """Stop the processes of a launch on a machine, and its containers in `engines`, of all attempts or only of one.

    `folder` is the attempt's on the machine; its agents find `grace_s` there, and wait longer. Raises ClusterError if
    some remain.
    """
    which = {"attempt": "" if attempt is None else attempt, "folder": folder, "engines": engines}
    command = scripts.command("stop", launch=launch_id, grace=math.ceil(grace_s), **which)
    done = reach(machine).run(command, timeout_s=timeout_s)
    if done.out:
        why = f"{machine.name}: {', '.join(done.out.splitlines())} still running after SIGKILL (launch {launch_id})"
        hint = "check the engine with clusterctl doctor, or kill them as root there"
        raise ClusterError(why, hint)
