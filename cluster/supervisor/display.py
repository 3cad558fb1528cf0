"""The display of a job: what it shows while the job is followed. This one shows nothing."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.spec.model import Plan
from cluster.supervisor.job_state import JobView


class Display:
    """No-op base class for job displays."""

    def begin(self, plan: Plan) -> None:
        """Prepare for a new attempt."""

    def show(self, view: JobView, lines: Sequence[tuple[str, str]]) -> None:
        """Draw the view, and the new log lines as (node, text) pairs."""

    def note(self, text: str) -> None:
        """Print one sentence for the user."""
