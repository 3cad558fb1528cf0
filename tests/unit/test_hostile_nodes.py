"""Events and status files that a node has altered, through everything that shows a job. Nothing may raise."""

import copy
import io
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from cluster.backends import BACKENDS, logs
from cluster.cli import display
from cluster.contract import EVENT_MARK
from cluster.spec import node_status, status
from cluster.spec.model import Job, JobRecord
from cluster.supervisor import job_state, page, report, restarts
from cluster.web import metrics

#: Lines and status files of a real job.
REPORTED = Path(__file__).with_name("reported.txt").read_text().splitlines()
NOW = 1795878320.0
#: What takes the place of a value, as it stands in the JSON.
VALUES = (
    *(
        "9" * 400,
        "-" + "9" * 400,
        "9" * 30,
        "1e308",
        "-1e308",
        "1e400",
        "-1",
        "0",
        "0.5",
        "1e-320",
        "null",
        "true",
    ),
    *(
        "Infinity",
        "-Infinity",
        "NaN",
        '""',
        '"1 of 3"',
        '"exited"',
        '"\\ud800"',
        '"\\u001b]52;c;eA==\\u0007"',
    ),
    *("[]", "{}", "[{}]", "[[]]", "[1,null]", '{"rank":0}', '"' + "x" * 9000 + '"', "[" * 600 + "]" * 600),
)
#: The state that a poll finds beside the status file.
STATES = ("alive", "exit 0 1795878320.5", "exit 1 x", "exit", f"exit {'9' * 400} inf", "gone", "no folder")


def places(value):
    """Yield each (container, key) in a JSON value."""
    for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(each, dict | list):
            yield from places(each)


def altered(text, chance):
    """Return JSON in which some values have changed, vanished or moved, or some bytes."""
    if chance.random() < 0.15:
        data = bytearray(text.encode())
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        return bytes(data[: chance.choice((len(data), chance.randrange(len(data))))]).decode(errors="replace")
    value = json.loads(text)
    raw = {}
    for number in range(chance.randint(1, 3)):
        container, key = chance.choice([*places(value)] or [(value, "x")])
        if chance.random() < 0.2 and container:
            del container[key]
        else:
            raw[f'"@{number}"'] = chance.choice(VALUES)
            container[key] = f"@{number}"
    made = json.dumps(value, separators=(",", ":"))
    for mark, each in raw.items():
        made = made.replace(mark, each)
    return made


class Screens:
    """All that shows the state of a job, here of two nodes that have joined."""

    def __init__(self, folder):
        job = Job("job", ("x.py",), 2, 2, str(folder), max_restarts=1)
        self.plan = BACKENDS["local"].plan(job, attempt=1, port=20000)
        Path(self.plan.attempt_dir).mkdir(parents=True)
        self.record = JobRecord(self.plan, NOW - 60, job)
        self.joined = job_state.start(self.plan, NOW - 60)
        self.fold(
            self.joined, [f'{EVENT_MARK}{{"event":"ready","node":{rank}}}' for rank in (0, 1)], ["{}", "{}"]
        )

    def fold(self, view, lines, files, states=("alive", "alive")):
        names = [node.name for node in self.plan.nodes]
        found = [
            node_status.from_agent(*each)
            for each in zip(names, map(status.parse, files), states, strict=True)
        ]
        events = [each for line in lines if (each := logs.event(line))]
        return job_state.fold(
            view, found, [*events, *(event for each in found for event in each.events)], NOW
        )

    def show(self, lines, files, states):
        """Draw everything after one poll, and return the text."""
        view = self.fold(copy.deepcopy(self.joined), lines, files, states)
        verdict = job_state.judge(view, NOW + 1, 60, 30, 5)
        tails = {node.name: ["a line"] for node in self.plan.nodes}
        words = [report.exit_code(view, verdict), restarts.failure(view, verdict)]
        words += [report.cause(view, each) for each in {verdict, "stalled", "late"}]
        words += [*report.last_lines(view, verdict, tails), report.done(view, self.plan, "/", NOW)]
        words += [report.overdue(node) for node in view.nodes]
        restarts.refusal(self.record.job, view, verdict, [words[1]])
        used = [node.status.usage for node in view.nodes if node.status.usage]
        events = [each for each in (view.progress, view.metric, view.done) if each]
        json.dumps([each.as_json() for each in (*used, *events)], allow_nan=False)
        ranks = {rank.rank: rank for usage in used for rank in usage.ranks}
        words.append(
            page.sections(
                self.record, page.Shown("running", "running"), view, NOW, is_live=True, past=[ranks, ranks]
            )
        )
        ended = JobRecord(self.plan, NOW - 60, self.record.job, outcome="failed", ended_at=NOW)
        words.append(page.render(ended, view))
        running = SimpleNamespace(state="running", since=NOW, last_state="")
        words.append(metrics.render([SimpleNamespace(record=self.record, view=view, status=running)]))
        self.draw(view)
        text = "\n".join(map(str, words))
        assert text.encode()
        assert "\x1b" not in text
        return text

    def draw(self, view):
        """Draw what the terminal shows."""
        out = Console(file=io.StringIO(), width=100, force_terminal=True)
        usage = display.UsageTable()
        usage.add(view)
        usage.spark("images_per_s")
        out.print(
            usage.table(view), usage.table(view, by_rank=False), display.node_table(view, self.plan, NOW)
        )
        out.print(display.joined(view, self.plan), markup=False)
        if view.progress:
            out.print(display.progress_line(view.progress, 100))


