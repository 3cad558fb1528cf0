import pytest

from cluster import secrets
from cluster.errors import UsageError


def test_a_file_of_secrets_is_read_as_it_is(tmp_path):
    file = tmp_path / "tokens.env"
    file.write_text('# mine\nTOKEN=a\'b c=d\n\nexport QUOTED="x y"\nEMPTY=\n')
    assert secrets.read(str(file)) == {"TOKEN": "a'b c=d", "QUOTED": "x y", "EMPTY": ""}
    assert secrets.read("") == {}


def test_a_bad_line_is_named_by_its_number_and_not_by_its_text(tmp_path):
    file = tmp_path / "tokens.env"
    file.write_text("A=1\nhunter2\n")
    with pytest.raises(UsageError, match="line 2") as refused:
        secrets.read(str(file))
    assert "hunter2" not in refused.value.message + refused.value.hint


def test_values_come_from_the_file_or_the_environment_or_are_missed(monkeypatch):
    monkeypatch.setenv("FROM_HERE", "here")
    monkeypatch.setenv("A", "of the environment, which the file overrides")
    monkeypatch.delenv("NOWHERE", raising=False)
    assert secrets.values(["A", "FROM_HERE"], {"A": "1"}) == {"A": "1", "FROM_HERE": "here"}
    with pytest.raises(UsageError, match="--env NOWHERE: it is not set"):
        secrets.values(["NOWHERE"], {})
