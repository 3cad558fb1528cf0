"""Supervision: follows a job's attempts; after a failure it stops all nodes, and restarts as restarts.py decides."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from cluster import contract
from cluster.backends import BACKENDS
from cluster.backends.awake_clock import AwakeClock
from cluster.errors import ClusterError, LaunchError, UnreachableError, with_hint
from cluster.spec.model import Job, JobRecord, Machine, PastAttempt, Plan
from cluster.spec.port import auto_port
from cluster.store import JobStore
from cluster.supervisor import attempt_monitor, job_end, job_monitor, launcher, notes, restarts, webhook
from cluster.supervisor.attempt_monitor import AttemptMonitor
from cluster.supervisor.display import Display
from cluster.supervisor.job_end import FAILED_GRACE_S
from cluster.supervisor.job_state import RETURN_S, JobView, failing
from cluster.supervisor.launcher import Launcher
from cluster.supervisor.restarts import Failure
from cluster.transport import files, parallel, reach
from cluster.transport.waits import waiting

_RETURN_POLL_S = 3.0
#: How many polls of the record between two polls of the nodes, while another process restarts the job.
_STATE_EVERY = 10


class BetweenAttempts(KeyboardInterrupt):
    """Ctrl-C after the end of an attempt. The next one may have started on some nodes."""


@dataclass
class Supervisor:
    """Follows the job of `record`, and restarts it."""

    record: JobRecord
    records: JobStore
    show: Display
    secrets: Mapping[str, str] = field(default_factory=dict)

    def run(self) -> tuple[AttemptMonitor, str]:
        """Follow the job over all its attempts. Restart it, unless another process on this machine does that already.

        Return the last attempt, and why the job was not restarted ("" if it is done or was stopped).
        """
        copied = notes.Copied(self.show, self.record.plan)
        attempt = AttemptMonitor(self.record)
        has_ended = False
        while True:
            if not job_monitor.is_being_started(self.record, self.records):
                with self.records.supervise(self.record.plan.job_id) as is_supervisor:
                    if is_supervisor:
                        return self.supervise()
                attempt = attempt_monitor.follow(self.record, copied, records=self.records)
                has_ended = self._has_ended(attempt)
            if has_ended or not self._wait_for_start(copied):
                self._wait_for_background(copied)
                return attempt, ""

    def supervise(self) -> tuple[AttemptMonitor, str]:
        """As `run`, for a process that holds the job's lock (`JobStore.supervise`)."""
        self.record = self.records.load(self.record.plan.job_id)  # another process may have restarted it
        if self.record.start_lock:  # that process was killed: what it has started is followed now
            self.record = replace(self.record, start_lock="")
            self.records.update(self.record)
        self.show = notes.Kept(self.show, self.record.plan)
        while True:
            attempt = attempt_monitor.follow(
                self.record, self.show, self._patience_s, tends=True, records=self.records
            )
            if self._has_ended(attempt):
                return attempt, ""
            self._check_network(attempt.view)
            failed_at = time.time()
            failure = restarts.failure(attempt.view, attempt.verdict)
            try:
                if not self._has_recorded_failure():
                    self._record_failure(failure)
                refused = self._restart(attempt)
            except KeyboardInterrupt:
                raise BetweenAttempts from None
            except ClusterError as error:
                refused = _not_restarted(error)
            if refused and refused != restarts.NO_RESTARTS:
                notes.add(self.record.plan, f"{failure.why}; not restarted: {refused}")
            if refused:  # recorded before another process may become the supervisor
                for text in job_end.record_outcome(attempt, self.records):
                    self.show.note(text)
                return attempt, refused
            plan = self.record.plan
            names = ", ".join(node.name for node in plan.nodes)
            self.show.note(
                f"attempt {plan.attempt} on {names}, {time.time() - failed_at:.1f} s after the failure"
            )
            for text in webhook.post(plan, "restarted", restarts.failures(self.record)[-1].why):
                self.show.note(text)

    def _has_ended(self, attempt: AttemptMonitor) -> bool:
        return attempt.verdict == "done" or bool(self.records.load(self.record.plan.job_id).outcome)

    def _restart(self, attempt: AttemptMonitor) -> str:
        """Start the next attempt. Return why the job is not restarted, "" if it is.

        Each attempt that does not start counts as a restart. Raises ClusterError if no attempt starts: twice for the
        same reason, or at the last restart.
        """
        job = self.record.job
        while True:
            past = restarts.failures(self.record)
            if refused := restarts.refusal(job, attempt.view, attempt.verdict, past):
                return refused
            self.show.note(f"{past[-1].why}; restart {len(past)} of {job.max_restarts}")
            try:
                self._start_next_attempt(attempt.view)
                return ""
            except (UnreachableError, LaunchError) as error:
                why = _not_restarted(error)
                if why == past[-1].why or len(past) == job.max_restarts:
                    raise
                self.record = self.records.load(self.record.plan.job_id)
                if self.record.outcome:
                    raise
                self._record_failure(Failure(why, past[-1].step))

    def _has_recorded_failure(self) -> bool:
        """Return whether another process has recorded the end of this attempt, and did not restart the job."""
        history = self.record.history
        return bool(history) and history[-1].attempt == self.record.plan.attempt

    def _record_failure(self, failure: Failure) -> None:
        """Record the end of the attempt, or a restart after it that did not start."""
        record = self.record
        plan = self.record.plan
        began = record.history[-1].ended_at if self._has_recorded_failure() else record.created_at
        names = tuple(node.name for node in plan.nodes)
        why = failure.why
        ended = PastAttempt(
            plan.attempt, names, began, time.time(), why, failure.step, failure.is_program_error
        )
        self.record = replace(record, history=(*record.history, ended))
        self.records.update(self.record)

    def _patience_s(self, view: JobView) -> float:
        """Return how long machines may stay silent: RETURN_S, or 0 if the job can run on others, or was stopped."""
        job = self.record.job
        record = self.records.load(self.record.plan.job_id)
        if record.outcome:
            return 0.0
        unanswered = [node.name for node in view.nodes if node.unanswered_since is not None]
        silent = [node.machine for node in self.record.plan.nodes if node.name in unanswered]
        others = [machine for machine in self._candidates() if machine not in silent]
        if len(record.history) >= job.max_restarts or len(others) < job.least_nodes:
            return RETURN_S
        answers = parallel.each(others, lambda machine: reach(machine).run(["true"], timeout_s=8))
        answering = [answer for answer in answers.values() if not isinstance(answer, ClusterError)]
        return 0.0 if len(answering) >= job.least_nodes else RETURN_S

    def _check_network(self, view: JobView) -> None:
        """Raise UnreachableError if no machine of a lost attempt answers: it may be running well."""
        if all(node.unanswered_since is not None for node in view.nodes) and self._patience_s(view):
            raise UnreachableError(f"{view.nodes[0].name}: {view.nodes[0].status.silent}")

    def _candidates(self) -> tuple[Machine, ...]:
        """Return the machines that may run the next attempt."""
        job = self.record.job
        return tuple(dict.fromkeys((*self.record.plan.machines, *job.hosts, *job.spares)))

    def _start_next_attempt(self, view: JobView) -> None:
        record = self.record
        plan = self.record.plan
        hosts = self.record.job.hosts
        backend = BACKENDS[plan.backend]
        if requeued := backend.requeued(plan):
            self._update(requeued)
            Path(requeued.attempt_dir).mkdir(parents=True, exist_ok=True)
            return
        lost = [node.name for node in view.nodes if node.status.silent]
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(self._cancel, lost)
            machines = ", ".join(lost) or "the machines"
            with waiting(f"{machines} to answer, or others that can run {plan.job_id}", RETURN_S):
                job = self._on_usable_hosts(lost) if hosts else record.job
            stopping.result()
        attempt = plan.attempt + 1
        if job.hosts and job.hosts[0] == plan.nodes[0].machine and not job.port:
            # The survey has just checked these hosts and this master. The agent reports a taken port.
            next_plan = backend.plan(job, attempt=attempt, port=auto_port(job.name, attempt))
        else:
            next_plan = launcher.free_plan(job, plan.backend, attempt=attempt)
        if self.records.load(plan.job_id).outcome:
            raise ClusterError("another process stopped the job")
        self._update(next_plan, start_lock=plan.job_id)
        # A machine that was unreachable may still run an earlier attempt.
        returned = tuple(node for node in next_plan.nodes if node.name in lost or node not in plan.nodes)
        if returned:
            backend.cancel(replace(next_plan, nodes=returned), grace_s=0)
        if hosts:
            self._copy_checkpoint(plan.machines)
        self.record = Launcher(self.records, self.secrets).start(self.record)

    def _update(self, plan: Plan, *, start_lock: str = "") -> None:
        """Record the next attempt."""
        record = self.record
        retired = [node for node in record.plan.nodes if record.job.hosts and node not in plan.nodes]
        self.record = replace(
            record,
            plan=plan,
            created_at=time.time(),
            retired=tuple(dict.fromkeys((*record.retired, *retired))),
            start_lock=start_lock,
        )
        self.records.update(self.record)

    def _copy_checkpoint(self, before: Sequence[Machine]) -> None:
        """Copy the newest checkpoint to the first host, if only a retired host has it.

        If a host of the attempt `before` has one, the trainer broadcasts it. If all of them are retired after the first
        step, wait for those that do not answer.
        """
        plan = self.record.plan
        retired = [node.machine for node in self.record.retired]
        first = plan.nodes[0].machine
        stayed = [host for host in plan.machines if host in before]
        if _checkpoint_times(stayed, plan)[0]:
            return
        current_times, _ = _checkpoint_times(plan.machines, plan)
        times, silent = _checkpoint_times(retired, plan)
        if silent and not (times or current_times or stayed) and self.record.history[-1].step > (0, 0):
            self.show.note(f"no machine that answers has a checkpoint: waiting for {', '.join(silent)}")
            clock = AwakeClock()
            until = clock() + RETURN_S
            while silent and not times and clock() < until:
                time.sleep(_RETURN_POLL_S)
                times, silent = _checkpoint_times(retired, plan)
            if silent and not times:
                self.show.note(f"{', '.join(silent)} did not come back: training restarts from the beginning")
        if max(times.values(), default=0) <= max(current_times.values(), default=0):
            return
        source = max((host for host in retired if host.name in times), key=lambda host: times[host.name])
        not_checkpoint = ("attempt-*", "events.*", "labels*", "results*", "train_*", "previous*", "before*")
        # Not `collect`: a link that is left out is no reason to give the job up.
        without = [f"--exclude={pattern}" for pattern in not_checkpoint]
        files.fetch(source, plan.dir_on(source), plan.run_dir, plan.run_dir, without, may_vanish=True)
        files.send(first, Path(plan.run_dir, contract.LAST_CHECKPOINT), plan.dir_on(first))
        self.show.note(f"copied the newest checkpoint from {source.name} to {first.name}")

    def _cancel(self, lost: Sequence[str]) -> None:
        """Stop the attempt. The `lost` nodes are stopped in a thread, without waiting for them."""
        plan = self.record.plan
        if lost and plan.nodes[0].machine.is_listed:
            silent = replace(plan, nodes=tuple(node for node in plan.nodes if node.name in lost))
            threading.Thread(target=_cancel_late, args=(silent,), daemon=True).start()
            plan = replace(plan, nodes=tuple(node for node in plan.nodes if node.name not in lost))
        try:
            if plan.nodes:
                BACKENDS[plan.backend].cancel(plan, grace_s=FAILED_GRACE_S)
        except UnreachableError as error:
            # The ranks on it end when they lose their peers.
            self.show.note(f"a node could not be stopped: {error.message}")

    def _on_usable_hosts(self, lost: Sequence[str]) -> Job:
        """Return the job of the next attempt. With too few usable hosts, wait RETURN_S for the `lost` ones."""
        job = self.record.job
        plan = self.record.plan
        clock = AwakeClock()
        until = clock() + RETURN_S
        candidates = self._candidates()
        unusable: dict[str, ClusterError] = {name: UnreachableError(f"{name}: lost") for name in lost}
        while True:
            reachable = [host for host in candidates if host.name not in unusable]
            # Hosts of this attempt have its image and files, even if this machine's have changed.
            joining = [host for host in reachable if host not in plan.machines]
            state = launcher.survey(job, plan, reachable, joining) | unusable
            failed = [host for host in reachable if host not in joining and state[host.name] is not None]
            if failed and joining:  # compare image and route to the master with usable hosts only
                state |= launcher.survey(
                    job, plan, [host for host in reachable if host not in failed], joining
                )
            for host in joining:
                if (error := state[host.name]) is not None and not isinstance(error, UnreachableError):
                    self.show.note(f"not used: {error.message}")
                    unusable[host.name] = error
            chosen = restarts.choose(job, state)
            is_whole = chosen is not None and chosen.nodes == job.nodes
            if chosen and (is_whole or clock() > until or (job.least_nodes < job.nodes and not lost)):
                return chosen
            if clock() > until:
                raise ClusterError("; ".join(error.message for error in state.values() if error is not None))
            for name in lost:
                unusable.pop(name, None)
            if not lost:
                time.sleep(_RETURN_POLL_S)
            lost = ()

    def _wait_for_background(self, show: notes.Copied) -> None:
        """Wait until a supervisor in the background has copied the results, so that two processes do not."""
        while (
            supervisor := self.records.supervisor_of(self.record.plan.job_id)
        ) and supervisor.in_background:
            show.update()
            time.sleep(attempt_monitor.POLL_S)
        show.update()

    def _wait_for_start(self, show: notes.Copied) -> bool:
        """Wait until another supervisor has started the job, again if it has failed, or until that supervisor ends.

        Return False if the job is over.
        """
        before = self.record
        polls = 0
        while True:
            polls += 1
            show.update()
            self.record = self.records.load(self.record.plan.job_id)
            if self.record.outcome:
                return False
            if not job_monitor.is_being_started(self.record, self.records):
                is_next = self.record.plan.attempt > before.plan.attempt or before.start_lock
                if is_next or (polls % _STATE_EVERY == 0 and self._is_alive()):
                    return True
                with self.records.supervise(self.record.plan.job_id) as is_supervisor:
                    if is_supervisor:
                        self.record = self.records.load(self.record.plan.job_id)
                        return not self.record.outcome
            time.sleep(attempt_monitor.POLL_S)

    def _is_alive(self) -> bool:
        """Return whether an attempt that looked failed runs: the other supervisor may have seen it differently."""
        try:
            return not failing(job_monitor.poll(self.record, self.records).view)
        except ClusterError:
            return False


def _cancel_late(plan: Plan) -> None:
    """Stop an attempt on machines that may answer only after the next attempt has started on them."""
    with suppress(ClusterError):
        BACKENDS[plan.backend].cancel(plan, grace_s=FAILED_GRACE_S, only_attempt=True)


def _not_restarted(error: ClusterError) -> str:
    return f"the job could not be restarted: {with_hint(error.message, error.hint)}"


def _checkpoint_times(hosts: Sequence[Machine], plan: Plan) -> tuple[dict[str, int], list[str]]:
    """Return the time of the newest checkpoint of each host that has one, and the hosts that do not answer."""
    stat = ["bash", "-c", 'stat -c %Y -- "$1" 2>/dev/null; exit 0', "stat"]
    path = f"{{}}/{contract.LAST_CHECKPOINT}"
    answers = parallel.each(
        hosts, lambda host: reach(host).run([*stat, path.format(plan.dir_on(host))], timeout_s=8).out
    )
    times = {
        name: int(out) for name, out in answers.items() if not isinstance(out, ClusterError) and out.strip()
    }
    return times, [name for name, out in answers.items() if isinstance(out, ClusterError)]
