"""What the suites of this folder share."""

from tests.contract.sshd import sshd

__all__ = ["sshd"]
