"""What would go wrong on a Slurm cluster: looks at its login node, then, in one short job, at nodes that Slurm gives.

The scripts `slurm_login.sh`, `slurm_job.sh`, `slurm_node.sh` and `probe.sh` print the facts. The functions of CHECKS
judge them and do nothing else.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster import resources, slurm
from cluster.doctor import data as data_check
from cluster.doctor import engine, machine, probe
from cluster.doctor.findings import Finding, Level, Seen
from cluster.doctor.network import device_towards
from cluster.doctor.probe import Facts
from cluster.errors import ClusterError
from cluster.model import Inventory, Job, Node, Queue
from cluster.shells import reach

#: How long Slurm may take to find nodes, and how long the job may last.
IMMEDIATE_S, JOB_S = 60, 150
#: Options that say when a job starts or who is told of it, and nothing of the nodes; and that srun has not.
_NOT_OF_NODES = ("begin", "comment", "dependency", "mail-type", "mail-user", "nice", "prefer", "priority", "signal")
_FOLDERS = ("run_dir", "data_dir")
_PROGRAMS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
_TMP_NEEDED_KB = 16 << 10
_ADMINISTRATOR = "whoever runs the cluster: "
# The runtimes that Slurm's nodes alone know: what is wrong without one, and what to do.
_LACKING = {
    "apptainer": (
        "there is no apptainer",
        "module load apptainer in ~/.bashrc, or another runtime in cluster.yaml: docker, podman, none",
    ),
    "pyxis": (
        "there is no pyxis: srun has no --container-image",
        "another runtime in cluster.yaml: apptainer, docker, podman, none",
    ),
}


@dataclass(frozen=True)
class Request:
    """What a job would ask for: `gpus` on each of `nodes`, and the options for sbatch."""

    nodes: int
    gpus: int
    device: str
    options: Mapping[str, str]


@dataclass(frozen=True)
class Told:
    """What the job printed: each node's facts by its rank, the folders whose files came back, srun's own words."""

    facts: Mapping[int, Facts]
    back: frozenset[tuple[int, str]]
    code: int
    said: Sequence[str]


def look(
    inventory: Inventory,
    *,
    image: str,
    data: Sequence[str],
    skip: Sequence[str],
    nodes: int,
    gpus: int,
    say: Callable[[str], None],
) -> list[Finding]:
    """Findings for the login node, then for `nodes` nodes in one job of Slurm; those of `skip` are left out.

    Two files of a line are written to each of run_dir and data_dir, and removed.
    """
    login = inventory.nodes[0]
    request = Request(nodes, gpus, inventory.device, inventory.options)
    say("looking at the login node")
    try:
        text = resources.text("doctor/common.sh", "doctor/slurm_login.sh")
        words = [login.run_dir, login.data_dir, *_PROGRAMS]
        done = reach(login).run(["bash", "-c", text, "login", *words], timeout_s=probe.TIMEOUT_S)
        facts = probe.parse(done.out)
        found = on_login(login, facts)
        if any(each.level == "failure" for each in found):
            return _without(found, skip)
        asked = _asked(login, request)
    except ClusterError as error:
        why = error.message.removeprefix(f"{login.name}: ")
        return [Finding("login", login.name, "failure", why, error.hint or "clusterctl doctor, once more")]
    found += asked
    if data and "data" not in skip:
        say(f"comparing {', '.join(data)}")
        found += data_check.data(Seen((login,), {login.name: facts}), data)
    if any(each.level == "failure" for each in asked):
        return _without(found, skip)
    say(f"looking at {nodes} nodes in a job of Slurm")
    try:
        told = _told(login, facts, request, image)
    except ClusterError as error:
        why = error.message.removeprefix(f"{login.name}: ")
        return _without([*found, Finding("job", login.name, "failure", why, "squeue --me")], skip)
    return _without(found + judged(login, facts, request, image, told), skip)


def _without(found: Sequence[Finding], skip: Sequence[str]) -> list[Finding]:
    return [each for each in found if each.check not in skip]


def _asked(login: Node, request: Request) -> list[Finding]:
    # "." is there: looking makes no folder
    done = reach(login).run(
        ["bash", "-c", resources.text("agent/common.sh", "agent/slurm_check.sh"), "check", "none", "", ".", "", ""],
        timeout_s=60,
    )
    has: dict[str, list[str]] = {}
    for line in done.out.splitlines():
        word, _, text = line.partition(" ")
        has.setdefault(word, []).append(text)
    tried = reach(login).run([*srun(request), "--test-only", "true"], timeout_s=60)
    return asked(login, request, has, tried.code, tried.err)


def _told(login: Node, facts: Facts, request: Request, image: str) -> Told:
    token = secrets.token_hex(8)
    folders = [facts.text(f"nearest_{name}") for name in _FOLDERS]
    texts = [resources.text("doctor/versions.py"), resources.text("doctor/common.sh", "doctor/probe.sh")]
    on_node = [token, *folders, facts.text("run_dir"), login.runtime, image, *texts]
    node = resources.text("doctor/common.sh", "doctor/slurm_node.sh")
    soon = replace(request, options={**request.options, "time": "5"})  # what is short finds room between others
    command = [*srun(soon), f"--immediate={IMMEDIATE_S}", "--label", "bash", "-c", node, "node", *on_node]
    words = [token, *folders, str(request.nodes), str(IMMEDIATE_S + JOB_S), *command]
    with reach(login).stream(["bash", "-c", resources.text("doctor/slurm_job.sh"), "job", *words]) as running:
        said = running.stdout.read()
        running.stdin.close()
        running.wait(30)
    return told(said.decode(errors="replace"))


def srun(request: Request) -> list[str]:
    """The command that has Slurm run one task on each of the nodes that a job with these options would get."""
    options = {"job-name": "clusterctl-doctor", "nodes": str(request.nodes), "ntasks-per-node": "1", "chdir": "/tmp"}
    if request.device == "cuda" and not {"gres", "gpus-per-node"} & {*request.options}:
        options["gpus-per-node"] = str(request.gpus)
    options |= {name: value for name, value in request.options.items() if name not in _NOT_OF_NODES}
    return ["srun", *(f"--{name}={value}" if value else f"--{name}" for name, value in options.items())]


def told(text: str) -> Told:
    """The output of `slurm_job.sh`, parsed: a node's lines have its rank in front."""
    lines: dict[int, list[str]] = {}
    back, code, said = set(), 1, []
    for line in text.splitlines():
        if labelled := re.match(r" *(\d+): (.*)", line):
            lines.setdefault(int(labelled[1]), []).append(labelled[2])
        elif match := re.fullmatch(r"back=(\d+) (\w+)", line):
            back.add((int(match[1]), match[2]))
        elif line.startswith("srun="):
            code = int(line.partition("=")[2])
        elif line.strip():
            said.append(line)
    facts = {rank: probe.parse("\n".join(own)) for rank, own in sorted(lines.items())}
    return Told(facts, frozenset(back), code, said)


