"""Keeps a job going: follows an attempt; after a failure stops every place, chooses nodes, starts the next."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from cluster import commands, config, fanout, files, looks, rendezvous, restarts
from cluster.backends import BACKENDS
from cluster.commands import FAILED_GRACE_S, Show, Watched
from cluster.errors import ClusterError, LaunchError, UnreachableError, with_hint
from cluster.model import Node, Plan, Record
from cluster.records import Records
from cluster.rendezvous import JobView
from cluster.restarts import Failure
from cluster.shells import reach

#: How long to wait for lost machines to come back, when without them there are too few.
RETURN_S = 60.0
#: The trainer's newest checkpoint, in the job's folder.
_CHECKPOINT = "last.pt"
_RETURN_TICK_S = 3.0
#: After so many ticks of waiting for somebody else's restart, whether the attempt is well is looked at anew.
_LOOK_AGAIN = 10


class BetweenAttempts(KeyboardInterrupt):
    """Ctrl-C where an attempt has ended, and the next one may have begun on some nodes."""


def run(
    record: Record,
    records: Records,
    show: Show,
    *,
    secrets: Mapping[str, str] | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> tuple[Watched, str]:
    """Follow the job to its end, over all its attempts; the last attempt, and why there is no further one ("": done).

    Where another process of this machine keeps the job going already, its restarts are followed.
    """
    while True:
        with records.watch(record.plan.job_id) as ours:
            if ours:
                return _keep_going(record, records, show, secrets, wait)
        watched = commands.follow(record, show, wait=wait)
        if watched.verdict == "done" or records.load(record.plan.job_id).outcome:
            return watched, ""
        newer = _theirs(record, records, wait)
        if newer is None:
            return watched, ""
        record = newer


def _keep_going(
    record: Record,
    records: Records,
    show: Show,
    secrets: Mapping[str, str] | None,
    wait: Callable[[float], None],
) -> tuple[Watched, str]:
    past: list[Failure] = []
    follower = None
    while True:
        watched = commands.follow(record, show, wait=wait, follower=follower)
        follower = None
        if watched.verdict == "done" or records.load(record.plan.job_id).outcome:
            return watched, ""
        if _goes_on_unseen(record, watched, show, wait):
            show.note("they answer again, and the job has gone on meanwhile")
            follower = watched.follower
            follower.view = rendezvous.found_again(follower.view, time.time())
            continue
        began = time.time()
        again: Record | str | None
        try:
            again = commands.another_port(record, watched, records, secrets)
            if again is not None:
                show.note(f"the port was taken meanwhile: attempt {again.plan.attempt} with {again.plan.master_port}")
                record = again
                continue
            past.append(restarts.failure(watched.view, watched.verdict))
            again = _restarted(record, records, watched, past, show, secrets, wait)
        except KeyboardInterrupt:
            raise BetweenAttempts from None
        except ClusterError as error:
            again = _not_started(error)
        if isinstance(again, str):  # noted while nobody else may take the job over
            commands.give_up(watched, records)
            return watched, again
        record = again
        places = ", ".join(node.name for node in record.plan.nodes)
        show.note(f"attempt {record.plan.attempt} on {places}, {time.time() - began:.1f} s after the failure was seen")


def _restarted(
    record: Record,
    records: Records,
    watched: Watched,
    past: list[Failure],
    show: Show,
    secrets: Mapping[str, str] | None,
    wait: Callable[[float], None],
) -> Record | str:
    """The next attempt, started, or why there is none. A machine that goes while it is started costs one more.

    Raises ClusterError where that would not help: for the same reason twice, or at the last restart.
    """
    while not (refused := restarts.refusal(record.job, watched.view, watched.verdict, past)):
        show.note(f"{past[-1].why}; restart {len(past)} of {record.job.max_restarts}")
        try:
            return _next_attempt(record, records, watched.view, past[-1], show, secrets, wait)
        except (UnreachableError, LaunchError) as error:
            why = _not_started(error)
            if why == past[-1].why or len(past) == record.job.max_restarts:
                raise
            past.append(Failure(why, past[-1].step))
            record = records.load(record.plan.job_id)
            if record.outcome:
                raise
    return refused


def _not_started(error: ClusterError) -> str:
    return f"it could not be started again: {with_hint(error.message, error.hint)}"


def _goes_on_unseen(record: Record, watched: Watched, show: Show, wait: Callable[[float], None]) -> bool:
    """Whether an attempt whose machines all fell silent at once is well: it was this one that was cut off.

    Raises UnreachableError where none of them and no spare answers for RETURN_S: nothing is known of the job then.
    """
    nodes = watched.view.nodes
    if not record.job.hosts or len(nodes) == 1 or not all(node.phase == "lost" or node.silent for node in nodes):
        return False
    told = False
    clock = looks.Clock()
    until = clock() + RETURN_S
    asked = (*record.plan.nodes, *record.job.spares)
    while True:
        answers = fanout.each(asked, lambda node: reach(node).run(["true"], timeout_s=8))
        silent = [answer for answer in answers.values() if isinstance(answer, UnreachableError)]
        if len(silent) < len(answers):
            return _is_well(record)
        if clock() > until:
            raise silent[0]
        if not told:
            show.note("no machine answers any more, as if this one were cut off: waiting for them")
        told = True
        wait(_RETURN_TICK_S)


def _next_attempt(
    record: Record,
    records: Records,
    view: JobView,
    last: Failure,
    show: Show,
    secrets: Mapping[str, str] | None,
    wait: Callable[[float], None],
) -> Record:
    plan = record.plan
    backend = BACKENDS[plan.backend]
    again = backend.requeued(plan, wait)
    if again is not None:
        record = replace(record, plan=again, created_at=time.time(), past=(*record.past, last.why))
        records.update(record)
        Path(again.attempt_dir).mkdir(parents=True, exist_ok=True)
        return record
    lost = [node.name for node in view.nodes if node.silent]  # its machine does not answer
    with ThreadPoolExecutor(1) as pool:  # the nodes are stopped while the next ones are chosen
        stopping = pool.submit(_cancel, plan, lost, show)
        nodes = _nodes(record, lost, show, wait) if record.job.hosts else ()
        stopping.result()
    job = replace(record.job, name=plan.job_id, nodes=len(nodes) or record.job.nodes, hosts=nodes)
    attempt = plan.attempt + 1
    if nodes and nodes[0] == plan.nodes[0] and not job.port:
        # The survey has just seen these nodes, and the way to this master. The agent reports a port that is taken.
        made = backend.plan(job, attempt=attempt, port=config.auto_port(job.name, attempt))
    else:
        made = commands.free_plan(job, plan.backend, attempt=attempt)
    gone = tuple(node for node in plan.nodes if record.job.hosts and node not in made.nodes)
    record = replace(
        record,
        plan=made,
        created_at=time.time(),
        retired=tuple(dict.fromkeys((*record.retired, *gone))),
        past=(*record.past, last.why),
    )
    if records.load(plan.job_id).outcome:
        raise ClusterError("it was stopped meanwhile")
    records.update(record)
    # A machine that was away may still run the attempt that the others have left behind.
    returned = tuple(node for node in made.nodes if node.name in lost or node not in plan.nodes)
    if returned or not made.nodes:
        backend.cancel(replace(made, nodes=returned or made.nodes), grace_s=0)
    _bring_checkpoint(record, plan.nodes, last.step > (0, 0), show, wait)
    commands.start(record, records, secrets)
    return record


def _bring_checkpoint(
    record: Record, before: Sequence[Node], trained: bool, show: Show, wait: Callable[[float], None]
) -> None:
    """Give the first node the newest checkpoint, when a machine that was left out has it.

    Where one of the nodes that the attempt `before` ran on has one, that is it; the trainer shares it by itself. Where
    all of them are gone after it `trained`, those that do not answer are waited for: one of them has the only one.
    """
    plan = record.plan
    silent: list[str] = []

    def ages(nodes: Sequence[Node]) -> dict[str, int]:
        look = ["bash", "-c", 'stat -c %Y -- "$1" 2>/dev/null; exit 0', "stat"]
        there = [node for node in nodes if node.is_machine]
        found = fanout.each(
            there, lambda node: reach(node).run([*look, f"{plan.dir_on(node)}/{_CHECKPOINT}"], timeout_s=8).out
        )
        silent[:] = [name for name, out in found.items() if isinstance(out, ClusterError)]
        return {name: int(out) for name, out in found.items() if not isinstance(out, ClusterError) and out.strip()}

    names = {node.name for node in before}
    stayed = [node for node in plan.nodes if node.name in names]
    if ages(stayed):
        return
    own, left_out = ages(plan.nodes), ages(record.retired)
    clock = looks.Clock()
    until = clock() + RETURN_S
    if trained and not stayed and silent and not own and not left_out:
        show.note(f"no machine that answers has a checkpoint: waiting for {', '.join(silent)}")
        while silent and not left_out and clock() < until:
            wait(_RETURN_TICK_S)
            left_out = ages(record.retired)
        if silent and not left_out:
            show.note(f"{', '.join(silent)} did not come back: it begins anew")
    if max(left_out.values(), default=0) <= max(own.values(), default=0):
        return
    source = max((node for node in record.retired if node.name in left_out), key=lambda node: left_out[node.name])
    everything_else = [
        f"{name}*" for name in ("attempt-", "events.", "labels", "results", "train_", "previous", "before")
    ]
    files.collect(source, plan.dir_on(source), plan.run_dir, everything_else)
    files.place(plan.nodes[0], Path(plan.run_dir, _CHECKPOINT), plan.dir_on(plan.nodes[0]))
    show.note(f"the newest checkpoint was brought from {source.name} to {plan.nodes[0].name}")


def _cancel(plan: Plan, lost: Sequence[str], show: Show) -> None:
    """Stop an attempt; the nodes that are lost are not waited for, and stopped where they still answer."""
    backend = BACKENDS[plan.backend]
    alive = tuple(node for node in plan.nodes if node.name not in lost)
    if lost and plan.nodes[0].is_machine:
        gone = replace(plan, nodes=tuple(node for node in plan.nodes if node.name in lost))
        threading.Thread(target=_try_to_cancel, args=(gone,), daemon=True).start()
        plan = replace(plan, nodes=alive)
    try:
        if plan.nodes:
            backend.cancel(plan, grace_s=FAILED_GRACE_S)
    except UnreachableError as error:
        # What runs there ends without us: ranks that wait for lost ones do.
        show.note(f"not stopped, as it does not answer: {error.message}")


def _try_to_cancel(plan: Plan) -> None:
    with contextlib.suppress(ClusterError):
        BACKENDS[plan.backend].cancel(plan, grace_s=FAILED_GRACE_S)


def _nodes(record: Record, lost: Sequence[str], show: Show, wait: Callable[[float], None]) -> tuple[Node, ...]:
    """The nodes of the next attempt; waits a while for lost ones where there are too few.

    Nodes that were `lost` a moment ago are asked only where there are not enough others.
    """
    job, clock = record.job, looks.Clock()
    until = clock() + RETURN_S
    wanted = tuple(dict.fromkeys((*record.plan.nodes, *job.hosts, *job.spares)))
    unfit: dict[str, ClusterError] = {name: UnreachableError(f"{name}: lost") for name in lost}
    while True:
        asked = tuple(node for node in wanted if node.name not in unfit)
        # Those that have run the job have what it ran on, also where the files here are others by now.
        joining = [node for node in asked if node not in record.plan.nodes]
        state = _survey(record, asked, joining) | unfit
        failed = [node for node in asked if node not in joining and state[node.name] is not None]
        if failed and joining:  # they are no measure for the image and the way to the master
            state |= _survey(record, [node for node in asked if node not in failed], joining)
        for node in joining:
            if (error := state[node.name]) is not None and not isinstance(error, UnreachableError):
                show.note(f"passed over: {error.message}")
                unfit[node.name] = error
        chosen = restarts.choose(job, job.hosts, state)
        if len(chosen) == job.nodes or (chosen and (clock() > until or (job.least_nodes < job.nodes and not lost))):
            return chosen
        if clock() > until:
            raise ClusterError("; ".join(error.message for error in state.values() if error is not None))
        for name in lost:
            unfit.pop(name, None)
        if not lost:
            wait(_RETURN_TICK_S)
        lost = ()


def _survey(record: Record, asked: Sequence[Node], joining: Sequence[Node]) -> dict[str, ClusterError | None]:
    """What keeps each of the nodes `asked` from running the next attempt (see commands.survey)."""
    job = replace(record.job, name=record.plan.job_id, hosts=tuple(asked), nodes=max(1, len(asked)))
    return commands.survey(job, record.plan, joining) if asked else {}


def _theirs(record: Record, records: Records, wait: Callable[[float], None]) -> Record | None:
    """The job as it goes on: the next attempt of the process that keeps it going, or the same when that one has left.

    None when the job has ended. What was seen of it until now may be out of date by the time that process leaves.
    """
    for tick in itertools.count(1):
        newer = records.load(record.plan.job_id)
        if newer.outcome:
            break
        if newer.plan.attempt > record.plan.attempt:
            return newer
        # An attempt is noted before it begins: who saw it too early took it for lost.
        if tick % _LOOK_AGAIN == 0 and _is_well(newer):
            return newer
        with records.watch(record.plan.job_id) as free:
            if free:
                now = records.load(record.plan.job_id)
                return None if now.outcome else now
        wait(commands.TICK_S)
    return None


def _is_well(record: Record) -> bool:
    try:
        return commands.look(record)[0] != "failed"
    except ClusterError:
        return False
