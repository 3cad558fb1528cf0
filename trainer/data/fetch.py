"""Fetches the pictures of a data.yaml that names an archive of them: once per machine, unpacked, never run."""

from __future__ import annotations

import contextlib
import re
import shutil
import urllib.parse
import uuid
from pathlib import Path

from trainer.data.archive import unpack
from trainer.data.data_yaml import Content, load_data_yaml, places
from trainer.data.faults import BadData
from trainer.errors import TrainerError
from trainer.machine_lock import one_per_machine
from trainer.weights.download import fetch, sha256

_SPLITS = ("train", "val")
_SCRIPT = re.compile(r"^.*\n|^(ba)?sh\b|\bpython|\bimport\b|\w+\(|[;|&]")


def fetch_missing(data_yaml: str) -> bool:
    """Fetch the archive that `download:` names, if pictures are missing and there is one; whether it was fetched.

    Raises TrainerError where it cannot be had; then nothing is left behind.
    """
    content = load_data_yaml(Path(data_yaml))
    if not content.values.get("download") or _is_there(content):
        return False
    address, wanted = _address(content), _sha256(content)
    root = next((root for root in content.roots() if root.is_dir()), content.roots()[0])
    with one_per_machine(root.absolute()) as waited:
        if _is_there(content):
            return True
        if waited:  # and it failed there: said once is enough, and each try can take a minute
            raise TrainerError(f"{data_yaml}: another process of this machine could not fetch the pictures")
        _provide(content, address, wanted, root)
    return True


def _entries(content: Content) -> list[str]:
    return [entry for split in _SPLITS for entry in content.entries(split) if isinstance(entry, str)]


def _is_there(content: Content) -> bool:
    root = next((root for root in content.roots() if root.is_dir()), None)
    return root is not None and _holds(root, _entries(content))


def _holds(root: Path, entries: list[str]) -> bool:
    return all(any(place.exists() for place in places(root, entry)) for entry in entries)


def _address(content: Content) -> str:
    """An http(s) address or the path of a file; BadData for anything else, such as a script."""
    value = content.values["download"]
    text = value.strip() if isinstance(value, str) else ""
    hint = "give the address of a .zip or .tar.gz, or fetch the pictures yourself and delete the line"
    if urllib.parse.urlsplit(text).scheme in ("http", "https") and not re.search(r"\s", text):
        return text
    if urllib.parse.urlsplit(text).scheme == "file":
        text = urllib.parse.unquote(urllib.parse.urlsplit(text).path)
    path = content.path.parent / text
    if text and path.is_file():
        return str(path)
    if script := _SCRIPT.search(text):
        why = "several lines" if "\n" in script[0] else f"`{script[0]}` in it"
        what = f"`download` is a script ({why}), and scripts are never run"
        raise BadData([content.fault("download", what, hint)])
    raise BadData([content.fault("download", f"`download` is neither an http address nor a file: {path}", hint)])


def _sha256(content: Content) -> str:
    wanted = str(content.values.get("sha256") or "").lower()
    if wanted and not re.fullmatch("[0-9a-f]{64}", wanted):
        hint = "see: sha256sum ARCHIVE; in quotes if it has digits only"
        raise BadData([content.fault("sha256", "`sha256` must have 64 hexadecimal digits", hint)])
    return wanted


def _provide(content: Content, address: str, wanted: str, root: Path) -> None:
    """Fetch, check, unpack next to where the pictures belong (on the same disk), and move them there."""
    asked = f"{content.path}:{content.lines['download']}"
    existing = next(place for place in (root, *root.absolute().parents) if place.is_dir())
    stage = existing / f".download-{uuid.uuid4().hex}"
    print(f"data: fetching {address}", flush=True)
    try:
        try:
            stage.mkdir()
        except OSError as error:
            raise TrainerError(
                f"{asked}: cannot write to {existing}: {error.strerror}", "set `path` to a folder of yours"
            ) from None
        archive = stage / "archive"
        if address.startswith(("http://", "https://")):
            fetch(address, archive, wanted, asked, f"no network? unpack the archive to {root} by hand")
        else:
            archive = Path(address)
            if wanted and (found := sha256(archive)) != wanted:
                raise TrainerError(f"{asked}: {archive} has sha256 {found}, not {wanted}", "is it the right file?")
        unpack(archive, stage / "files", f"{asked}: {address}")
        origin = _origin(stage / "files", content, asked)
        try:
            root.mkdir(parents=True, exist_ok=True)
            # What else the archive holds comes first: once the pictures are there, the set is complete.
            named = {Path(entry.removeprefix("../")).parts[0] for entry in _entries(content)}
            for child in sorted(origin.iterdir(), key=lambda path: (path.name in named, path.name)):
                _move(child, root / child.name)
        except OSError as error:
            raise TrainerError(
                f"{asked}: cannot write to {root}: {error}", "set `path` to a folder of yours"
            ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    print(f"data: unpacked to {root}", flush=True)


def _origin(files: Path, content: Content, asked: str) -> Path:
    """The unpacked folder that stands for `path`: the archive's top, or a folder in it."""
    candidates = [files, *sorted(path for path in files.glob("*") if path.is_dir())]
    for candidate in candidates:
        if _holds(candidate, [entry for entry in _entries(content) if not Path(entry).is_absolute()]):
            return candidate
    found = ", ".join(sorted(path.name for path in files.glob("*"))[:8]) or "nothing"
    raise TrainerError(
        f"{asked}: the archive has no {' and '.join(_entries(content))}, but {found}",
        "correct `train` and `val`: they count from the archive's top, or from a folder in it",
    )


def _move(source: Path, target: Path) -> None:
    """Rename `source`, or fill up what is at `target` already; no file that is there is replaced."""
    if not target.exists():
        with contextlib.suppress(OSError):  # another machine was quicker
            source.rename(target)
            return
    if source.is_dir() and target.is_dir():
        for child in sorted(source.iterdir()):
            _move(child, target / child.name)
    elif not target.exists():
        raise OSError(f"{target} cannot be made")
