"""Judges folders that must be the same on every node: the launching machine's is what they are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from cluster import files
from cluster.doctor.findings import Finding, Seen
from cluster.errors import ClusterError
from cluster.files import Difference


def data(seen: Seen, folders: Sequence[str]) -> list[Finding]:
    """One finding per node and folder, with the first files that differ. Raises UsageError for a folder not here."""
    return [finding for folder in folders for finding in _compared(seen, folder)]


def _compared(seen: Seen, folder: str) -> list[Finding]:
    remote = [files.with_data_dir(node) for node in seen.nodes if node.login]
    results = files.differences(remote, folder) if remote else {}
    return [_finding(name, folder, result) for name, result in results.items()]


def _finding(name: str, folder: str, result: Difference | ClusterError) -> Finding:
    if isinstance(result, ClusterError):
        why = result.message.removeprefix(f"{name}: ")
        return Finding("data", name, "failure", why, result.hint or files.command(folder))
    if result:
        fix = files.command(folder, delete=bool(result.extra))
        return Finding("data", name, "failure", f"{folder} differs: {result}", fix)
    return Finding("data", name, "ok", f"{folder} is the same")
