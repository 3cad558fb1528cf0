"""Extraction of hostile tar archives, by the launcher and by the trainer."""

import functools
import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

import cluster.transport.archive
import trainer.data.formats.archive

HALVES = [cluster.transport.archive, trainer.data.formats.archive]


def test_both_halves_have_the_same_function():
    first, second = (Path(half.__file__).read_text() for half in HALVES)
    assert first == second


@pytest.fixture(params=HALVES, ids=["cluster", "trainer"])
def extract(request, tmp_path):
    """Extracts (name, type, link or content, mode) members to the folder `top`, and returns what was refused."""

    def run(*members):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name, kind, text, *mode in members:
                member = tarfile.TarInfo(name)
                member.type = kind
                member.mode = mode[0] if mode else 0o644
                if kind == tarfile.REGTYPE:
                    member.size = len(text)
                    archive.addfile(member, io.BytesIO(text.encode()))
                else:
                    member.linkname = text
                    archive.addfile(member)
        packed.seek(0)
        (tmp_path / "top").mkdir(exist_ok=True)
        refused = []
        with tarfile.open(fileobj=packed, mode="r|") as archive:
            for member in archive:
                try:
                    request.param.extract(archive, member, tmp_path / "top")
                except request.param.RefusedError:
                    refused.append(member.name)
        return refused

    return run


FILE = tarfile.REGTYPE
FOLDER = tarfile.DIRTYPE
LINK = tarfile.SYMTYPE
HARD_LINK = tarfile.LNKTYPE


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
def test_files_folders_and_links_within_the_folder_are_extracted(extract, tmp_path, mask, request):
    request.addfinalizer(functools.partial(os.umask, os.umask(mask)))
    top = tmp_path / "top"
    members = [
        ("./a", FOLDER, ""),
        ("./a/file", FILE, "text", 0o7777),
        ("./a/again", HARD_LINK, "./a/file"),
        ("b/link", LINK, "../a/file"),
        ("/absolute", FILE, "below the folder"),
        ("a/file", FILE, "newer", 0o400),
    ]
    assert extract(*members) == []
    assert (top / "a/file").read_text() == "newer"
    assert (top / "a/again").read_text() == "text"
    assert str((top / "b/link").readlink()) == "../a/file"
    assert (top / "absolute").read_text() == "below the folder"
    assert stat.S_IMODE((top / "a/again").stat().st_mode) == 0o775 & ~mask
    assert stat.S_IMODE((top / "a/file").stat().st_mode) == 0o600
    assert sorted(path.name for path in top.rglob("*")) == ["a", "absolute", "again", "b", "file", "link"]


@pytest.mark.parametrize(
    ("members", "refused"),
    [
        ([("../x", FILE, "x")], ["../x"]),
        ([("a/../../x", FILE, "x")], ["a/../../x"]),
        ([("../x", FOLDER, "")], ["../x"]),
        ([("out", LINK, ".."), ("out/x", FILE, "x")], ["out"]),
        ([("out", LINK, "{away}"), ("out/x", FILE, "x")], ["out"]),
        # Each link alone stays inside; b/.. is outside once b is a link to the top.
        ([("a", LINK, "b/.."), ("b", LINK, "."), ("a/x", FILE, "x")], ["a"]),
        ([("d/e", FOLDER, ""), ("b", LINK, "d/e"), ("a", LINK, "b/../.."), ("a/x", FILE, "x")], ["a"]),
        ([("there/x", FILE, "x")], ["there/x"]),
        ([("there/x", FOLDER, "")], ["there/x"]),
        ([("x", HARD_LINK, "../away/private")], ["x"]),
        ([("x", HARD_LINK, "there/private")], ["x"]),
        ([("x", tarfile.FIFOTYPE, "")], ["x"]),
        ([("x", tarfile.CHRTYPE, "")], ["x"]),
    ],
)
def test_nothing_is_written_outside_of_the_folder(extract, tmp_path, members, refused):
    """`there` was a link to a folder outside before the extraction."""
    away = tmp_path / "away"
    top = tmp_path / "top"
    away.mkdir()
    top.mkdir()
    (away / "private").write_text("private")
    (top / "there").symlink_to(away)
    assert extract(*((name, kind, text.format(away=away)) for name, kind, text in members)) == refused
    assert [path.name for path in away.iterdir()] == ["private"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["away", "top"]
    private = (away / "private").stat()
    assert private.st_nlink == 1
    links = [path for path in top.rglob("*") if path.is_symlink() and path != top / "there"]
    assert all(path.resolve().is_relative_to(top) for path in links)
