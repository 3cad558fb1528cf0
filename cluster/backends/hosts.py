"""Jobs as process groups on machines that a shell reaches; today that machine is this one.

Everything is done by small bash scripts through a Shell, so that nothing here knows how the machine is reached.
A job's processes are found by `CLUSTER_JOB_ID` in their environment: no record, no pid that may have been reused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster import logs, script
from cluster.errors import ClusterError, LaunchError, PortTakenError, UsageError
from cluster.model import Job, NodeStatus, Plan, Step, one_box
from cluster.runtimes import RUNTIMES
from cluster.shells import Shell

#: Fixes gloo and NCCL to the loopback interface: all nodes are on this machine, whatever its host name resolves to.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}

# `$1` is the attempt's folder, `$2` the node, `$3` the job; all values reach bash as arguments, none as text.
_START = """
mkdir -p -- "$1" && cat > "$1/$2.sh" || exit 1
env "CLUSTER_JOB_ID=$3" setsid bash "$1/$2.sh" < /dev/null > /dev/null 2> "$1/$2.err" &
"""
_OBSERVE = """
dir=$1 job=$2; shift 2
for node; do
    if [ -f "$dir/$node.exit" ]; then echo "exited $(cat "$dir/$node.exit")"
    elif ! [ -d "$dir" ]; then echo lost
    elif ! [ -f "$dir/$node.pid" ]; then
        if [ -s "$dir/$node.err" ]; then echo lost; else echo starting; fi
    elif grep -qzxs "CLUSTER_JOB_ID=$job" "/proc/$(cat "$dir/$node.pid")/environ"; then echo alive
    elif [ -f "$dir/$node.exit" ]; then echo "exited $(cat "$dir/$node.exit")"
    else echo lost; fi
done
"""
# Signals everything at once, then kills what is left after `$2` tenths of a second; prints how many survived that.
_CANCEL = """
pids() { grep -lzxs "CLUSTER_JOB_ID=$1" /proc/[0-9]*/environ | cut -d/ -f3; }
left=$(pids "$1")
[ -z "$left" ] || kill -TERM $left 2>/dev/null
for _ in $(seq "$2"); do left=$(pids "$1"); [ -z "$left" ] && break; sleep 0.1; done
for _ in 1 2 3 4 5; do
    left=$(pids "$1"); [ -z "$left" ] && break
    kill -KILL $left 2>/dev/null; sleep 0.2
done
echo $left
"""
# Prints who listens on port `$1`, or nothing; `ss` names the program when we may know it.
_PORT = """
python=$2
"$python" - "$1" <<'END'
import socket, sys
with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind(("", int(sys.argv[1])))
    except OSError:
        sys.exit(1)
END
[ $? -eq 1 ] || exit 0
holder=$(ss -Hltnp "sport = :$1" 2>/dev/null | grep -o 'users:.*' | head -n 1)
echo "taken ${holder:-by a program that this user may not see}"
"""


class HostsBackend:
    """N process groups on the machine behind `shell`, as a cluster of one box."""

    name = "local"

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def plan(self, job: Job, *, attempt: int, port: int) -> Plan:
        """One step per node: its script, and the command that runs it."""
        nodes = one_box(job, ["127.0.0.1"] * job.nodes)
        run_dir = f"{job.run_root}/{job.name}"
        master = (nodes[0].address, port)
        body = RUNTIMES["none"].run(job)
        steps = []
        for rank, node in enumerate(nodes):
            text = script.render(
                job,
                node,
                rank,
                attempt=attempt,
                run_dir=run_dir,
                master=master,
                nodes_on_host=job.nodes,
                body=body,
                extra=_LOOPBACK,
            )
            path = f"{run_dir}/attempt-{attempt}/{node.name}.sh"
            steps.append(Step(node.name, {path: text}, ("bash", path)))
        return Plan(
            job_id=job.name,
            attempt=attempt,
            backend=self.name,
            nodes=nodes,
            steps=tuple(steps),
            run_dir=run_dir,
            master_addr=master[0],
            master_port=port,
            world_size=job.world_size,
            timeout_s=job.timeout_s,
            says_ready=job.says_ready,
            command=body,
        )

    def check(self, plan: Plan) -> None:
        """Raise UsageError without Linux or without torch in the job's interpreter, PortTakenError for a taken port."""
        if self._shell.run(["bash", "-c", "test -r /proc/self/environ && type setsid"]).code:
            raise UsageError("this machine: process groups need Linux with bash", "use containers: --backend compose")
        python = plan.command[0]
        found = self._shell.run([python, "-c", "import importlib.util as u, sys; sys.exit(not u.find_spec('torch'))"])
        if found.code:
            raise UsageError(
                f"this machine: {python} has no torch, so it cannot run a node",
                "in the project's folder: pip install '.[trainer]'",
            )
        taken = self._shell.run(["bash", "-c", _PORT, "port", str(plan.master_port), python]).out.strip()
        if taken:
            raise PortTakenError(
                f"this machine: port {plan.master_port} is {taken}", "choose another: --master-port auto"
            )

    def submit(self, plan: Plan) -> None:
        """Start every node's script in a session of its own."""
        for step in plan.steps:
            ((_, text),) = step.files.items()
            started = self._shell.run(
                ["bash", "-c", _START, "start", plan.attempt_dir, step.place, plan.job_id], stdin=text
            )
            if started.code:
                self.cancel(plan, grace_s=0)
                raise LaunchError(f"{step.place}: {started.err.strip() or 'its script could not be started'}")

    def observe(self, plan: Plan) -> Sequence[NodeStatus]:
        """From the exit-code file where there is one, else from the script's process."""
        names = [node.name for node in plan.nodes]
        seen = self._shell.run(["bash", "-c", _OBSERVE, "observe", plan.attempt_dir, plan.job_id, *names])
        return [_status(name, line) for name, line in zip(names, seen.out.splitlines(), strict=True)]

    def logs(self, plan: Plan, offsets: Mapping[str, int]) -> Mapping[str, bytes]:
        """Read from the run directory, which is on this machine."""
        return logs.read(plan, offsets)

    def cancel(self, plan: Plan, *, grace_s: float) -> None:
        """SIGTERM to every process of the job, SIGKILL to those that stay longer than `grace_s`."""
        left = self._shell.run(
            ["bash", "-c", _CANCEL, "cancel", plan.job_id, str(int(grace_s * 10))], timeout_s=grace_s + 30
        ).out.strip()
        if left:
            raise ClusterError(f"this machine: processes {left} of {plan.job_id} do not end", f"kill -9 {left}")


def _status(name: str, line: str) -> NodeStatus:
    word, *rest = line.split()
    if word == "exited":
        return NodeStatus(name, "exited", exit_code=int(rest[0]), ended_at=float(rest[1]))
    if word == "lost":
        return NodeStatus(name, "lost", detail="its process is gone and left no exit code")
    return NodeStatus(name, "starting")
