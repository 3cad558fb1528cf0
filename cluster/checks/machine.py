"""Checks of one machine: disk, shared memory, limits, clock, user, data and WSL."""

import statistics
from collections.abc import Sequence

from cluster.checks.findings import Facts, Finding, NodeFacts, Verdict, typed_on, usual
from cluster.errors import ClusterError
from cluster.spec.model import Machine
from cluster.transport import files

_GB_KB = 1 << 20
#: Workers of a DataLoader pass batches through /dev/shm. 16 images of 640 px are 80 MB, and each rank queues several.
SHM_NEEDED_KB = _GB_KB // 4
DISK_NEEDED_KB = _GB_KB
FILES_GOOD = 4096
CLOCK_S = 2.0
#: Opens the Hyper-V firewall of WSL with mirrored networking. The GUID is WSL's, equal on every machine.
_FIREWALL = "Set-NetFirewallHyperVVMSetting -Name '{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}' -DefaultInboundAction Allow"


def shm(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict:
    """Check that /dev/shm has room for the batches of dataloader workers. Containers use it through --ipc host."""
    free = facts.number("shm_kb")
    total = facts.number("shm_kb", 1)
    if free >= SHM_NEEDED_KB:
        return Verdict("ok", "/dev/shm has room")
    why = f"/dev/shm has {free >> 10} MB free of {total >> 10} MB: dataloader workers fail with 'bus error'"
    if total >= 4 * SHM_NEEDED_KB:
        return Verdict("failure", why, f"delete files in it: {typed_on(node, facts, 'ls -lhS /dev/shm')}")
    return Verdict("failure", why, typed_on(node, facts, "mount -o remount,size=50% /dev/shm", root=True))


def limits(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict:
    """Check the limit of open files."""
    limit = facts.text("nofile")
    if not limit.isdigit() or int(limit) >= FILES_GOOD:
        return Verdict("ok", "enough open files")
    fix = typed_on(node, facts, f"echo '{facts.text('user')} - nofile 65536' >> /etc/security/limits.conf")
    return Verdict("warning", f"{limit} open files: too few for many workers", f"as root: {fix}")


def disk(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict:
    """Check the free space for checkpoints and logs in run_dir."""
    free = facts.number("run_disk_kb")
    if free >= DISK_NEEDED_KB:
        return Verdict("ok", "enough free space")
    fix = f"free space ({typed_on(node, facts, 'df -h')}), or in cluster.yaml, {node.name}: run_dir: ..."
    return Verdict("failure", f"{free >> 10} MB free for {facts.text('run_dir')} (run_dir)", fix)


def run_dir(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict:
    """Check that the probe could write a file into run_dir."""
    folder = facts.text("run_dir")
    why = facts.text("unwritable")
    if not why:
        return Verdict("ok", f"{folder} is writable")
    fix = typed_on(node, facts, f"install -d -o {facts.text('user')} {folder}", root=True)
    if "space" in why or "quota" in why.lower():
        fix = f"free space: {typed_on(node, facts, f'df -h {folder}')}"
    return Verdict("failure", f"{folder} cannot be written: {why}", fix)


def user(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict:
    """Check that the user id is equal on all nodes, so that files on a shared disk have one owner."""
    usual_id = usual(seen.facts[each.name].text("uid") for each in seen.nodes)
    shown = f"{facts.text('user')} ({facts.text('uid')})"
    if facts.text("uid") == usual_id:
        return Verdict("ok", shown)
    why = f"{shown}, but most nodes have user id {usual_id}: files on a shared disk have different owners"
    fix = f"log in as a user with this id on every node (create it with: useradd -u {usual_id} ...)"
    return Verdict("warning", why, fix)


def clock(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict:
    """Compare clocks with the median of the nodes and this machine: the first failure is found by its time."""
    median_s = statistics.median([0.0, *seen.clock_s.values()])
    offset_s = seen.clock_s.get(node.name, median_s) - median_s
    if abs(offset_s) <= CLOCK_S:
        return Verdict("ok", f"agrees within {CLOCK_S:g} s")
    direction = "ahead of" if offset_s > 0 else "behind"
    why = f"{abs(offset_s):.0f} s {direction} the others: the first failure of a job cannot be determined"
    return Verdict(
        "failure", why, f"set the clock of {node.name}, for example: timedatectl set-ntp true, or chronyd"
    )


def is_wsl(facts: Facts) -> bool:
    """Return whether the node is in the Windows Subsystem for Linux."""
    return "microsoft" in facts.text("kernel").lower()


def wsl(node: Machine, facts: Facts, seen: NodeFacts) -> Verdict | None:
    """Check the networking mode and the CUDA driver of a node under WSL."""
    if not is_wsl(facts):
        return None
    mode = facts.text("wsl_networking")
    if node.gpus and not facts.text("libcuda"):
        why = "WSL has no CUDA driver: /usr/lib/wsl/lib/libcuda.so.1 does not exist"
        fix = "on Windows: install NVIDIA's driver and run wsl --update (install no driver inside WSL)"
        return Verdict("failure", why, fix)
    if len(seen.nodes) > 1 and mode not in ("mirrored", "bridged", ""):
        why = f"WSL's networking mode is {mode}: other nodes cannot reach this one"
        fix = (
            r"on Windows, in %UserProfile%\.wslconfig: [wsl2] networkingMode=mirrored, then: wsl --shutdown; "
            f"then in PowerShell as administrator: {_FIREWALL}"
        )
        return Verdict("failure", why, fix)
    return Verdict("ok", f"WSL, networking mode {mode or 'unknown'}")


def data(nodes: Sequence[Machine], folders: Sequence[str]) -> list[Finding]:
    """Compare each folder with its copy on every node. Raise UsageError if this machine does not have the folder."""
    remote = [files.with_data_dir(node) for node in nodes if node.login]
    found = []
    for folder in folders:
        for name, result in (files.differences(remote, folder) if remote else {}).items():
            verdict = Verdict("ok", f"{folder} is equal")
            if isinstance(result, ClusterError):
                why = result.message.removeprefix(f"{name}: ")
                verdict = Verdict("failure", why, result.hint or files.command(folder))
            elif result:
                fix = files.command(folder, delete=bool(result.extra))
                verdict = Verdict("failure", f"{folder} differs: {result}", fix)
            found.append(Finding("data", name, *verdict))
    return found
