"""Download of a dataset's archive, named by `download` in data.yaml: once per node; scripts are refused."""

import os
import re
import shutil
import tarfile
import uuid
import zipfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config.faults import BadData
from trainer.data.formats import archive as archives
from trainer.data.formats.data_yaml import SPLITS, Content, load_data_yaml, source_candidates
from trainer.data.progress import track
from trainer.distributed.machine_lock import one_per_machine
from trainer.errors import TrainerError
from trainer.weights.download import check_sha256, fetch


def fetch_missing(data_yaml: str) -> bool:
    """Fetch the archive in `download` if images are missing; return whether it was. An error leaves no files."""
    content = load_data_yaml(Path(data_yaml))
    root = content.root()
    entries = _entries(content)
    if not content.values.get("download") or _holds(root, entries):
        return False
    address = _address(content)
    expected = _sha256(content)
    with one_per_machine(root.absolute()) as waited:
        if _holds(root, entries):
            return True
        if waited:  # the other process has failed and printed its error; each attempt can take a minute
            raise TrainerError(f"{data_yaml}: another process of this node could not fetch the images")
        _provide(content, address, expected, root)
    return True


def _entries(content: Content) -> list[str]:
    return [entry for split in SPLITS for entry in content.entries(split) if isinstance(entry, str)]


def _holds(root: Path, entries: list[str]) -> bool:
    return all(any(path.exists() for path in source_candidates(root, entry)) for entry in entries)


def _address(content: Content) -> str:
    """Return the http(s) address or the path of a file; raise BadData for anything else, such as a script."""
    text = str(content.values["download"]).strip()
    if re.fullmatch(r"https?://\S+", text):
        return text
    path = content.path.parent / text
    if os.path.isfile(path):  # noqa: PTH113 (Path.is_file raises for a name as long as a script)
        return str(path)
    what = "`download` is neither an http address nor a file; scripts are never run"
    hint = "give the address of a .zip or .tar.gz, or fetch the images yourself and delete the line"
    raise BadData([content.fault("download", what, hint)])


def _sha256(content: Content) -> str:
    wanted = str(content.values.get("sha256") or "").lower()
    if wanted and not re.fullmatch("[0-9a-f]{64}", wanted):
        hint = "run `sha256sum ARCHIVE`; put a value of digits only in quotes"
        raise BadData([content.fault("sha256", "`sha256` must have 64 hexadecimal digits", hint)])
    return wanted


def _provide(content: Content, address: str, expected: str, root: Path) -> None:
    """Fetch, verify and unpack the archive on the disk of `root`, then move the files into `root`."""
    where = f"{content.path}:{content.lines['download']}"
    existing = next(path for path in (root, *root.absolute().parents) if path.is_dir())
    stage = existing / f".download-{uuid.uuid4().hex}"
    print(f"data: fetching {address}", flush=True)
    try:
        stage.mkdir()
        archive = stage / "archive"
        if address.startswith(("http://", "https://")):
            fetch(address, archive, expected, where, f"no network? unpack the archive to {root} by hand")
        else:
            archive = Path(address)
            if expected:
                check_sha256(archive, expected, f"{where}: {archive}", "correct `sha256` or replace the file")
        unpack(archive, stage / "files", f"{where}: {address}")
        origin = _origin(stage / "files", content, where)
        root.mkdir(parents=True, exist_ok=True)
        # Move the images last: other processes take a dataset with images as complete.
        named = {Path(entry.removeprefix("../")).parts[0] for entry in _entries(content)}
        for child in sorted(origin.iterdir(), key=lambda path: (path.name in named, path.name)):
            if not (root / child.name).exists():  # else it is the user's own, or another node was faster
                child.rename(root / child.name)
    except OSError as error:
        raise TrainerError(
            f"{where}: cannot write to {root}: {error}", "set `path` to a writable folder"
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    if not _holds(root, _entries(content)):
        what = f"{where}: {root} has only some of the archive's folders"
        raise TrainerError(what, "delete them, or unpack the archive by hand")
    print(f"data: unpacked to {root}", flush=True)


def unpack(archive: Path, folder: Path, named: str) -> None:
    """Unpack a .zip, .tar or .tar.gz into the new folder `folder`; an error calls the archive `named`.

    Of a tar, devices, and paths and links outside of the folder are refused. zipfile creates no links, and puts each
    path below the folder.
    """
    packed: Any
    try:
        with zipfile.ZipFile(archive) if zipfile.is_zipfile(archive) else tarfile.open(archive) as packed:
            folder.mkdir(parents=True)
            is_zip = isinstance(packed, zipfile.ZipFile)
            members = packed.infolist() if is_zip else packed.getmembers()
            extract = packed.extract if is_zip else partial(archives.extract, packed)
            for member in track(members, len(members), "unpacking"):
                extract(member, folder)
    except (
        zipfile.BadZipFile,
        tarfile.TarError,
        zlib.error,
        EOFError,
        RuntimeError,
        ValueError,
        OSError,
    ) as error:
        raise TrainerError(
            f"{named}: cannot be unpacked: {error}", "give a complete .zip or .tar.gz"
        ) from error


def _origin(files: Path, content: Content, where: str) -> Path:
    """Return the unpacked folder that corresponds to `path`: the archive's top, or a folder in it."""
    candidates = [files, *sorted(path for path in files.glob("*") if path.is_dir())]
    for candidate in candidates:
        if _holds(candidate, [entry for entry in _entries(content) if not Path(entry).is_absolute()]):
            return candidate
    found = ", ".join(sorted(path.name for path in files.glob("*"))[:8]) or "nothing"
    what = f"{where}: the archive has no {' and '.join(_entries(content))}, but {found}"
    raise TrainerError(
        what, "correct `train` and `val`: they are relative to the archive's top, or to a folder in it"
    )
