"""Judges nodes that are Windows machines with WSL: what keeps a job from running, and what to change on Windows."""

from __future__ import annotations

import ipaddress

from cluster.doctor.findings import Finding, Seen
from cluster.doctor.network import devices
from cluster.doctor.probe import Facts
from cluster.model import Node

#: The firewall in front of every WSL machine with mirrored networking; the number is WSL's own, the same everywhere.
_FIREWALL = "Set-NetFirewallHyperVVMSetting -Name '{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}' -DefaultInboundAction Allow"


def wsl(seen: Seen) -> list[Finding]:
    """Findings for the nodes that run under WSL, none for others."""
    return [each for node in seen.nodes for each in _wsl(node, seen.facts[node.name], alone=len(seen.nodes) == 1)]


def _wsl(node: Node, facts: Facts, *, alone: bool) -> list[Finding]:
    if "microsoft" not in facts.text("kernel").lower():
        return []
    found = []
    mode = facts.text("wsl_networking") or ("nat" if _looks_like_nat(facts) else "")
    if not alone and mode not in ("mirrored", "bridged", ""):
        why = f"WSL's networking mode is {mode}: other nodes cannot reach this one"
        fix = (
            r"on Windows, in %UserProfile%\.wslconfig: [wsl2] networkingMode=mirrored, then: wsl --shutdown; "
            f"then in PowerShell as administrator: {_FIREWALL}"
        )
        found.append(Finding("wsl", node.name, "failure", why, fix))
    if node.gpus and not facts.text("libcuda"):
        why = "WSL has no CUDA driver: /usr/lib/wsl/lib/libcuda.so.1 is not there"
        fix = "on Windows: install NVIDIA's driver and run wsl --update (install no driver inside WSL)"
        found.append(Finding("wsl", node.name, "failure", why, fix))
    return found or [Finding("wsl", node.name, "ok", f"WSL, networking mode {mode or 'unknown'}")]


def _looks_like_nat(facts: Facts) -> bool:
    # Older WSL has no wslinfo: its own network is 172.16.0.0/12 on eth0
    private = ipaddress.ip_network("172.16.0.0/12")
    return any(
        device == "eth0" and address.version == 4 and address.ip in private for device, address in devices(facts)
    )
