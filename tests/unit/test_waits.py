"""Long waits: what the command line says of them."""

import threading

from cluster.backends import BACKENDS, hosts, monitor
from cluster.spec.model import Job, Machine
from cluster.transport import waits
from tests.conftest import wait_until


def test_a_stop_that_lasts_names_the_machines_that_it_waits_for(monkeypatch):
    shown, end = [], threading.Event()
    monkeypatch.setattr(waits, "SHOW_AFTER_S", 0.1)
    monkeypatch.setattr(waits, "AGAIN_S", 0.1)
    monkeypatch.setattr(waits, "_show", lambda *words: shown.append(words))
    monkeypatch.setattr(monitor, "stop", lambda machine, *_, **__: machine.name == "b" and end.wait(20))
    machines = tuple(Machine(name, "10.0.0.1", (), name, "/runs", runtime="none") for name in "ab")
    plan = BACKENDS["ssh"].plan(Job("job", ("x.py",), 2, 1, "/here", hosts=machines), attempt=1, port=20000)
    stopping = threading.Thread(target=hosts.HostsBackend.cancel, args=(BACKENDS["ssh"], plan), kwargs={"grace_s": 30})
    stopping.start()
    assert wait_until(lambda: len(shown) > 1)
    end.set()
    stopping.join()
    (first, is_first), (_, is_second) = shown[:2]
    assert first.startswith("waiting up to ")
    assert first.endswith(" s for job to exit on b")
    assert (is_first, is_second) == (True, False)


def test_a_short_wait_is_not_shown(monkeypatch):
    shown = []
    monkeypatch.setattr(waits, "_show", lambda *words: shown.append(words))
    with waits.waiting("nothing"):
        pass
    assert shown == []
    assert wait_until(lambda: not any(each.name == "wait" for each in threading.enumerate()))
