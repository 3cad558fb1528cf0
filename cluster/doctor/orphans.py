"""Check of what dead jobs have left behind, on each machine or in the cluster."""

from collections.abc import Sequence

from cluster.backends import BACKENDS
from cluster.backends.base import FoundJob
from cluster.checks.findings import Finding, Verdict
from cluster.errors import ClusterError
from cluster.spec.model import Inventory


def examine(inventory: Inventory, supervised: frozenset[str], silent: Sequence[str]) -> list[Finding]:
    """Return a finding for each machine or cluster, except those that are silent."""
    found = BACKENDS[inventory.backend].jobs_on(inventory, supervised)
    return [Finding("orphans", where, *judge(jobs)) for where, jobs in found.items() if where not in silent]


def judge(found: Sequence[FoundJob] | ClusterError) -> Verdict:
    """Report what `clusterctl gc` would remove from a machine or a cluster."""
    if isinstance(found, ClusterError):
        return Verdict("warning", f"not checked: {found.message}", found.hint or "clusterctl gc")
    left = dict.fromkeys(job.job for job in found if job.is_orphan)
    if left:
        return Verdict("warning", f"orphans of {', '.join(left)}", "clusterctl gc")
    return Verdict("ok", "none")