def on_login(login: Node, facts: Facts) -> list[Finding]:
    """The login node answers, has Slurm's programs, its controller answers, and our folders can be written."""
    name = login.name
    found = [Finding("login", name, "ok", "answers, its host key is known" if login.login else "this machine")]
    missing = [program for program in _PROGRAMS if not facts.has(program)]
    if missing:
        fix = f"module load slurm in ~/.bashrc of {name}, or another login node: login in cluster.yaml"
        return [*found, Finding("slurm", name, "failure", f"there is no {', '.join(missing)}", fix)]
    if "is UP" not in facts.text("ping"):
        why = f"its controller does not answer: {facts.text('ping') or 'scontrol ping says nothing'}"
        return [*found, Finding("slurm", name, "failure", why, f"{_ADMINISTRATOR}systemctl status slurmctld")]
    found.append(Finding("slurm", name, "ok", facts.text("ping")))
    for part in facts.every("unwritable"):
        why = f"{facts.text(part)} ({part}): {facts.text(f'nearest_{part}')} cannot be written"
        found.append(Finding("common", name, "failure", why, f"in cluster.yaml, {part}: a common folder of yours"))
    return found


def asked(login: Node, request: Request, has: Mapping[str, Sequence[str]], code: int, said: str) -> list[Finding]:
    """The site has what a job asks for: `has` is what `slurm_check.sh` printed, `said` srun's answer to --test-only."""
    name = login.name
    job = Job("doctor", ("true",), request.nodes, request.gpus, "/", queue=Queue(login, request.options))
    job = replace(job, device="cuda" if request.device == "cuda" else "cpu")
    wrong = [
        Finding("request", name, "failure", what.removeprefix(f"{name}: "), hint or "sinfo")
        for what, hint in slurm.problems(job, has, name)
    ]
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    if not wrong and code:  # also where nodes are down for a moment: the job will show it
        why = f"Slurm would not start it now: {re.sub(r'^(srun|allocation failure)(: error)?: ', '', last)}"
        wrong = [Finding("request", name, "warning", why, f"try on {name}: {_typed(request)}")]
    shown = re.search(r"to start at (\S+)", last)
    gpus = f" with {request.gpus} GPUs" if request.device == "cuda" else ""
    start = f", Slurm expects the start of such a job at {shown[1]}" if shown else ""
    return wrong or [Finding("request", name, "ok", f"{request.nodes} nodes{gpus} can be had{start}")]


