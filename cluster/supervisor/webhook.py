"""The webhook of the user: it gets what has happened to a job, as JSON."""

from __future__ import annotations

import json
import os
from typing import Literal

from cluster.spec.model import Plan

#: A URL, which may contain a secret: it is read from the environment only, and never printed.
_WEBHOOK = "CLUSTERCTL_WEBHOOK"
_WEBHOOK_TIMEOUT_S = 10.0


def post(plan: Plan, event: Literal["done", "failed", "stopped", "restarted"], detail: str) -> list[str]:
    """Post an event as JSON, if CLUSTERCTL_WEBHOOK is set. Return a sentence if it could not be sent.

    Slack and Mattermost show its field `text`.
    """
    url = os.environ.get(_WEBHOOK, "")
    if not url:
        return []
    import http.client  # 12 ms that `plan` must not spend
    import urllib.request

    if not url.startswith(("http://", "https://")):
        return [f"{_WEBHOOK}: expected a URL with http:// or https://; not sent: {event}"]
    text = f"{plan.job_id}: {event}" + (f": {detail}" if detail else "")
    fields = {"text": text, "job": plan.job_id, "event": event, "attempt": plan.attempt, "detail": detail}
    headers = {"Content-Type": "application/json", "User-Agent": "clusterctl"}
    try:
        request = urllib.request.Request(url, json.dumps(fields).encode(), headers)
        with urllib.request.urlopen(request, timeout=_WEBHOOK_TIMEOUT_S):
            return []
    except (OSError, ValueError, http.client.HTTPException) as error:
        return [f"{_WEBHOOK}: not sent: {event}: {getattr(error, 'reason', None) or type(error).__name__}"]
