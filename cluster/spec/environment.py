"""Environment variables of a job. Pure."""

import re
from collections.abc import Sequence

from cluster.errors import UsageError

#: Patterns of the variables of NCCL, libfabric, UCX and Open MPI, by which a site configures its network.
PASS_ENV = ("NCCL_*", "FI_*", "UCX_*", "OMPI_*")
#: The pattern of an environment variable's name.
NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"


def parse(given: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables of `NAME=VALUE` texts, and the names of the secrets, which are given without a value."""
    pairs = [text.partition("=") for text in given]
    for name, _, _ in pairs:
        if not re.fullmatch(NAME, name):
            hint = "use NAME=VALUE, or NAME alone to pass your own value as a secret"
            raise UsageError(f"--env {name}: not a valid variable name", hint)
    secrets = dict.fromkeys(name for name, mark, _ in pairs if not mark)
    return {name: value for name, mark, value in pairs if mark}, tuple(secrets)


def passed(names: Sequence[str]) -> tuple[str, ...]:
    """Return the variables that match PASS_ENV. The network devices of a container differ from its machine's."""
    beginnings = tuple(pattern.rstrip("*") for pattern in PASS_ENV)
    return tuple(sorted(name for name in names if name.startswith(beginnings) and "_IFNAME" not in name))