def _typed(request: Request) -> str:
    return " ".join([*srun(request), "--test-only", "true"])


def judged(login: Node, on: Facts, request: Request, image: str, said: Told) -> list[Finding]:
    """What the nodes of the job said, check by check; one finding where there was no job."""
    whole = {rank: facts for rank, facts in said.facts.items() if "end" in facts.every("probe")}
    own = [line.removeprefix("srun: ").removeprefix("error: ") for line in said.said]
    if not said.facts:
        if any("are busy" in line for line in own):
            why = f"no {request.nodes} nodes are free within {IMMEDIATE_S} s: compute nodes were not looked at"
            fix = "clusterctl doctor --nodes 1, or later; why: squeue --states running; sinfo --list-reasons"
            return [Finding("job", login.name, "warning", why, fix)]
        why = next(reversed(own), "it printed nothing")
        return [Finding("job", login.name, "failure", f"did not run: {why}", f"try on {login.name}: {_typed(request)}")]
    found = []
    nodes, facts = [], {}
    for rank, of in said.facts.items():
        host = of.text("host") or f"node-{rank}"
        if rank not in whole:
            why = next((line for line in own if line.startswith(f"{host}:")), "its task ended early")
            found.append(Finding("job", host, "failure", why, f"try on {login.name}: srun --nodelist={host} true"))
            continue
        nodes.append(replace(login, name=host, address=host, login="", gpus=tuple(range(request.gpus))))
        facts[host] = of
        found.append(Finding("job", host, "ok", "a job of Slurm ran on it"))
        found += _common(host, rank, of, on, said)
    if silent := request.nodes - len(said.facts):
        why = next((line for line in own if "failed" in line or "Killed" in line), "srun says nothing of it")
        fix = "sinfo --list-reasons; without it: --slurm exclude=..."
        found.append(Finding("job", login.name, "failure", f"{silent} of {request.nodes} did not run it: {why}", fix))
    seen = Seen(tuple(nodes), facts, "" if login.runtime == "none" else image, device=request.device)
    for judge in CHECKS:
        found += judge(seen)
    return found


