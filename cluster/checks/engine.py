"""Checks of the container runtime, the GPUs and their driver, and the container image."""

import re

from cluster.agent import scripts
from cluster.checks.findings import Facts, NodeFacts, Verdict, typed_on, usual
from cluster.checks.machine import is_wsl
from cluster.runtimes import ARCHITECTURES, DOCKER, ENGINES, NEWER_DRIVER, RUNTIMES, driver_problem, short_id
from cluster.spec.image import how_to_get
from cluster.spec.model import Gpu, Machine
from cluster.transport import nvidia_smi


def probe_values(node: Machine, image: str) -> dict[str, scripts.Value]:
    """Return the variables of `probe.sh`."""
    engine = ENGINES.get(node.runtime)
    python = RUNTIMES[node.runtime].check(image, "python3")
    about = {"engine": engine.name, "info": engine.info} if engine else {"engine": ""}
    texts = {"run_dir": node.run_dir, "image": image, "versions": scripts.text("checks/versions.py")}
    return {**about, **texts, "python": python}


def runtime(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict:
    """Check that the runtime is installed, its engine runs, and the user may use it."""
    kind = node.runtime
    version = facts.text("engine_version")
    if not node.in_container:
        if facts.text("torch"):
            return Verdict("ok", f"{kind}: python3 {facts.text('python')} with torch")
        missing = "torch" if facts.text("python") else "python3"
        fix = f"{typed_on(node, facts, 'python3 -m pip install torch')}, or in cluster.yaml: runtime: docker"
        return Verdict("failure", f"{missing} is not installed (runtime: {kind})", fix)
    if not facts.has(kind):
        fix = f"install it ({ENGINES[kind].page}), then: clusterctl doctor"
        return Verdict("failure", f"{kind} is not installed", fix)
    if not version:
        return _no_answer(node, facts, " ".join(facts.every("engine_says")))
    if "rootless" not in facts.text("engine_security"):
        return Verdict("ok", f"{kind} {version}")
    if ENGINES[kind].rootless_network and len(seen.nodes) > 1:
        why = f"{kind} {version}, rootless: --network host is RootlessKit's network, peers may not reach the containers"
        return Verdict("warning", why, f"in cluster.yaml, {node.name}: runtime: podman")
    return Verdict("ok", f"{kind} {version}, rootless")


def _no_answer(node: Machine, facts: Facts, message: str) -> Verdict:
    kind = node.runtime
    user = facts.text("user")
    if "permission denied" in message.lower():
        command = typed_on(node, facts, f"usermod -aG docker {user}", root=True)
        why = f"{user} has no permission to use {kind}: not in the group docker"
        return Verdict("failure", why, f"{command}   (as an administrator)")
    if re.search("cannot connect|failed to connect", message, re.I):
        start = typed_on(node, facts, "service docker start", root=True)
        return Verdict("failure", f"{kind} is installed, but its engine does not run", start)
    return Verdict("failure", f"{kind}: {message or 'no answer'}", typed_on(node, facts, f"{kind} info"))


def gpus(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict:
    """Check that the inventory's GPUs exist, are idle, reach containers, and have equal models and drivers."""
    if seen.device != "cuda" or not node.gpus:
        return Verdict("ok", "not used: device: cpu" if seen.device == "cpu" else "none in the inventory")
    rows = gpu_rows(facts)
    if not rows:
        message = " ".join(facts.every("gpu_says"))
        missing = message or (
            "nvidia-smi lists none" if facts.has("nvidia-smi") else "nvidia-smi is not installed"
        )
        fix = f"{typed_on(node, facts, 'ubuntu-drivers install', root=True)}, then reboot"
        if is_wsl(facts):
            fix = "on Windows: install NVIDIA's driver (none inside WSL), then: wsl --shutdown"
        return Verdict("failure", f"{len(node.gpus)} GPUs in the inventory, but {missing}", fix)
    listed = listed_gpus(facts)
    absent = [gpu for gpu in node.gpus if gpu not in listed]
    if absent:
        here = ", ".join(map(str, listed))
        why = f"no GPU {', '.join(map(str, absent))}: the node has {here}"
        return Verdict("failure", why, f"in cluster.yaml, {node.name}: gpus: [{here}]")
    if node.in_container and not facts.has("nvidia-ctk") and "nvidia" not in facts.text("engine_runtimes"):
        page = "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/"
        why = f"containers cannot use GPUs: the NVIDIA Container Toolkit is not installed ({page})"
        install = typed_on(node, facts, "apt-get install nvidia-container-toolkit", root=True)
        configure = typed_on(node, facts, "nvidia-ctk runtime configure --runtime=docker", root=True)
        return Verdict("failure", why, f"{install}, then: {configure}")
    return _compared(node, facts, seen)


def _compared(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict:
    """Compare the node's GPUs with the other nodes', and their memory in use with nothing."""
    mine = _used_rows(node, facts)
    busy = [row for row in mine if row[2].isdigit() and row[3].isdigit() and int(row[3]) > int(row[2]) // 10]
    if busy:
        shown = ", ".join(
            f"GPU {row[0]} ({int(row[3]) / 1024:.1f} of {int(row[2]) / 1024:.0f} GB)" for row in busy
        )
        return Verdict(
            "warning", f"in use: {shown}", f"list the processes: {typed_on(node, facts, 'nvidia-smi')}"
        )
    rows = [row for each in seen.nodes for row in _used_rows(each, seen.facts[each.name])]
    driver = mine[0][1]
    usual_driver = usual(row[1] for row in rows)
    if driver != usual_driver:
        why = f"driver {driver}, but most nodes have {usual_driver}"
        return Verdict("warning", why, f"install driver {usual_driver} on {node.name}")
    models = {row[4] for row in mine}
    usual_model = usual(row[4] for row in rows)
    if models != {usual_model}:
        why = f"{', '.join(sorted(models))}, but most nodes have {usual_model}: every rank waits for the slowest GPU"
        return Verdict("warning", why, "choose nodes with equal GPUs: clusterctl launch --only ...")
    return Verdict("ok", f"{len(mine)} x {usual_model}, driver {driver}")


def image(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict | None:
    """Check that every node has the same image, equal to this machine's if it has one.

    A launch compares the nodes only, so another image that all of them have does not stop it.
    """
    if not (node.in_container and facts.text("engine_version")):
        return None
    ids = [seen.facts[each.name].text("image_id") for each in seen.nodes]
    wanted = seen.image_id or usual(each for each in ids if each)
    found = facts.text("image_id")
    fix = f"clusterctl image push {node.name} --image {seen.image}"
    if not seen.image_id:
        fix = f"on this machine, {how_to_get(seen.image, DOCKER.name)}; then: {fix}"
    if not found:
        return Verdict("failure", f"no image {seen.image} on this node", fix)
    if short_id(found) != short_id(wanted):
        where = "on this machine" if seen.image_id else "on most nodes"
        why = f"{seen.image} is {short_id(found)}, but {where} it is {short_id(wanted)}"
        return Verdict("warning" if len({short_id(each) for each in ids}) == 1 else "failure", why, fix)
    return Verdict("ok", f"{seen.image} is {short_id(found)}")


def architecture(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict | None:
    """Check that the image is built for the node's CPU architecture."""
    kind = facts.text("arch")
    built_for = facts.text("image_arch")
    needed = ARCHITECTURES.get(kind, kind)
    if built_for in ("", needed):
        return Verdict("ok", kind) if built_for else None
    fix = f"docker buildx build --platform linux/{needed}, then: clusterctl image push"
    return Verdict("failure", f"{kind}, but {seen.image} is for {built_for}", fix)


def versions(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict | None:
    """Check that the image has torch, and that the node's driver supports its CUDA."""
    if not facts.text("python") or not (node.in_container or facts.text("torch")):
        return None  # the checks of the runtime and the image report it
    if not facts.text("torch"):
        why = f"no torch in {seen.image}, which has python {facts.text('python')}"
        return Verdict("failure", why, "another image, in cluster.yaml: image: ...")
    parts = (("torch", "torch"), ("CUDA", "cuda"), ("ROCm", "hip"), ("NCCL", "nccl"))
    shown = ", ".join(f"{name} {facts.text(key)}" for name, key in parts if facts.text(key))
    if seen.device != "cuda" or not node.gpus:
        return Verdict("ok", shown)
    cuda = facts.text("cuda")
    rows = gpu_rows(facts)
    if not cuda:
        why = f"{shown}: a build of torch without CUDA"
        return Verdict("failure", why, "build the image with a CUDA build of torch")
    if rows and not facts.text("compat") and (why := driver_problem(rows[0][1], cuda)):
        return Verdict("failure", f"{shown}, but {why}", f"on {node.name}: {NEWER_DRIVER}")
    return Verdict("ok", shown)


def gpu_rows(facts: Facts) -> list[list[str]]:
    """Return index, driver, memory, memory in use, and name of each GPU, as nvidia-smi prints them."""
    cut = ([word.strip() for word in line.split(",", 4)] for line in facts.every("gpu"))
    return [row for row in cut if len(row) == 5 and row[0].isdigit()]


def listed_gpus(facts: Facts) -> dict[Gpu, nvidia_smi.ListedGpu]:
    """Return the GPUs and MIG slices of a node."""
    return nvidia_smi.listed_gpus("\n".join(facts.every("listed")))


def _used_rows(node: Machine, facts: Facts) -> list[list[str]]:
    """Return the rows of the inventory's GPUs. A MIG slice has the row of its GPU, without the memory in use."""
    rows = {row[0]: row for row in gpu_rows(facts)}
    listed = listed_gpus(facts)
    found = []
    for gpu in node.gpus:
        if gpu in listed and (row := rows.get(listed[gpu].gpu_index)):
            found.append([*row[:3], row[3] if isinstance(gpu, int) else "", listed[gpu].model])
    return found
