"""Judges what runs the containers: the runtime and its rights, GPUs and their driver, the image and what it holds."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cluster.doctor.findings import Finding, Level, Seen, typed_on
from cluster.doctor.probe import Facts
from cluster.model import Node
from cluster.runtimes.containers import ARCHITECTURES, short_id

#: The oldest driver that runs a major version of CUDA (NVIDIA, CUDA Compatibility, minor version compatibility).
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}


def runtime(seen: Seen) -> list[Finding]:
    """The engine is there, answers, and lets this user in."""
    return [_runtime(node, seen.facts[node.name], seen) for node in seen.nodes]


def _runtime(node: Node, facts: Facts, seen: Seen) -> Finding:
    def failure(why: str, fix: str) -> Finding:
        return Finding("runtime", node.name, "failure", why, fix)

    kind, user = node.runtime, facts.text("user")
    if kind == "none":
        if facts.text("torch"):
            return Finding("runtime", node.name, "ok", f"none: python3 {facts.text('python')} with torch")
        why = "python3 has no torch" if facts.has("python3") else "there is no python3"
        fix = typed_on(node, facts, "python3 -m pip install torch")
        return failure(f"{why}, and the inventory names no container runtime", f"{fix}, or runtime: docker")
    if not facts.has(kind):
        page = "https://docs.docker.com/engine/install/" if kind == "docker" else "https://podman.io/docs/installation"
        return failure(f"{kind} is not installed", f"install it ({page}), then: clusterctl doctor")
    version, said = facts.text("engine_version"), " ".join(facts.every("engine_says"))
    if not version:
        if "permission denied" in said.lower():
            group = facts.text("socket_group") or "docker"
            command = typed_on(node, facts, f"usermod -aG {group} {user}", root=True)
            return failure(f"{user} may not use {kind}: not in the group {group}", f"{command}   (as an administrator)")
        start = "systemctl start docker" if facts.has("systemd") else "service docker start"
        start = typed_on(node, facts, start, root=True)
        if re.search("cannot connect|failed to connect", said, re.I):
            return failure(f"{kind} is installed, but its engine does not run", start)
        return failure(f"{kind}: {said or 'no answer'}", typed_on(node, facts, f"{kind} info"))
    rootless = "rootless" in facts.text("engine_security")
    shown = f"{kind} {version}{', rootless' if rootless else ''}"
    if rootless and kind == "docker" and len(seen.nodes) > 1:
        why = f"{shown}: its --network host is RootlessKit's, so peers may not reach the containers"
        return Finding("runtime", node.name, "warning", why, f"in cluster.yaml, {node.name}: runtime: podman")
    return Finding("runtime", node.name, "ok", shown)


def gpus(seen: Seen) -> list[Finding]:
    """The GPUs of the inventory are there, free, and containers get them; models and drivers are equal."""
    if seen.device != "cuda" or not any(node.gpus for node in seen.nodes):
        why = "not used: device: cpu" if seen.device == "cpu" else "none in the inventory"
        return [Finding("gpus", node.name, "ok", why) for node in seen.nodes]
    rows = {node.name: _gpu_rows(seen.facts[node.name]) for node in seen.nodes}
    usual_driver = _usual(row[1] for found in rows.values() for row in found)
    usual_model = _usual(row[4] for found in rows.values() for row in found)
    return [_gpus(node, seen.facts[node.name], rows[node.name], usual_driver, usual_model) for node in seen.nodes]


def _gpus(node: Node, facts: Facts, rows: list[list[str]], usual_driver: str, usual_model: str) -> Finding:
    def found(level: Level, why: str, fix: str) -> Finding:
        return Finding("gpus", node.name, level, why, fix)

    if not rows and node.gpus:
        said = " ".join(facts.every("gpu_says"))
        fix = typed_on(node, facts, "ubuntu-drivers install", root=True) + ", then restart it"
        if "microsoft" in facts.text("kernel").lower():
            fix = "on Windows: install NVIDIA's driver (none inside WSL), then: wsl --shutdown"
        elif "mismatch" in said:
            fix = typed_on(node, facts, "reboot", root=True)
        missing = said or ("nvidia-smi lists none" if facts.has("nvidia-smi") else "there is no nvidia-smi")
        return found("failure", f"{len(node.gpus)} GPUs in the inventory, but {missing}", fix)
    absent = [gpu for gpu in node.gpus if gpu not in {int(row[0]) for row in rows}]
    if absent:
        here = ", ".join(row[0] for row in rows)
        why = f"no GPU {', '.join(map(str, absent))}: it has {here}"
        return found("failure", why, f"in cluster.yaml, {node.name}: gpus: [{here}]")
    if node.runtime != "none" and not (
        facts.has("nvidia-ctk")
        or facts.has("nvidia-container-runtime-hook")
        or facts.every("cdi")
        or "nvidia" in facts.text("engine_runtimes").split()
    ):
        page = "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/"
        return found(
            "failure",
            f"containers get no GPU: the NVIDIA Container Toolkit is not installed ({page})",
            typed_on(node, facts, "apt-get install nvidia-container-toolkit", root=True)
            + ", then: "
            + typed_on(node, facts, "nvidia-ctk runtime configure --runtime=docker", root=True),
        )
    mine = [row for row in rows if int(row[0]) in node.gpus]
    busy = [row for row in mine if row[2].isdigit() and row[3].isdigit() and int(row[3]) > int(row[2]) // 10]
    if busy:
        shown = ", ".join(f"GPU {row[0]} ({int(row[3]) / 1024:.1f} of {int(row[2]) / 1024:.0f} GB)" for row in busy)
        return found("warning", f"others use {shown}", f"see who: {typed_on(node, facts, 'nvidia-smi')}")
    driver, models = rows[0][1], {row[4] for row in mine}
    if driver != usual_driver:
        why = f"driver {driver}, most others have {usual_driver}"
        return found("warning", why, f"install driver {usual_driver} on {node.name}")
    if models - {usual_model}:
        why = f"{', '.join(sorted(models))}, most others are {usual_model}: the slowest sets the pace"
        return found("warning", why, "take equal ones: clusterctl launch --only ...")
    return Finding("gpus", node.name, "ok", f"{len(mine)} x {usual_model}, driver {driver}")


def image(seen: Seen) -> list[Finding]:
    """The image is on every node, and it is the same one: the launching machine's, where that has it."""
    nodes = [node for node in seen.nodes if node.runtime != "none" and seen.facts[node.name].text("engine_version")]
    if not seen.image:
        return []
    ids = {node.name: short_id(seen.facts[node.name].text("image_id")) for node in nodes}
    stores = {"containerd.snapshotter" in seen.facts[node.name].text("engine_store") for node in nodes}
    by_layers = len(stores) > 1  # the two kinds of store give one image two ids
    if by_layers:
        ids = {node.name: seen.facts[node.name].text("image_layers") for node in nodes}
    wanted = (
        short_id(seen.image_id) if seen.image_id and not by_layers else _usual(each for each in ids.values() if each)
    )
    found = []
    for node in nodes:
        fix = f"clusterctl image push {node.name} --image {seen.image}"
        if not seen.image_id:
            fix = f"have it on this machine (make image, or docker pull {seen.image}), then: {fix}"
        if not ids[node.name]:
            said = f"{seen.image} is not on it"
            found.append(Finding("image", node.name, "failure", said, fix))
        elif ids[node.name] != wanted:
            whose = "this machine's" if seen.image_id and not by_layers else "the others'"
            why = f"{seen.image} is another one than {whose}"
            if not by_layers:
                why = f"{seen.image} is {ids[node.name]}, {whose} is {wanted}"
            found.append(Finding("image", node.name, "failure", why, fix))
        else:
            found.append(Finding("image", node.name, "ok", seen.image + ("" if by_layers else f" is {wanted}")))
    return found


