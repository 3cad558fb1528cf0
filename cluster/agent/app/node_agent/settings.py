"""Settings of the node from the environment, and the command and variables of its ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any, Dict, Mapping

Fields = Dict[str, Any]

EVENT_MARK = "::cluster "
EXIT_NODE = 71  # the node cannot run ranks: the port is in use, or the program does not exist
EXIT_RUN_DIR = 73  # the run directory cannot be written to
EXIT_RUN_ME_AGAIN = 75
HEARTBEAT_S = 2.0
#: As in cluster/contract.py, which also has the order of all grace periods.
STOP_GRACE_S = 120.0
GRACE_MARGIN_S = 10.0
GRACE_FILE = "grace"
COLLECTED_ENDING = ".collected"
#: Blocked in all threads: the main loop receives them one at a time, without the races of a handler.
SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2}


class Settings:
    """The node's settings from the environment. Raises SystemExit for a missing or invalid variable."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        try:
            self.nodes = int(environment["PET_NNODES"])
            self.node_rank = int(environment["PET_NODE_RANK"])
            self.ranks = int(environment["PET_NPROC_PER_NODE"])
            # nodes with other numbers of ranks than this one have other variables
            self.first_rank = int(environment.get("CLUSTER_FIRST_RANK") or self.node_rank * self.ranks)
            self.world_size = int(environment.get("CLUSTER_WORLD_SIZE") or self.nodes * self.ranks)
            self.port = int(environment["PET_MASTER_PORT"])
            self.nodes_on_host = int(environment.get("CLUSTER_NODES_ON_HOST") or 1)
            self._grace_s = float(environment.get("CLUSTER_GRACE") or STOP_GRACE_S)
            self.hold_s = float(environment.get("CLUSTER_HOLD") or 0)
            self.rendezvous_timeout_s = float(environment.get("CLUSTER_RENDEZVOUS_TIMEOUT") or 0)
            self.umask = int(environment["CLUSTER_UMASK"], 8) if environment.get("CLUSTER_UMASK") else None
            self.master = environment["PET_MASTER_ADDR"]
            self.job = environment["CLUSTER_JOB_ID"]
            self.attempt = environment["CLUSTER_ATTEMPT"]
            self.run_dir = environment["CLUSTER_RUN_DIR"]
        except (KeyError, ValueError) as error:
            raise SystemExit("agent: a variable is missing or is not a number: {!r}".format(error)) from None
        self.name = environment.get("CLUSTER_NODE") or "node-%d" % self.node_rank
        names = [name for name in environment.get("CLUSTER_SECRETS", "").split(",") if name]
        self.secrets = [environment[name] for name in names if environment.get(name)]
        self.folder = os.path.join(self.run_dir, "attempt-" + self.attempt)
        self.stall_timeout_s = float(environment.get("CLUSTER_STALL_TIMEOUT") or 0)

    def grace_s(self) -> float:
        """Return the seconds after which this node kills ranks that got SIGTERM: later than the sender of the SIGTERM.

        The grace is the one of `clusterctl stop --grace`, or else the job's.
        """
        grace_s = self._grace_s
        with contextlib.suppress(OSError, ValueError), open(os.path.join(self.folder, GRACE_FILE)) as file:
            grace_s = float(file.read())
        return grace_s + GRACE_MARGIN_S

    def path(self, ending: str) -> str:
        """Return the path of a file of this node in the attempt's folder."""
        return f"{self.folder}/{self.name}{ending}"


def rank_command(arguments: list[str]) -> list[str]:
    """Return the command of a rank from torchrun's arguments."""
    if not arguments or arguments in (["-m"], ["--no-python"]):
        raise SystemExit(
            "agent: no program: agent.py [-m MODULE | --no-python PROGRAM | SCRIPT] ARGUMENTS..."
        )
    if arguments[0] == "--no-python":
        return arguments[1:]
    if arguments[0].startswith("-") and arguments[0] != "-m":
        raise SystemExit(
            "agent: {}: expected -m MODULE, --no-python PROGRAM or a script".format(arguments[0])
        )
    return [sys.executable, "-u", *arguments]


def rank_variables(settings: Settings, local_rank: int, hooks: str) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank, and the path of the rank's exception in `hooks`."""
    rank = settings.first_rank + local_rank
    world = settings.world_size
    values = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": settings.ranks,
        "GROUP_RANK": settings.node_rank,
        "GROUP_WORLD_SIZE": settings.nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": settings.master,
        "MASTER_PORT": settings.port,
        "TORCHELASTIC_RUN_ID": settings.job,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "CLUSTER_RANK_RECORD": os.path.join(hooks, "rank-%d.json" % local_rank),
    }
    return {name: str(value) for name, value in values.items()}


def node_environment(settings: Settings, environment: Mapping[str, str], hooks: str) -> dict[str, str]:
    """Return the variables that all ranks of the node share: threads, error handling, folder of `sitecustomize`."""
    values = dict(environment)
    cores = len(os.sched_getaffinity(0))
    values.setdefault("OMP_NUM_THREADS", str(max(1, cores // (settings.ranks * settings.nodes_on_host))))
    values.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    values.setdefault("PYTHONFAULTHANDLER", "1")
    values["PYTHONUNBUFFERED"] = "1"
    values["PYTHONPATH"] = os.pathsep.join(part for part in (hooks, environment.get("PYTHONPATH")) if part)
    return values
