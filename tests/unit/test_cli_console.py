import pytest
from rich.table import Table

from cluster.cli.console import console


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
