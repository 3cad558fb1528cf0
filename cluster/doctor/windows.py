"""Judges nodes that are Windows machines with WSL: what Windows gives to Linux, and what to change on its side."""

from __future__ import annotations

import ipaddress

from cluster.doctor.findings import Finding, Level, Seen
from cluster.doctor.network import devices
from cluster.doctor.probe import Facts
from cluster.model import Node

MEMORY_GOOD_GB = 15.0
_CONFIG = r"%UserProfile%\.wslconfig"
#: The firewall in front of every WSL machine with mirrored networking; the number is WSL's own, the same everywhere.
_FIREWALL = "Set-NetFirewallHyperVVMSetting -Name '{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}' -DefaultInboundAction Allow"


def wsl(seen: Seen) -> list[Finding]:
    """Findings for the nodes that run under WSL, none for others."""
    return [each for node in seen.nodes for each in _wsl(node, seen.facts[node.name], alone=len(seen.nodes) == 1)]


def _wsl(node: Node, facts: Facts, *, alone: bool) -> list[Finding]:
    if "microsoft" not in facts.text("kernel").lower():
        return []
    found = []

    def say(level: Level, why: str, fix: str) -> None:
        found.append(Finding("wsl", node.name, level, why, fix))

    mode = facts.text("wsl_networking")
    if not alone and (mode == "nat" or (not mode and _looks_like_nat(facts))):
        say(
            "failure",
            "WSL's network is NAT: peers cannot reach it",
            f"on Windows, in {_CONFIG}: [wsl2] networkingMode=mirrored, then: wsl --shutdown; "
            f"then in PowerShell as administrator: {_FIREWALL}",
        )
    elif not alone and mode not in ("mirrored", "bridged", ""):
        say(
            "failure",
            f"WSL's networking mode is {mode}: peers cannot reach it",
            f"on Windows, in {_CONFIG}: [wsl2] networkingMode=mirrored, then: wsl --shutdown",
        )
    memory_gb = (facts.number("memory_kb") or 0) / (1 << 20)
    if memory_gb < MEMORY_GOOD_GB:
        say(
            "warning",
            f"WSL has {memory_gb:.1f} GB of memory (by default half of the machine's)",
            f"on Windows, in {_CONFIG}: [wsl2] memory=16GB (as much as Windows can spare), then: wsl --shutdown",
        )
    if node.gpus:
        libraries = facts.every("libcuda")
        if "/usr/lib/wsl/lib/libcuda.so.1" not in libraries:
            say(
                "failure",
                "WSL has no CUDA driver: /usr/lib/wsl/lib/libcuda.so.1 is not there",
                "on Windows: install NVIDIA's driver and run wsl --update (install no driver inside WSL)",
            )
        elif len(libraries) > 1:
            say(
                "warning",
                f"a Linux driver ({libraries[1]}) is installed beside that of Windows",
                "in WSL: sudo apt-get purge 'libnvidia-compute-*' 'nvidia-driver-*'",
            )
        if memory_gb < 2 * MEMORY_GOOD_GB:
            say(
                "warning",
                "WSL limits pinned memory, which loaders and NCCL use, to a share of its memory",
                f"if CUDA is out of memory while the GPU has room: fewer --workers, or more memory= in {_CONFIG}",
            )
    return found or [Finding("wsl", node.name, "ok", f"WSL, {mode or 'network as it should be'}")]


def _looks_like_nat(facts: Facts) -> bool:
    # Older WSL has no wslinfo: its own network is 172.16.0.0/12 on eth0
    private = ipaddress.ip_network("172.16.0.0/12")
    return any(
        device == "eth0" and address.version == 4 and address.ip in private for device, address in devices(facts)
    )
