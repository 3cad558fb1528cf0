"""Node scripts: a node's variables and command, the functions of its runtime, then agent/node.sh."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cluster import contract
from cluster.agent import scripts
from cluster.runtimes import RUNTIMES
from cluster.spec.counts import and_list, counted
from cluster.spec.model import CACHE, SETUP, WORKDIR, Gpu, Job, Machine, Node, Plan, Step
from cluster.spec.mount import Mount

#: Variables that the node's environment may set; containers that get variables by name need them, too.
_SET_ON_NODE = (contract.UMASK, "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def attempt_dir(plan: Plan, machine: Machine) -> str:
    """Return the folder of the attempt's scripts, logs and exit codes on a machine's own disk."""
    return f"{plan.dir_on(machine)}/attempt-{plan.attempt}"


def step(job: Job, plan: Plan, rank: int) -> Step:
    """Return the step that runs a node's script. `job.env` does not override the contract's variables."""
    node = plan.nodes[rank]
    machine = plan.nodes[rank].machine
    values = {
        **job.env,
        contract.NODE: node.name,
        "PET_NODE_RANK": str(rank),
        **shared_environment(
            job, plan.backend, plan.attempt, plan.dir_on(machine), (plan.master_addr, plan.master_port)
        ),
        **rank_environment(job, rank),
        contract.NODES_ON_HOST: str(len(plan.nodes_on(machine))),
        contract.NODE_ADDRESS: machine.address,
        **gpu_environment(job, RUNTIMES[machine.runtime].gpus(node)),
    }
    head = (
        f"#!/usr/bin/env bash\n# Node {rank} of {job.nodes} of the job {job.name}, attempt {plan.attempt}.\n"
    )
    path = f"{attempt_dir(plan, machine)}/{node.name}.sh"
    text = head + _script(job, plan, node, values)
    return Step(
        node.name,
        {path: text},
        ("bash", path),
        needs(job, machine),
        f"{attempt_dir(plan, machine)}/agent.pyz",
    )


def render_in_batch(job: Job, plan: Plan, login: Machine, finds: str) -> str:
    """Return the script of all nodes of a batch job, whose environment has the master.

    `finds` is text that sets the rank, the node's name and its GPUs.
    """
    found = [
        contract.NODE,
        "PET_NODE_RANK",
        "PET_MASTER_ADDR",
        "PET_MASTER_PORT",
        contract.ATTEMPT,
        contract.HOSTS,
    ]
    values = {
        **job.env,
        **shared_environment(job, plan.backend, 0, plan.dir_on(login), ("", 0)),
        contract.NODES_ON_HOST: "1",
        **gpu_environment(job, ()),
    }
    if job.device == "cuda":
        found.append("CUDA_VISIBLE_DEVICES")
    values = {name: value for name, value in values.items() if name not in found}
    finds = f"device={job.device}\n" + finds
    return f"# A node of the job {job.name}.\n" + _script(
        job, plan, Node(login.name, login), values, finds, found
    )


def needs(job: Job, machine: Machine) -> tuple[str, ...]:
    """Return the paths that must exist on a machine."""
    return tuple(mount.source if machine.in_container else mount.target for mount in _mounts(job, machine))


def _mounts(job: Job, machine: Machine) -> list[Mount]:
    """Return the job's mounts with the machine's paths: a synced folder is below `data_dir`."""
    return [
        replace(mount, source=machine.mirror(mount.source)) if mount.synced else mount for mount in job.mounts
    ]


def payload(plan: Plan, step: Step, secrets: Mapping[str, str]) -> tuple[str, str]:
    """Return the lines of the secrets, and what the script that starts a node or submits a job reads.

    That is the secrets, the agent and the step's script.
    """
    (text,) = step.files.values()
    lines, exported = secret_exports(plan, secrets)
    return lines, exported + scripts.archive_line() + text


def secret_exports(plan: Plan, secrets: Mapping[str, str]) -> tuple[str, str]:
    """Return the number of lines, and the shell text, that export the secrets of a plan."""
    exported = (
        scripts.exports({name: secrets[name] for name in plan.job.secrets}) + "\n" if plan.job.secrets else ""
    )
    return str(exported.count("\n")), exported


def _script(
    job: Job, plan: Plan, node: Node, values: Mapping[str, str], finds: str = "", found: Sequence[str] = ()
) -> str:
    """Return the script with the variables `values`; `finds` is text that sets the variables `found`."""
    machine = node.machine
    runtime = RUNTIMES[node.machine.runtime]
    run_dir = plan.dir_on(node.machine)
    workdir = f"{run_dir}/{WORKDIR}" if job.copies_workdir else job.workdir
    mounts = _mounts(job, machine)
    if not runtime.inside:
        copy = [Mount(workdir, job.workdir, read_only=False)] if job.copies_workdir else []
        folders = [run_dir, _beside(run_dir, CACHE), *([_beside(run_dir, SETUP)] if job.setup else [])]
        mounts = [*(Mount(folder, folder, read_only=False) for folder in folders), *copy, *mounts]
    names = list(dict.fromkeys([*values, *found, *_SET_ON_NODE, *job.secrets]))
    agent = f"{attempt_dir(plan, machine)}/agent.pyz"
    words = [*runtime.run(job, node, mounts, names), job.python, agent, *job.command]
    text = "set -u\n" + scripts.exports(values) + "\n" + finds + scripts.text("agent/node_start.sh")
    own = ["out", *(name for name, value in values.items() if job.env.get(name) != value), *found]
    text += scripts.prologue(job.prologue, 'fail "$1"', own, log='"$out/$CLUSTER_NODE.log"')
    if workdir and runtime.inside:
        text += f"{scripts.line(['cd', '--', workdir])} || exit 72\n"
    if job.pass_env and not runtime.inside:
        text += f"passed=({scripts.line([pattern.rstrip('*') for pattern in job.pass_env])})\n"
    text += f"runtime={runtime.name}\n" + (f"names=({scripts.line(names)})\n" if runtime.takes_names else "")
    functions = [*filter(None, [runtime.script]), "agent/own_folder.sh", "agent/wait.sh"]
    return text + _entry(words) + scripts.text(*functions, "agent/node.sh")


def _entry(words: Sequence[str]) -> str:
    """Return lines that set `enter` and `arguments`, the words before and after the machine's options."""
    at = words.index(scripts.OPTIONS) if scripts.OPTIONS in words else 0
    enter = words[:at]
    arguments = words[at + (scripts.OPTIONS in words) :]
    return f"enter=({scripts.line(enter)})\narguments=({scripts.line(arguments)})\n\n"


