"""Times that a user types: 90s, 30m, 2h. Pure."""

import re

from cluster.errors import UsageError


def seconds(text: str, option: str) -> float:
    """Return the seconds of `90s`, `30m` or `2h`. Raise UsageError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|min|h)", text)
    if not match:
        raise UsageError(
            f"{option} {text!r}: expected a time", f"for example: {option} 90s, {option} 30m, {option} 2h"
        )
    return float(match[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[match[2]]
