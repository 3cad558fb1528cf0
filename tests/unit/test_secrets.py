import pytest

from cluster.cli.launch import read_secrets, secret_values
from cluster.errors import UsageError


def test_values_of_a_file_are_read_unchanged(tmp_path):
    file = tmp_path / "tokens.env"
    file.write_text('# mine\nTOKEN=a\'b c=d\n\nexport QUOTED="x y"\nEMPTY=\n')
    assert read_secrets(str(file)) == {"TOKEN": "a'b c=d", "QUOTED": "x y", "EMPTY": ""}
    assert read_secrets("") == {}


def test_an_error_names_the_number_of_a_bad_line_not_its_text(tmp_path):
    file = tmp_path / "tokens.env"
    file.write_text("A=1\nhunter2\n")
    with pytest.raises(UsageError, match="line 2") as refused:
        read_secrets(str(file))
    assert "hunter2" not in refused.value.message + refused.value.hint


def test_values_come_from_the_file_or_the_environment(monkeypatch):
    monkeypatch.setenv("FROM_HERE", "here")
    monkeypatch.setenv("A", "of the environment, which the file overrides")
    monkeypatch.delenv("NOWHERE", raising=False)
    assert secret_values(["A", "FROM_HERE"], {"A": "1"}) == {"A": "1", "FROM_HERE": "here"}
    with pytest.raises(UsageError, match="--env NOWHERE: it is not set"):
        secret_values(["NOWHERE"], {})