def _common(host: str, rank: int, facts: Facts, on: Facts, said: Told) -> list[Finding]:
    """Each folder is the same one here and on the login node: a file went there, another came back."""
    found = []
    for part in _FOLDERS:
        path = on.text(part)
        fix = f"in cluster.yaml, {part}: a folder on a disk that all nodes have (see: df -h)"
        if part not in facts.every("common"):
            why = f"{path} ({part}) is not the login node's: a file written there is not seen here"
            found.append(Finding("common", host, "failure", why, fix))
        elif (rank, part) not in said.back:
            why = f"{path} ({part}): a file written here is not seen on the login node (read-only?)"
            found.append(Finding("common", host, "failure", why, fix))
        else:
            found.append(Finding("common", host, "ok", f"{path} ({part}) is common"))
    return found


def names(seen: Seen) -> list[Finding]:
    """Each node resolves the first one's name (the first: the second's), and the way there leads out."""

    def judge(node: Node, facts: Facts) -> Finding:
        peer = facts.text("peer")
        if not peer:
            return Finding("names", node.name, "ok", "the only node: try --nodes 2")
        number = dict(facts.pairs("number")).get(peer, "")
        if not number:
            why = f"the name {peer} does not resolve"
            return Finding("names", node.name, "failure", why, f"{_ADMINISTRATOR}{peer} into DNS or /etc/hosts")
        device = device_towards(facts, peer)
        if device in ("", "lo"):
            why = f"no way to {peer} ({number})" if not device else f"{peer} is {number} on lo: itself"
            return Finding("names", node.name, "failure", why, f"{_ADMINISTRATOR}its address in /etc/hosts: {peer}")
        return Finding("names", node.name, "ok", f"reaches {peer} ({number}) over {device}: NCCL and gloo take that")

    return [judge(node, seen.facts[node.name]) for node in seen.nodes]


def runtime(seen: Seen) -> list[Finding]:
    """The runtime of the inventory is on the nodes."""
    found = []
    for node in seen.nodes:
        facts = seen.facts[node.name]
        if node.runtime not in _LACKING:
            for each in engine.runtime(replace(seen, nodes=(node,))):
                fix = "a python3 with torch on every node: module load in ~/.bashrc; or runtime: apptainer"
                fix = _ADMINISTRATOR + each.fix if node.runtime != "none" else fix
                found.append(replace(each, fix=each.fix and fix))
        elif has := facts.text(node.runtime):
            found.append(Finding("runtime", node.name, "ok", has))
        else:
            found.append(Finding("runtime", node.name, "failure", *_LACKING[node.runtime]))
    return found


def image(seen: Seen) -> list[Finding]:
    """The SIF file is there, and a program runs in it; of an engine's image, the nodes have the same one."""
    found = []
    for node in seen.nodes:
        facts = seen.facts[node.name]
        if node.runtime != "apptainer" or not seen.image:
            continue
        if why := facts.text("sif_unreadable"):
            fix = f"clusterctl image sif {seen.image}   (makes it of the Docker image), or image: in cluster.yaml"
            found.append(Finding("image", node.name, "failure", f"{seen.image}: {why}", fix))
        elif facts.text("sif_runs"):
            found.append(Finding("image", node.name, "ok", f"{seen.image} runs"))
        elif facts.text("apptainer"):
            said = re.sub(r"^FATAL: +", "", facts.text("sif_says"))
            why = f"{seen.image} does not run: {said or 'no answer within 60 s'}"
            fix = f"see what it says: srun --nodelist={node.name} apptainer exec {seen.image} true"
            found.append(Finding("image", node.name, "failure", why, fix))
    for each in engine.image(replace(seen, nodes=tuple(node for node in seen.nodes if node.runtime != "apptainer"))):
        fix = each.fix and f"srun --nodelist={each.node} {seen.nodes[0].runtime} pull {seen.image}"
        found.append(replace(each, fix=fix))
    return found


def architecture(seen: Seen) -> list[Finding]:
    """The image is for the nodes' processors, and they are of one kind."""
    found = []
    for each in engine.architecture(seen):
        of = "nodes of one kind alone: clusterctl launch --slurm constraint=..."
        if " is for " in each.detail:
            of = each.fix.replace("image push", "image sif") if seen.nodes[0].runtime == "apptainer" else each.fix
        found.append(replace(each, fix=each.fix and of))
    return found