def exec_command(job: Job, plan: Plan, node: Node, argv: Sequence[str], *, tty: bool) -> list[str]:
    """Return the command that runs `argv` in a running node's container, on its machine."""
    machine = node.machine
    runtime = RUNTIMES[node.machine.runtime]
    where = {"out": attempt_dir(plan, machine), "node": node.name, "engine": runtime.engine}
    text = "" if runtime.inside else scripts.prologue(job.prologue, 'echo "error: $1" >&2; exit 71')
    text += scripts.variables(inside=int(runtime.inside), **where)
    text += _entry(runtime.exec(job, node, _mounts(job, machine), tty=tty))
    text += scripts.text(*filter(None, [runtime.script]), "agent/exec.sh")
    return ["bash", "-c", text, "exec", *in_setup(job, argv)]


def in_setup(job: Job, argv: Sequence[str]) -> list[str]:
    """Return a command in the virtual environment of the job's setup, if it has one."""
    if not job.setup:
        return list(argv)
    # The link that the agent has made; containers of compose do not have the node's name.
    link = f"${contract.RUN_DIR}/attempt-${contract.ATTEMPT}/${{{contract.NODE}:-node-$PET_NODE_RANK}}.venv"
    text = f'VIRTUAL_ENV={link} && export VIRTUAL_ENV PATH="$VIRTUAL_ENV/bin:$PATH" && exec "$@"'
    return ["sh", "-c", text, "sh", *argv]


def shared_environment(
    job: Job, backend: str, attempt: int, run_dir: str, master: tuple[str, int], user: str = ""
) -> dict[str, str]:
    """Return the contract's variables that all nodes share; `run_dir` is the job's folder on the nodes.

    `user` is the UID whose own caches and environments the nodes use. Without it, agent/node.sh finds the user's.
    """
    values = {
        "PET_NNODES": str(job.nodes),
        "PET_NPROC_PER_NODE": str(job.most_procs),
        "PET_MASTER_ADDR": master[0],
        "PET_MASTER_PORT": str(master[1]),
        **identity(job, backend),
        contract.ATTEMPT: str(attempt),
        contract.RUN_DIR: run_dir,
        contract.CACHE_DIR: _beside(run_dir, CACHE, user),
        contract.GLOBAL_WORLD_SIZE: str(job.world_size),
    }
    if job.secrets:
        values[contract.SECRETS] = ",".join(job.secrets)
    if job.stall_timeout_s and not job.says_ready:
        values[contract.STALL_TIMEOUT] = f"{job.stall_timeout_s:g}"
    if job.grace_s != contract.STOP_GRACE_S:
        values[contract.GRACE] = f"{job.grace_s:g}"
    if job.setup:
        folder = f"{_beside(run_dir, SETUP, user)}/{job.setup_key or job.name}"
        values |= {contract.SETUP: job.setup, contract.SETUP_DIR: folder}
        values |= {contract.IMAGE: job.image} if job.image else {}  # agent/node.sh and compose append its ID
    return values


def rank_environment(job: Job, rank: int) -> dict[str, str]:
    """Return what replaces the shared variables on a node: its ranks, if the nodes have different numbers of them."""
    if not job.is_unequal:
        return {}
    return {"PET_NPROC_PER_NODE": str(job.procs[rank]), contract.FIRST_RANK: str(sum(job.procs[:rank]))}


def identity(job: Job, backend: str) -> dict[str, str]:
    """Return the variables and labels by which people know a job, and by which `stop`, `gc` and `doctor` find it."""
    return {contract.JOB_ID: job.name, contract.LAUNCH_ID: job.launch_id, contract.BACKEND: backend}


def _beside(run_dir: str, name: str, user: str = "") -> str:
    """Return the path of a folder of the node next to the jobs' run directories, or of a user's folder in it."""
    return f"{run_dir.rpartition('/')[0]}/{name}" + (f"/{user}" if user else "")


def size(job: Job) -> str:
    """Return the size of a job: `2 nodes x 2 processes`, or `2 nodes with 2 and 1 processes`."""
    if job.is_unequal:
        return f"{job.nodes} nodes with {and_list(job.procs)} processes"
    return f"{counted(job.nodes, 'node')} x {counted(job.most_procs, 'process', 'processes')}"


def gpu_environment(job: Job, gpus: Sequence[Gpu]) -> dict[str, str]:
    """Return the variables that select a node's GPUs; `gpus` are ids in the container."""
    if job.device == "cpu":
        # accelerate and the Trainer of transformers start no process group on CPUs without it
        foreign = {} if job.says_ready else {"ACCELERATE_USE_CPU": "true"}
        return {"CUDA_VISIBLE_DEVICES": "", **foreign}
    if job.device == "cuda" or gpus:
        # nvidia-smi's order. CUDA's default order is fastest first.
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpus)}
    return {}
