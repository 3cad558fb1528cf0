import collections.abc
import os
import re
import subprocess
import sys
import types
import typing
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser

import pytest

from cluster.agent.app.node_agent.events import event
from cluster.backends import BACKENDS
from cluster.spec.model import Job, JobRecord, PastAttempt
from cluster.spec.node_status import NodeStatus
from cluster.spec.status import Failure, RankUsage, Usage
from cluster.store import JobStore
from cluster.supervisor import job_state, page
from cluster.web import live, server

SCRIPT = "<script>alert('&')</script>"


class Tags(HTMLParser):
    """The tags, attributes and text that a browser finds."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.attributes = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def record(tmp_path):
    job = Job("job", ("train.py", "--note", SCRIPT), 2, 1, str(tmp_path), image="trainer:0.1")
    plan = BACKENDS["compose"].plan(job, attempt=2, port=20000)
    history = (PastAttempt(1, ("node-0", "node-1"), 1000.0, 1030.0, f"rank 1: {SCRIPT}"),)
    (tmp_path / "job" / "attempt-2").mkdir(parents=True)
    return JobRecord(
        plan, 1032.0, job, outcome="failed", detail=f"no {SCRIPT}", history=history, ended_at=5000.0
    )


def test_text_of_a_job_is_shown_and_never_run(record, tmp_path):
    folder = tmp_path / "job"
    (folder / "attempt-2" / "node-0.log").write_text(f"epoch 1\n{SCRIPT}\n")
    (folder / "results.csv").write_text(f"epoch,ap_{SCRIPT}_loss\n1,0.5\n2,0.25\n")
    (folder / "<img onerror=x>.png").write_bytes(b"")
    shown = Tags(page.write(record).read_text())
    assert not {"script", "iframe", "object", "link"} & set(shown.tags)
    assert not [name for name, _ in shown.attributes if name.startswith("on")]
    assert shown.text.count(SCRIPT) == 5  # command, detail, both attempts, log
    assert f"lossap_{SCRIPT} 0.25" in shown.text
    assert ("src", "%3Cimg%20onerror%3Dx%3E.png") in shown.attributes
    assert not [value for _, value in shown.attributes if value and ":" in value and "//" in value]
    assert [path.name for path in folder.glob("report*")] == ["report.html"]


def test_processes_may_write_the_report_at_the_same_time(record, tmp_path):
    JobStore(tmp_path).update(record)
    program = (
        "from pathlib import Path\nfrom cluster.store import JobStore\nfrom cluster.supervisor import page\n"
    )
    program += (
        f"record = JobStore(Path({str(tmp_path)!r})).load('job')\nfor _ in range(400): page.write(record)"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [(each.communicate()[1], each.returncode) for each in writers] == [("", 0)] * 2
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == ["attempt-2", "report.html"]


def test_attempts_have_their_nodes_times_and_causes(record):
    shown = Tags(page.render(replace(record, detail="rank 0: exit code 1")))
    assert f"attempt 1node-0, node-1, 30 s: rank 1: {SCRIPT}" in shown.text
    assert "attempt 2node-0, node-1, 1 h 06 min: rank 0: exit code 1" in shown.text
    assert [value for name, value in shown.attributes if name == "width"] == ["0.75", "99.20"]


def test_an_attempt_whose_failure_is_recorded_is_shown_once(record):
    failed = PastAttempt(
        2, ("node-0", "node-1"), 1032.0, 1090.0, "rank 0: exit code 1", (2, 7), is_program_error=True
    )
    shown = Tags(page.render(replace(record, history=(*record.history, failed))))
    assert shown.text.count("attempt 2") == 1
    assert "attempt 2node-0, node-1, 58 s: rank 0: exit code 1" in shown.text


def test_a_long_curve_keeps_its_extremes(record, tmp_path):
    rows = [f"{epoch},{0.5 if epoch != 77_777 else 9},nan" for epoch in range(100_000)]
    (tmp_path / "job" / "results.csv").write_text(
        "\n".join(["epoch,box_loss,obj_loss", *rows, "100000,", "x,1"])
    )
    text = page.render(record)
    assert len(text) < 30_000
    points = re.search('points="([^"]*)"', text)[1].split()
    assert 200 <= len(points) <= 400
    assert min(float(point.split(",")[1]) for point in points) == 6  # the top of the chart
    assert "box 0.5" in text
    assert "obj" not in text


def test_a_changed_table_of_results_is_read_again(record, tmp_path):
    path = tmp_path / "job" / "results.csv"
    for at, loss in enumerate(("0.5", "0.7")):  # of one size
        path.write_text(f"epoch,box_loss\n1,{loss}\n")
        os.utime(path, (at, at))
        assert f"box {loss}" in page.render(record)
    path.unlink()
    assert "<polyline" not in page.render(record)


@pytest.mark.parametrize(
    ("outcome", "failed", "expected"),
    [("failed", "node-1", ["node-1"]), ("failed", "", ["node-0"]), ("done", "", [])],
)
def test_the_log_of_the_node_that_failed_first_is_open(record, tmp_path, outcome, failed, expected):
    for node in ("node-0", "node-1"):
        (tmp_path / "job" / "attempt-2" / f"{node}.log").write_text("a line\n")
    view = None
    if failed:
        ends = [
            NodeStatus("node-0", "exited", 1, ended_at=1080.0),
            NodeStatus(failed, "exited", 1, ended_at=1070.0),
        ]
        view = job_state.fold(job_state.start(record.plan, 1032.0), ends, [], 1090.0)
    text = page.render(replace(record, outcome=outcome), view)
    assert re.findall(r"<details open><summary>(node-\d)", text) == expected
    assert len(re.findall(r"<details( open)?><summary>node-", text)) == 2


def test_only_the_end_of_a_log_is_in_the_page(record, tmp_path):
    path = tmp_path / "job" / "attempt-2" / "node-1.log"
    path.write_bytes(b"\xff\n" * 5 + b"".join(b"line %d\n" % number for number in range(100_000)))
    shown = Tags(page.render(record))
    assert "node-1: the last 200 lines" in shown.text
    assert "line 99999" in shown.text
    assert "line 99799\n" not in shown.text
    assert ("href", "attempt-2/node-1.log") in shown.attributes


def test_the_page_begins_with_what_its_reader_wants(record, tmp_path):
    folder = tmp_path / "job"
    for name in ("PR_curve.png", "predictions.jpg", "results.png"):
        (folder / name).write_bytes(b"")
    (folder / "attempt-2" / "node-0.log").write_text("epoch 1\n")
    (folder / "results.csv").write_text(
        "epoch,box_loss,map50,map,lr\n1,0.5,0.25,0.125,0.01\n2,0.25,nan,nan,0.01\n"
    )
    record = replace(record, outcome="done", detail="")
    view = job_state.start(record.plan, 1032.0)
    shown = Tags(page.render(record, view))
    titles = ("mAP50", "Predictions", "Curves", "Nodes", "Attempts", "Images", "Job", "Logs")
    assert sorted(titles, key=shown.text.index) == list(titles)
    assert "mAP500.250mAP50-950.125epoch2duration1 h 06 min" in shown.text  # the newest validation
    assert [value for name, value in shown.attributes if name == "src"] == ["predictions.jpg", "PR_curve.png"]
    view.metrics = [
        event({"event": "metric", "epoch": 2, "epochs": 7, "map50": float("nan"), "map": float("nan")})
    ]
    view.done = event({"event": "done", "map50": 0.75, "map": 0.5})
    assert "mAP500.750mAP50-950.500epoch2/7" in Tags(page.render(record, view)).text


def test_a_section_without_content_has_no_heading(record):
    shown = Tags(page.render(replace(record, history=(), detail="")))
    assert re.findall("<h2>([^<]*)", page.render(replace(record, history=()))) == ["Job"]
    assert "attempt" not in shown.text


def test_a_failure_has_the_lines_and_the_hint_of_the_terminal(record, tmp_path):
    (tmp_path / "job" / "attempt-2" / "node-1.log").write_text(f"[1] other\nallocating {SCRIPT}\n")
    failure = Failure("out of memory", 2, local_rank=0, time=100.0, hint="a smaller --batch")
    usage = Usage((RankUsage(0, 0.5, 1e9),))
    ends = [NodeStatus("node-0", "ready", usage=usage), NodeStatus("node-1", "exited", 1, failure=failure)]
    view = job_state.fold(job_state.start(record.plan, 1032.0), ends, [], 1090.0)
    text = Tags(page.render(record, view)).text
    assert f"hint: a smaller --batch  node-1 | allocating {SCRIPT}" in text
    assert "[1] other" not in text.partition("Nodes")[0]
    assert "node-0stoppednode-1exitedexit 1" in text  # and no use of the ranks, which have ended
    assert "host memory" not in text
    assert "hint:" not in Tags(page.render(replace(record, outcome="done"), view)).text


TAG = "\"><meta http-equiv='refresh'>"


class HostileFloat(float):
    """A number whose text is a tag."""

    def __str__(self):
        return TAG

    def __format__(self, spec):
        return TAG

    def __truediv__(self, other):
        return self

    def __rmul__(self, other):
        return self


class HostileInt(int):
    __str__ = HostileFloat.__str__
    __format__ = HostileFloat.__format__


def hostile(kind):
    """Return a value of a type in which all texts and numbers are tags."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return hostile(next(each for each in arguments if each is not types.NoneType))
    if origin is typing.Literal:
        return TAG
    if origin in (tuple, list):
        return origin([hostile(arguments[0])])
    if origin is collections.abc.Mapping:
        return dict.fromkeys([*page.SCORES, TAG], hostile(arguments[1]))
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{each.name: hostile(hints[each.name]) for each in fields(kind) if each.init})
    return {str: TAG, int: HostileInt(3), float: HostileFloat(1.5), bool: True}[kind]