def gpus(seen: Seen) -> list[Finding]:
    """The job's step sees the GPUs that were asked for, and so does the driver."""

    def judge(node: Node, facts: Facts) -> Finding:
        given = [each for each in facts.text("visible_gpus").split(",") if each]
        if seen.device != "cuda":
            return Finding("gpus", node.name, "ok", f"not used: device: {seen.device}")
        if len(given) < len(node.gpus):
            why = f"{len(node.gpus)} GPUs asked for, and CUDA_VISIBLE_DEVICES has {len(given)}"
            fix = "slurm: gres or gpus-per-node in cluster.yaml, as the site wants it (sinfo --format '%P %G')"
            return Finding("gpus", node.name, "failure", why, fix)
        rows = facts.every("gpu")
        if len(rows) < len(given):
            said = " ".join(facts.every("gpu_says"))
            lists = f"nvidia-smi lists {len(rows)}" if facts.has("nvidia-smi") else "there is no nvidia-smi"
            why = f"Slurm gave {len(given)} GPUs, but {said or lists}"
            fix = f"{_ADMINISTRATOR}NVIDIA's driver; until then: --slurm exclude={node.name}"
            return Finding("gpus", node.name, "failure", why, fix)
        driver = rows[0].split(",")[1].strip()
        return Finding(
            "gpus", node.name, "ok", f"{len(given)} given, {rows[0].split(',')[-1].strip()}, driver {driver}"
        )

    return [judge(node, seen.facts[node.name]) for node in seen.nodes]


def versions(seen: Seen) -> list[Finding]:
    """What the image holds fits the drivers; the first node looked into it."""
    held = next((of for node in seen.nodes if (of := _inside(seen.facts[node.name])).text("python")), None)
    if held is None:
        return []
    found = engine.versions(replace(seen, versions=held))
    fix = f"an image with torch: clusterctl image sif, or image: in cluster.yaml (it has python {held.text('python')})"
    return [replace(each, fix=fix) if each.detail.startswith("no torch") else each for each in found]


def _inside(facts: Facts) -> Facts:
    pairs = facts.values.items()
    return Facts({key.removeprefix("inside_"): values for key, values in pairs if key.startswith("inside_")})


def shm(seen: Seen) -> list[Finding]:
    """/dev/shm holds the batches of the loaders' workers."""
    found = machine.shm(seen)
    return [each if each.level == "ok" else replace(each, fix=_ADMINISTRATOR + each.fix) for each in found]


def tmp(seen: Seen) -> list[Finding]:
    """There is room for temporary files."""

    def judge(node: Node, facts: Facts) -> Finding:
        left, folder = facts.number("tmp_kb"), facts.text("tmp")
        if left is None:
            fix = "a TMPDIR that is there on every node, or none: in ~/.bashrc"
            return Finding("tmp", node.name, "failure", f"there is no {folder}", fix)
        if left < machine.DISK_NEEDED_KB:
            level: Level = "failure" if left < _TMP_NEEDED_KB else "warning"
            why = f"{left // 1024} MB free in {folder}"
            return Finding("tmp", node.name, level, why, f"make room, or: --slurm exclude={node.name}")
        return Finding("tmp", node.name, "ok", f"{folder} has room")

    return [judge(node, seen.facts[node.name]) for node in seen.nodes]


def disk(seen: Seen) -> list[Finding]:
    """Room for checkpoints and logs in run_dir."""
    fix = "make room (see df -h, and the site's quota command), or in cluster.yaml, run_dir: elsewhere"
    return [each if each.level == "ok" else replace(each, fix=fix) for each in machine.disk(seen)]


#: The checks of the nodes that Slurm gave, in the order of the report.
CHECKS = (names, runtime, image, architecture, gpus, versions, shm, tmp, machine.limits, disk)
#: Those of the login node, then all of them.
ON_LOGIN = ("login", "slurm", "request", "data")
ORDER = (*ON_LOGIN, "job", "common", *(judge.__name__ for judge in CHECKS))
