"""Processes of a measurement's ranks: on this machine, or in the ranks of a launcher's job."""

import dataclasses
import itertools
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.rendezvous import rendezvous

from trainer import contract
from trainer.config import Settings
from trainer.distributed import comm
from trainer.distributed.spawn import Line, free_port, local_ranks, rank_error, run_ranks
from trainer.engine.memory import OUT_OF_MEMORY
from trainer.errors import TrainerError

END_TIMEOUT_S = 10.0  # rank 0 waits for the other ranks
LINES = 200  # of each rank's output, for an error
Request = Mapping[str, Any]  # arguments of `trainer bench rank`, as JSON
Runner = Callable[[Request, int], Any]  # runs a request on a number of ranks, and returns rank 0's answer


class NoMemory(TrainerError):
    """Error of a measurement that runs out of memory."""


def request_of(record: str, settings: Settings, threads: int, **options: Any) -> Request:
    """Return the request to run `record` of `trainer bench rank` in each rank, with `threads` threads."""
    return {"record": record, "settings": dataclasses.asdict(settings), "threads": threads, **options}


def run_here(request: Request, ranks: int) -> Any:
    """Run `trainer bench rank` as `ranks` ranks of this machine, and return the answer of rank 0.

    Raises NoMemory if a rank runs out of memory, TrainerError if one fails. Ctrl-C stops the ranks.
    """
    if "RANK" in os.environ:
        raise TrainerError("this command starts its own ranks, but RANK is set", "start it without torchrun")
    failed, output, answer = _run(request, local_ranks(ranks))
    _raise(failed, output)
    return answer


class Job:
    """The ranks of a launcher's job. Each runs its own rank of every measurement, as a child process."""

    def __init__(self, world: comm.World) -> None:
        self.world = world
        # Rank 0 hosts it, unless torchrun does.
        self._store, _, _ = next(rendezvous("env://", timeout=comm.TIMEOUT))
        self._number = 0
        self._is_stopped = False
        self._store.set(f"local size/{world.rank}", str(world.local_size))

    def most_on_a_node(self) -> int:
        """Return the number of ranks of the largest node."""
        keys = [f"local size/{rank}" for rank in range(self.world.size)]
        self._store.wait(keys, comm.TIMEOUT)
        return max(int(self._store.get(key)) for key in keys)

    def run(self, request: Request, ranks: int) -> Any:
        """Run the first `ranks` ranks of the job, as `run_here` does. Rank 0 calls this."""
        if ranks > self.world.size:
            what = f"--ranks {ranks}: the job has only {self.world.size}"
            raise TrainerError(what, "launch it with more nodes or GPUs")
        self._number += 1
        self._store.set(f"request/{self._number}", json.dumps([request, ranks, free_port()]))
        answer = self._run_own_rank(self._number)
        keys = [f"ended/{self._number}/{rank}" for rank in range(ranks)]
        while not self._store.check(keys):
            time.sleep(0.05)
        failed: dict[int, int] = {}
        output: list[Line] = []
        for rank, key in enumerate(keys):
            code, lines = json.loads(self._store.get(key))
            if code:
                failed[rank] = code
            output += [Line(rank, *line) for line in lines]
        _raise(failed, output)
        return answer

    def follow(self) -> None:
        """Run this rank's part of each measurement until rank 0 ends the job. All ranks but 0 call this."""
        for number in itertools.count(1):
            self._store.wait([f"request/{number}"], timedelta(days=365))
            if self._store.get(f"request/{number}") == b"null":
                break
            self._run_own_rank(number)
        self._store.set(f"finished/{self.world.rank}", "")

    def end(self) -> None:
        """End the other ranks. Rank 0 calls this last, because its process hosts the store."""
        if self._is_stopped:
            return
        self._store.set(f"request/{self._number + 1}", "null")
        keys = [f"finished/{rank}" for rank in range(1, self.world.size)]
        deadline = time.monotonic() + END_TIMEOUT_S
        while keys and not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)

    def stop(self, *_: object) -> NoReturn:
        """Handle a launcher's stop signal."""
        self._is_stopped = True
        raise KeyboardInterrupt

    def _run_own_rank(self, number: int) -> Any:
        request, ranks, port = json.loads(self._store.get(f"request/{number}"))
        world = self.world
        if world.rank >= ranks:
            return None
        first_on_node = world.rank - world.local_rank
        local_size = min(world.local_size, ranks - first_on_node)
        variables = {}
        if ranks > 1:
            variables = {
                "RANK": str(world.rank),
                "LOCAL_RANK": str(world.local_rank),
                "GROUP_RANK": str(world.node),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(local_size),
                "MASTER_ADDR": os.environ["MASTER_ADDR"],
                "MASTER_PORT": str(port),
            }
        failure = f"failed/{number}"

        def peer_failed() -> bool:
            return bool(self._store.check([failure]))

        failed, output, answer = _run(request, [variables], peer_failed)
        if failed:
            self._store.set(failure, "")
        code = failed.get(0, 0)  # of the only rank that runs here
        lines = [(line.stderr, line.text) for line in output[-LINES:]]
        self._store.set(f"ended/{number}/{world.rank}", json.dumps([code, lines]))
        return answer


def _run(
    request: Request,
    rank_environments: Sequence[Mapping[str, str]],
    peer_failed: Callable[[], bool] = lambda: False,
) -> tuple[dict[int, int], list[Line], Any]:
    """Run the ranks; return the exit codes of failed ranks, the output, and rank 0's answer."""
    kept = {}
    for name, value in os.environ.items():
        is_of_job = name.startswith("CLUSTER_") and name != contract.NODES_ON_HOST
        if not is_of_job:
            kept[name] = value
    # With a job id, a rank writes its error as an event. The number of threads sets the order of sums.
    environment = {**kept, contract.JOB_ID: "bench", "OMP_NUM_THREADS": str(request["threads"])}
    output: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        request_file = Path(folder) / "request.json"
        answer_file = Path(folder) / "answer.pt"
        request_file.write_text(json.dumps(request), encoding="utf-8")
        command = ["bench", "rank", str(request_file), str(answer_file)]
        failed = run_ranks(command, rank_environments, environment, output.append, peer_failed=peer_failed)
        answer = None
        if answer_file.exists() and not failed:
            answer = torch.load(answer_file, weights_only=True)
        return failed, output, answer


def _raise(failed: Mapping[int, int], output: Sequence[Line]) -> None:
    if -signal.SIGKILL in failed.values():
        raise NoMemory(f"{OUT_OF_MEMORY}, probably: the system killed a rank")
    if failed:
        error = rank_error(failed, output)
        if error.message.startswith(OUT_OF_MEMORY):
            raise NoMemory(error.message, error.hint)
        raise error
