"""What a command left, and where programs are looked for."""

from __future__ import annotations

from dataclasses import dataclass

#: Where `ip`, docker and WSL's nvidia-smi are, and where a session without a login may not look.
MORE_PATH = "/usr/local/bin:/usr/sbin:/sbin:/usr/lib/wsl/lib"

#: The line that a command prints first: what the login shell printed is before it.
BEGIN = "clusterctl begins"


@dataclass(frozen=True)
class Completed:
    """Its exit code and everything it printed."""

    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """The last line it printed to stderr, else to stdout, else its exit code in words: what an error quotes."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return lines[-1] if lines else f"exit {self.code}"
