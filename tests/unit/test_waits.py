"""Long waits: what the command line says of them."""

import threading

from cluster.transport import waits
from tests.conftest import wait_until


def test_a_short_wait_is_not_shown(monkeypatch):
    shown = []
    monkeypatch.setattr(waits, "_show", lambda *words: shown.append(words))
    with waits.waiting("nothing"):
        pass
    assert shown == []
    assert wait_until(lambda: not any(each.name == "wait" for each in threading.enumerate()))