@pytest.mark.parametrize("outcome", ["", "failed"])
def test_no_text_and_no_number_of_a_status_becomes_a_tag(record, outcome):
    view = replace(hostile(job_state.JobView), nodes=[replace(hostile(job_state.NodeView)) for _ in range(2)])
    if not outcome:
        view = replace(view, done=None)
    past = [{each.rank: each for node in view.nodes for each in node.status.usage.ranks}] * 3
    record = replace(record, outcome=outcome, detail=TAG, commit=TAG)
    shown = page.sections(record, page.Shown(TAG, TAG, TAG), view, 5000.0, is_live=True, past=past)
    assert shown.count("&lt;meta") >= 20
    wanted = {"use", "temperature", "rank", "memory"} if not outcome else set()
    assert all(f'aria-label="{name}: &#34;&gt;' in shown for name in wanted - {"rank"})
    for text in (shown, page.render(record, view)):
        assert "<meta http-equiv" not in text
        assert "http-equiv" not in dict(Tags(str(text)).attributes)


def test_plain_text_that_reaches_a_page_is_escaped():
    assert page.document("title", TAG, TAG).count("<meta ") == 2  # the document's own
    assert "<meta" not in page.wide_table([TAG], [[TAG, TAG]])
    assert "<meta" not in page.job_list([page.JobRow(*[TAG] * 8)])


def test_the_table_of_jobs_and_an_error_of_a_poll_are_escaped(record, tmp_path):
    store = JobStore(tmp_path)
    store.update(replace(record, outcome="failed", detail=TAG))
    (tmp_path / "<meta>.json").write_text("{")
    with server.Server(("localhost", 0), store, "token") as jobs, jobs.page() as seen:
        seen.wait(0, timeout_s=60)
        assert "&lt;meta http-equiv" in seen.body
        assert "<meta" not in seen.body

    def poll():
        raise ValueError(TAG)

    with live.LivePage(poll) as seen:
        seen.wait(0, timeout_s=60)
        assert "ValueError: &#34;&gt;&lt;meta" in seen.body
