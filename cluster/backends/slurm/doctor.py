"""Diagnosis of a Slurm cluster: its login node, then the nodes of one short job. The functions of CHECKS are pure."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cluster.agent import scripts
from cluster.backends.slurm import login_check
from cluster.checks import engine, machine
from cluster.checks.findings import (
    PROLOGUE_FAILED,
    TIMEOUT_S,
    Check,
    Facts,
    Finding,
    NodeFacts,
    Say,
    Verdict,
    judge,
    parse,
    with_note,
)
from cluster.checks.network import device_towards, number_of
from cluster.errors import ClusterError, UnreachableError
from cluster.runtimes import RUNTIMES
from cluster.spec.counts import counted
from cluster.spec.model import Inventory, Job, Machine, Queue
from cluster.transport import discovery, reach
from cluster.transport.process import piped

#: Timeouts of the allocation and of the job.
IMMEDIATE_S = 60
JOB_S = 150
#: Options of sbatch that do not select nodes, or that srun does not have.
_NOT_OF_NODES = (
    "begin",
    "comment",
    "dependency",
    "mail-type",
    "mail-user",
    "nice",
    "prefer",
    "priority",
    "signal",
)
_ADMINISTRATOR = "ask the administrator: "
_PRINT_HOST = 'echo "host=${SLURMD_NODENAME:-$(hostname)}"'


def examine(
    inventory: Inventory, image: str, data: Sequence[str], nodes: int, gpus: int, say: Say
) -> list[Finding]:
    """Return the findings of the login node, then of `nodes` nodes in one job, which writes and removes small files."""
    name = inventory.machines[0].name
    say("probing the login node")
    try:
        # A login node needs no GPU.
        login = discovery.inspect(replace(inventory, device="any"))[name].machine
        queue = Queue(login, inventory.settings)
        job = Job("doctor", ("true",), nodes, gpus, "/", image=image, device=inventory.device, queue=queue)
        job = replace(job, prologue=inventory.prologue)
        # The folder "." exists, so the script creates none.
        command = login_check.command(job, run_dir=".")
        done = reach(login).run(command, timeout_s=TIMEOUT_S)
        request = judge_request(job, done.by_word)
    except ClusterError as error:
        check = "login" if isinstance(error, UnreachableError) else "request"
        why = error.message.removeprefix(f"{name}: ")
        return [Finding(check, name, "failure", why, error.hint or "clusterctl doctor")]
    reached = with_note("reachable, run_dir and data_dir are writable", reach(login).note)
    findings = [Finding("login", name, "ok", reached), *request]
    if data:
        say(f"comparing {', '.join(data)}")
        findings += machine.data([login], data)
    if any(finding.level == "failure" for finding in request):
        return findings
    say(f"probing {counted(nodes, 'node')} in a Slurm job")
    try:
        facts, messages = _run_job(login, job)
    except ClusterError as error:
        why = error.message.removeprefix(f"{name}: ")
        return [*findings, Finding("job", name, "failure", why, "squeue --me")]
    return findings + judge_nodes(job, facts, messages)


def judge_request(job: Job, has: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Check that the site can serve the job; `has` is the output of batch/check.sh by each line's first word."""
    assert job.queue is not None
    name = job.queue.login.name
    wrong = login_check.problems(job, has, name)
    if job.queue.login.in_container and not job.image:
        hint = f"{RUNTIMES[job.queue.login.runtime].image_command()}, then set image in cluster.yaml"
        wrong = [(f"no image: {job.queue.login.runtime} has no default image", hint)]
    if wrong:
        wrong = [(why.removeprefix(f"{name}: "), hint or "sinfo") for why, hint in wrong]
        return [Finding("request", name, "failure", *problem) for problem in wrong]
    gpus = f" with {job.most_procs} GPUs" if job.device == "cuda" else ""
    return [Finding("request", name, "ok", f"the cluster has {counted(job.nodes, 'node')}{gpus}")]


def _run_job(login: Machine, job: Job) -> tuple[dict[int, Facts], list[str]]:
    kind = RUNTIMES[login.runtime]
    probe = engine.probe_values(login, job.image)
    node = scripts.variables(version=kind.version, check=kind.check(job.image, "true"), **probe)
    node += scripts.text("backends/slurm/doctor_node.sh", "checks/probe.sh")
    node = scripts.prologue(job.prologue, f"{_PRINT_HOST}; {PROLOGUE_FAILED}") + node
    words = [*srun(job), "--time=5", f"--immediate={IMMEDIATE_S}", "--label", "bash", "-c", node, "node"]
    where = {"run_dir": login.run_dir, "data_dir": login.data_dir, "token": secrets.token_hex(8)}
    text = scripts.variables(timeout_s=IMMEDIATE_S + JOB_S, **where)
    text += scripts.text("backends/slurm/environment.sh", "backends/slurm/doctor_job.sh")
    with piped(login, ["bash", "-c", text, "slurm_job", *words]) as running:
        output = running.stdout.read()
        running.stdin.close()
        running.wait(30)
    return parse_job_output(output.decode(errors="replace"))


