"""A mount: a folder or file of a machine in its containers. Pure."""

from dataclasses import dataclass

from cluster.errors import UsageError
from cluster.spec.paths import absolute


@dataclass(frozen=True)
class Mount:
    """A bind mount; `synced`: the source is a folder of this machine that `clusterctl sync` copies to the nodes."""

    source: str
    target: str
    read_only: bool = True
    synced: bool = False


def parse(text: str, cwd: str) -> Mount:
    """Parse `SOURCE[:TARGET[:rw]]`; a relative source is below `cwd`. Raise UsageError if it is invalid."""
    source, *rest = text.split(":")
    if not source or len(rest) > 2 or (len(rest) == 2 and rest[1] not in ("ro", "rw")):
        raise UsageError(f"--mount {text!r}", "SOURCE[:TARGET[:rw]], for example: --mount ./data:/data")
    source = absolute(source, cwd)
    target = rest[0] if rest and rest[0] else source
    if not target.startswith("/"):
        raise UsageError(
            f"--mount {text!r}: the target must be an absolute path", "for example: --mount ./data:/data"
        )
    return Mount(source, target, read_only=rest[1:] != ["rw"])
