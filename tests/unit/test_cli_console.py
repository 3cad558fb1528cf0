import io
import re
import time
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from cluster.agent.app.node_agent.events import Progress
from cluster.backends import BACKENDS
from cluster.cli import display, main
from cluster.cli.console import console, print_line, print_log_line
from cluster.errors import UsageError, printable
from cluster.spec.model import Job
from cluster.spec.node_status import NodeStatus
from cluster.spec.status import Failure
from cluster.supervisor import job_state, notes

#: Sets the clipboard and the title, clears the screen, moves the cursor, and hides what follows; then C1 forms of it.
HOSTILE = (
    "a\x1b]52;c;cm0gLXJmIH4=\x07b\x1b]0;title\x1b\\c\x1b[2Jd\x1b[8me\x1b[1;1Hf\x1bP+q\x1b\\"
    "g\x1bch\x9b2Ji\x9d0;t\x9cj\rk\x08l\u202em"
)


def is_harmless(text: str) -> bool:
    """Return whether a terminal would only show a text, apart from the colours that clusterctl itself prints."""
    return not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", re.sub(r"\x1b\[[\d;]*m", "", text))


@pytest.mark.parametrize(("width", "has_bar"), [(80, False), (100, True), (140, True)])
def test_the_progress_of_a_job_fits_into_one_line(width: int, has_bar: bool) -> None:
    """80 columns are what a new terminal has."""
    last = Progress("progress", epoch=7, epochs=300, step=62, steps=100, loss=1.83, images_per_s=214)
    out = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    out.print(display.progress_line(replace(last, eta_s=33, run_eta_s=5263), width))
    (line,) = out.file.getvalue().splitlines()
    assert "epoch 7/300" in line
    assert "62 %" in line
    assert line.endswith("epoch ends in 0:33, run in 1:27:43")
    assert ("━" in line) == has_bar


def test_a_table_in_a_pipe_has_a_line_for_each_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table("job", "run directory", box=None)
    table.add_row("digits-2", "/home/ann/" + 30 * "folder/")
    console().print(table)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["job", "run", "directory"],
        ["digits-2", "/home/ann/" + 30 * "folder/"],
    ]


def test_a_printable_text_has_its_words_and_no_control_sequence() -> None:
    assert printable(HOSTILE) == "abcdefgchijklm"
    assert (
        printable("\x1b[31mred\x1b[0m line\n\tsecond \u2501 \u65e5\u672c")
        == "red line\n\tsecond \u2501 \u65e5\u672c"
    )
    assert printable("\x1b]52;c;unterminated\nnext") == "]52;c;unterminated\nnext"  # nothing is hidden


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_is_printed_on_a_console_cannot_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    monkeypatch.setattr(Console, "is_terminal", is_terminal)
    out = console()
    table = Table(HOSTILE, "note", **display.PLAIN)
    table.add_row(HOSTILE, HOSTILE)
    out.print(table)
    out.print(HOSTILE)
    print_line(out, HOSTILE, "[red]not markup[/nor this]", style="bold red")
    shown = capsys.readouterr().out
    assert is_harmless(shown)
    assert "abcdefgchijklm" in shown
    assert "[red]not markup[/nor this]" in shown
    print_log_line(out, "\x1b[31mred\x1b[0m")
    assert capsys.readouterr().out == "\x1b[31mred\x1b[0m\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_display_of_a_job_cannot_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    monkeypatch.setattr(Console, "is_terminal", is_terminal)
    plan = BACKENDS["local"].plan(Job("job", ("train.py",), 2, 1, "/runs"), attempt=1, port=20000)
    view = job_state.start(plan, time.time())
    failure = Failure(HOSTILE, 0, hint=HOSTILE)
    with display.LiveDisplay(console(), plan, all_nodes=True) as live:
        for status in (
            NodeStatus("node-0", "starting", detail=HOSTILE),
            NodeStatus("node-0", "lost", silent=HOSTILE),
        ):
            nodes = [status, replace(status, node="node-1", phase="exited", exit_code=1, failure=failure)]
            live.show(job_state.fold(view, nodes, [], time.time()), [("node-0", "a log line")])
        live.note(HOSTILE)
    shown = capsys.readouterr().out
    assert "a log line" in shown
    moves = r"\x1b\[(?:\?25[lh]|2K|1A)|\r"  # of the live display itself
    assert is_harmless(re.sub(moves, "", shown) if is_terminal else shown)


def test_an_error_cannot_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: str) -> None:
        raise UsageError(f"n0: ssh: {HOSTILE}", HOSTILE)

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit, match="2"):
        main.run()
    assert capsys.readouterr().err == "error: n0: ssh: abcdefgchijklm\nhint: abcdefgchijklm\n"


def test_notes_that_a_job_has_changed_cannot_control_the_terminal(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plan = BACKENDS["local"].plan(Job("job", ("train.py",), 1, 1, str(tmp_path)), attempt=1, port=20000)
    (tmp_path / "job").mkdir()
    notes.add(plan, HOSTILE)
    with notes.path(plan).open("a") as file:
        file.write(f"{HOSTILE}\n")
    lines = notes.Reader(plan).lines()
    assert all(is_harmless(line) for line in lines)
    assert lines[0].endswith("abcdefgchij klm")
    assert "\x1b" not in notes.path(plan).read_text().splitlines()[0]