def architecture(seen: Seen) -> list[Finding]:
    """The image is made for the node's processor, and all nodes have the same kind."""
    found = []
    usual = _usual(seen.facts[node.name].text("arch") for node in seen.nodes)
    for node in seen.nodes:
        facts = seen.facts[node.name]
        kind = facts.text("arch")
        made_for = facts.text("image_arch")
        if made_for and made_for != ARCHITECTURES.get(kind, kind):
            fix = f"docker buildx build --platform linux/{ARCHITECTURES.get(kind, kind)}, then: clusterctl image push"
            why = f"{kind}, but its {seen.image} is for {made_for}"
            found.append(Finding("architecture", node.name, "failure", why, fix))
        elif kind != usual:
            why = f"{kind}, the others are {usual}: one image cannot serve both"
            fix = f"take nodes of one kind: clusterctl launch --only {_named(seen, usual)}"
            found.append(Finding("architecture", node.name, "failure", why, fix))
        else:
            found.append(Finding("architecture", node.name, "ok", kind))
    return found


def versions(seen: Seen) -> list[Finding]:
    """torch, CUDA and NCCL of the image, and whether every node's driver is new enough for that CUDA."""
    held = seen.versions
    if held is None:
        return []
    parts = (("torch", "torch"), ("CUDA", "cuda"), ("ROCm", "hip"), ("NCCL", "nccl"))
    shown = ", ".join(f"{name} {held.text(key)}" for name, key in parts if held.text(key))
    found = []
    for node in seen.nodes:
        facts = seen.facts[node.name]
        rows = _gpu_rows(facts)
        if not held.text("torch"):
            why, fix = f"no torch in {seen.image}", f"{node.runtime} run --rm {seen.image} python3 -m pip list"
            found.append(Finding("versions", node.name, "failure", why, typed_on(node, facts, fix)))
            continue
        needed = OLDEST_DRIVER.get(_major(held.text("cuda")))
        if seen.device == "cuda" and node.gpus and rows and needed and _major(rows[0][1]) < needed:
            why = f"{shown}, but driver {rows[0][1]}: CUDA {held.text('cuda')} needs {needed} or newer"
            fix = f"install driver {needed} or newer on {node.name}, or build the image with an older CUDA"
            found.append(Finding("versions", node.name, "failure", why, fix))
        elif seen.device == "cuda" and node.gpus and not held.text("cuda"):
            why, fix = f"{shown}: a build of torch without CUDA", "build the image with a CUDA build of torch"
            found.append(Finding("versions", node.name, "failure", why, fix))
        else:
            found.append(Finding("versions", node.name, "ok", shown))
    return found


def _gpu_rows(facts: Facts) -> list[list[str]]:
    # index, driver, memory, memory in use, name: nvidia-smi's lines
    cut = ([word.strip() for word in line.split(",", 4)] for line in facts.every("gpu"))
    return [row for row in cut if len(row) == 5 and row[0].isdigit()]


def _usual(values: Iterable[str]) -> str:
    listed = list(values)
    return max(listed, key=listed.count, default="")


def _named(seen: Seen, kind: str) -> str:
    return ",".join(node.name for node in seen.nodes if seen.facts[node.name].text("arch") == kind)


def _major(version: str) -> int:
    number = re.match(r"\d+", version)
    return int(number[0]) if number else 0
