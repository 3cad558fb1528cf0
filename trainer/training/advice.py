"""What an epoch's seconds mean: which rank the others wait for, and one piece of advice where a share is too large."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SLOWER = 1.15  # a rank is slow when its own work takes this much longer than the median rank's
LOADING, WAITING, VALIDATING = 0.20, 0.25, 0.35  # shares of the time from which on something is said

Shares = Mapping[str, float]


def slowest(shares: Sequence[Shares]) -> tuple[int, str] | None:
    """The rank whose own work (all but waiting for others) takes clearly longest, and what it spends more on."""
    own = [share["data"] + share["transfer"] + share["compute"] for share in shares]
    middle = sorted(own)[(len(own) - 1) // 2]
    rank = max(range(len(own)), key=lambda k: own[k])
    if len(own) < 2 or own[rank] < SLOWER * middle:
        return None
    parts = {k: shares[rank][k] - sum(s[k] for s in shares) / len(shares) for k in ("data", "transfer", "compute")}
    return rank, max(parts, key=lambda k: parts[k])


def advice(shares: Sequence[Shares], *, workers: int, cores: int, device: str, cached: bool) -> str:
    """One sentence for an epoch whose time goes to the wrong place, "" for one that is well spent.

    `shares` are the fractions of the epoch's seconds of each rank; `workers` and `cores` count for one rank.
    """
    mean = {k: sum(share[k] for share in shares) / len(shares) for k in shares[0]}
    slow = slowest(shares)
    if slow and mean["sync"] > WAITING / 2:
        rank, what = slow
        why = {"data": "its loading", "transfer": "its copies to the device", "compute": "its computing"}[what]
        return f"the others wait for rank {rank}: {why} takes longer there"
    if mean["data"] > LOADING:
        more = min(max(2 * workers, workers + 1), cores)
        ways = [f"--workers {more} (now {workers})"] if more > workers and device != "cpu" else []
        ways += [] if cached else ["--cache ram, or --cache disk"]
        if ways:
            return f"loading is {mean['data']:.0%} of the time: try {' or '.join(ways)}"
    if mean["sync"] > WAITING:
        return (
            f"the exchange between ranks is {mean['sync']:.0%} of the time: a larger --batch, or --grad-compress bf16"
        )
    if mean["val"] > VALIDATING:
        return f"validation is {mean['val']:.0%} of the time: --val-period 5 validates every fifth epoch only"
    return ""