def srun(job: Job) -> list[str]:
    """Return the srun command that runs one task per node with the options of the job."""
    assert job.queue is not None
    given = job.queue.settings
    options = {
        "job-name": "clusterctl-doctor",
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "chdir": "/tmp",
    }
    if job.device == "cuda" and not {"gres", "gpus-per-node"} & {*given}:
        options["gpus-per-node"] = str(job.most_procs)
    options |= {name: value for name, value in given.items() if name not in _NOT_OF_NODES}
    return ["srun", *(f"--{name}={value}" if value else f"--{name}" for name, value in options.items())]


def parse_job_output(text: str) -> tuple[dict[int, Facts], list[str]]:
    """Return the facts of each node by rank, and the lines of srun; a node's lines start with its rank (--label)."""
    lines: dict[int, list[str]] = {}
    messages = []
    for line in text.splitlines():
        if labelled := re.match(r" *(\d+): (.*)", line):
            lines.setdefault(int(labelled[1]), []).append(labelled[2])
        elif line.strip():
            messages.append(line.removeprefix("srun: ").removeprefix("error: "))
    return {rank: parse("\n".join(own)) for rank, own in sorted(lines.items())}, messages


def judge_nodes(job: Job, answers: Mapping[int, Facts], messages: Sequence[str]) -> list[Finding]:
    """Return the findings of the job and of its nodes, or one finding if the job did not run."""
    assert job.queue is not None
    login = job.queue.login
    if not answers:
        return [_did_not_run(job, login, messages)]
    findings = []
    nodes: list[Machine] = []
    facts_of: dict[str, Facts] = {}
    for rank, facts in answers.items():
        host = facts.text("host") or f"node-{rank}"
        ran = _ran(host, login, facts, messages)
        findings.append(ran)
        if ran.level == "ok":
            nodes.append(replace(login, name=host, address=host, login="", gpus=tuple(range(job.most_procs))))
            facts_of[host] = facts
    if missing := job.nodes - len(answers):
        why = next(
            (line for line in messages if "failed" in line or "Killed" in line), "no message from srun"
        )
        why = f"{missing} of {counted(job.nodes, 'node')} did not run the job: {why}"
        fix = "sinfo --list-reasons; to leave it out: --set exclude=..."
        findings.append(Finding("job", login.name, "failure", why, fix))
    judged = judge(CHECKS, NodeFacts(tuple(nodes), facts_of, job.image, device=job.device))
    return findings + [_for_administrator(finding) for finding in judged]


def _did_not_run(job: Job, login: Machine, messages: Sequence[str]) -> Finding:
    """Return why no node has answered."""
    if any("are busy" in line for line in messages):
        why = f"{counted(job.nodes, 'node')} did not become free within {IMMEDIATE_S} s: compute nodes were not checked"
        fix = "clusterctl doctor --nodes 1, or later; reasons: squeue --states running; sinfo --list-reasons"
        return Finding("job", login.name, "warning", why, fix)
    why = next(reversed(messages), "no output")
    fix = f"on {login.name}: {' '.join(srun(job))} --test-only true"
    return Finding("job", login.name, "failure", f"did not run: {why}", fix)


def _ran(host: str, login: Machine, facts: Facts, messages: Sequence[str]) -> Finding:
    """Return whether the job ran on a node until its end."""
    if why := facts.text("prologue"):
        return Finding("job", host, "failure", why, "correct prologue in cluster.yaml")
    if "end" not in facts.every("probe"):
        why = next((line for line in messages if line.startswith(f"{host}:")), "the task ended early")
        return Finding("job", host, "failure", why, f"on {login.name}: srun --nodelist={host} true")
    return Finding("job", host, "ok", "ran a Slurm job")


def _for_administrator(finding: Finding) -> Finding:
    """Return a finding whose fix says who may do it, because users of a cluster have no sudo."""
    return replace(finding, fix=_ADMINISTRATOR + finding.fix) if finding.fix.startswith("sudo ") else finding