@pytest.fixture
def screens(tmp_path):
    return Screens(tmp_path)


def test_altered_events_and_status_files_raise_nowhere(screens):
    """Ten thousand of them, eight to a poll."""
    chance = random.Random(48)
    lines = [line.removeprefix(EVENT_MARK) for line in REPORTED if line.startswith(EVENT_MARK)]
    files = [line for line in REPORTED if not line.startswith(EVENT_MARK)]
    for _ in range(1250):
        events = [EVENT_MARK + altered(chance.choice(lines), chance) for _ in range(6)]
        found = [altered(chance.choice(files), chance) for _ in range(2)]
        states = [chance.choice(STATES) if chance.random() < 0.3 else "alive" for _ in range(2)]
        try:
            screens.show(events, found, states)
        except Exception as error:
            raise AssertionError(f"{error!r} of {events} {found} {states}") from error


def test_the_lines_as_they_were_are_shown(screens):
    events = [line for line in REPORTED if line.startswith(EVENT_MARK) and '"done"' not in line]
    text = screens.show(events, [REPORTED[-2], "{}"], ("alive", "alive"))
    for words in ("epoch 1/2, step 6/63", "97 %", "1.1/85.9 GB", "mAP50", "61 °C", "rank 1"):
        assert words in text, text


#: What once raised, and where: the launcher, `ps` of all jobs, the display, the restart, `top`, the report, the page.
PROGRESS = '{"event":"progress","node":0,"epoch":1,"epochs":3,"step":1,"steps":10,"loss":1,"images_per_s":1,"eta_s":1}'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param('"node":0', f'"node":0,"time":{"9" * 400}', id="time"),
        *(pytest.param('"eta_s":1', f'"eta_s":{value}', id=value) for value in ("Infinity", "NaN", "1e400")),
        pytest.param('"epoch":1', '"epoch":"1 of 3"', id="epoch"),
        pytest.param(',"images_per_s":1', "", id="images_per_s"),
        pytest.param('"steps":10', '"steps":Infinity', id="steps"),
        pytest.param(PROGRESS, f'{{"event":"metric","node":0,"epoch":1,"map50":{"9" * 400}}}', id="metric"),
        pytest.param(PROGRESS, f'{{"event":"metric","node":0,"epoch":1,"box_loss":{"9" * 400}}}', id="curve"),
        pytest.param(PROGRESS, '{"event":"metric","node":0,"epoch":1,"box_loss":-1e30}', id="negative"),
    ],
)
def test_a_line_that_once_ended_a_command_is_shown(screens, old, new):
    screens.show([EVENT_MARK + PROGRESS.replace(old, new)], ["{}", "{}"], ("alive", "alive"))


@pytest.mark.parametrize(
    "file",
    [
        '{"phase":"running","stall":[{}]}',
        '{"phase":"exited"}',
        '{"phase":"running","usage":{"ranks":[{}]}}',
        '{"phase":"running","usage":{"ranks":[{"rank":0,"cpu":1,"rss":1}]}}',
        '{"phase":"exited","exit_code":1,"ended_at":1,"failure":{"rank":0}}',
        '{"phase":"running","heartbeat":"now"}',
    ],
)
def test_a_status_file_that_once_ended_a_command_is_shown(screens, file):
    screens.show([EVENT_MARK + PROGRESS], [file, file], ("alive", "alive"))
