"""The supervisor's log of a job."""

import pytest

from cluster.backends import BACKENDS
from cluster.spec.model import Job
from cluster.supervisor import notes
from cluster.supervisor.display import Display


class Shown(Display):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


@pytest.fixture
def plan(tmp_path):
    made = BACKENDS["local"].plan(Job("job", ("x.py",), 1, 1, str(tmp_path)), attempt=1, port=20000)
    (tmp_path / "job").mkdir()
    return made


def test_what_one_process_decides_is_shown_by_another_one(plan):
    assert notes.text(plan) == ""
    notes.add(plan, "before")
    decides = Shown()
    displays = Shown()
    copied = notes.Copied(displays, plan)
    notes.Kept(decides, plan).note("node-1: exit 137\nhint: none")
    copied.note("node-1: exit 137")  # what the second process sees itself
    copied.show(None, [])
    copied.show(None, [])
    assert decides.notes == ["node-1: exit 137\nhint: none"]
    assert [line[20:] for line in displays.notes] == ["before", "node-1: exit 137 hint: none"]
    assert notes.text(plan).splitlines() == displays.notes


def test_an_incomplete_line_is_read_later(plan):
    reader = notes.Reader(plan)
    notes.path(plan).write_text("one\ntw")
    assert reader.lines() == ["one"]
    notes.path(plan).write_text("one\ntwo\n")
    assert reader.lines() == ["two"]
    assert reader.lines() == []