def common(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict:
    """Check that the node sees the files of the login node in run_dir and data_dir."""
    folders = {"run_dir": node.run_dir, "data_dir": node.data_dir}
    missing = {key: path for key, path in folders.items() if key not in facts.every("common")}
    if not missing:
        return Verdict("ok", "run_dir and data_dir are shared")
    what = " and ".join(f"{path} ({key})" for key, path in missing.items())
    why = f"{what} is not shared: this node does not see a file of the login node"
    return Verdict(
        "failure", why, f"in cluster.yaml, {', '.join(missing)}: a folder on a shared disk (see: df -h)"
    )


def names(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict:
    """Check that the node resolves the first node's name (the first: the second's), with a route out."""
    peer = facts.text("peer")
    if not peer:
        return Verdict("ok", "not tested with one node: --nodes 2")
    number = number_of(peer, facts)
    device = device_towards(facts, peer)
    if not number:
        return Verdict(
            "failure", f"the name {peer} does not resolve", f"{_ADMINISTRATOR}add {peer} to /etc/hosts"
        )
    if device in ("", "lo"):
        why = f"no route to {peer} ({number})" if not device else f"{peer} is {number} on lo: itself"
        return Verdict("failure", why, f"{_ADMINISTRATOR}correct {peer} in /etc/hosts")
    return Verdict("ok", f"reaches {peer} ({number}) over {device}, as NCCL and gloo will")


def runtime(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict:
    """Check that the inventory's runtime is installed on the node."""
    kind = RUNTIMES[node.runtime]
    if kind.inside or kind.engine:
        verdict = engine.runtime(node, facts, seen)
        fix = "in cluster.yaml, load a python3 with torch in prologue (module load ...), or set runtime: apptainer"
        return verdict._replace(fix=fix) if verdict.fix and kind.inside else verdict
    if facts.text("runtime_version"):
        return Verdict("ok", facts.text("runtime_version"))
    why = f"{kind.name} is not installed: {scripts.line(kind.version)} fails"
    return Verdict("failure", why, f"in cluster.yaml, prologue: module load {kind.name}, or another runtime")


def image(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict | None:
    """Check that a program runs in the image file, or that the nodes' engines have the same image."""
    kind = RUNTIMES[node.runtime]
    if not kind.image_is_file:
        verdict = engine.image(node, facts, seen)
        fix = f"srun --nodelist={node.name} {node.runtime} pull {seen.image}"
        return verdict._replace(fix=fix) if verdict and verdict.fix else verdict
    if not facts.text("runtime_version"):
        return None  # the check of the runtime reports it
    if message := facts.text("image_says"):
        why = f"{seen.image} does not run: {re.sub(r'^FATAL: +', '', message)}"
        return Verdict(
            "failure", why, f"srun --nodelist={node.name} {scripts.line(kind.check(seen.image, 'true'))}"
        )
    return Verdict("ok", f"{seen.image} runs")


def gpus(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict:
    """Check that the job step and the driver see the requested GPUs."""
    if seen.device != "cuda":
        return Verdict("ok", f"not used: device: {seen.device}")
    given = [gpu for gpu in facts.text("visible_gpus").split(",") if gpu]
    rows = engine.gpu_rows(facts)
    listed = engine.listed_gpus(facts)
    if len(given) < len(node.gpus):
        why = f"{len(node.gpus)} GPUs requested, but CUDA_VISIBLE_DEVICES has {len(given)}"
        fix = "in cluster.yaml, slurm: gres or gpus-per-node, as the site requires (sinfo --format '%P %G')"
        return Verdict("failure", why, fix)
    if not rows or len(listed) < len(given):
        message = " ".join(facts.every("gpu_says"))
        lists = (
            f"nvidia-smi lists {len(listed)}" if facts.has("nvidia-smi") else "nvidia-smi is not installed"
        )
        fix = f"{_ADMINISTRATOR}install NVIDIA's driver; until then: --set exclude={node.name}"
        return Verdict("failure", f"Slurm allocated {len(given)} GPUs, but {message or lists}", fix)
    return Verdict("ok", f"{len(given)} x {rows[0][4]}, driver {rows[0][1]}")


#: The checks of the job's nodes, in the order of the report.
CHECKS: dict[str, Check] = {
    "common": common,
    "names": names,
    "runtime": runtime,
    "image": image,
    "architecture": engine.architecture,
    "gpus": gpus,
    "versions": engine.versions,
    "shm": machine.shm,
    "limits": machine.limits,
    "disk": machine.disk,
    "run_dir": machine.run_dir,
}
#: All checks in the order of the report. --skip accepts all except the login.
ORDER = ("login", "here", "request", "data", "job", *CHECKS, "orphans")
