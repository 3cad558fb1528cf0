"""Finds weights that are given by name or by address, fetching them once per node into the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import re
import secrets
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from trainer.errors import TrainerError
from trainer.machine_lock import one_per_machine

RELEASE = "https://github.com/ultralytics/yolov5/releases/download/v7.0"
MIRROR = "CLUSTERCTL_WEIGHTS_URL"  # an address that has the same files, in the environment
NAMES = tuple(f"yolov5{size}{p6}.pt" for p6 in ("", "6") for size in "nsmlx")
TIMEOUT_S = 20.0  # to connect, and without a byte
CHUNK = 1 << 20


def locate(weights: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The local file of `weights`: a path, the name of a release file (yolov5s.pt), or an http(s) address.

    `#sha256=...` behind any of them is checked. Without it the first fetch is trusted: its sum is kept beside the
    file (yolov5s.pt.sha256) and checked at every use. Raises TrainerError, and leaves no partial file.
    """
    place, mark, wanted = weights.partition("#sha256=")
    wanted = wanted.lower()
    if mark and not re.fullmatch("[0-9a-f]{64}", wanted):
        raise TrainerError(f"--weights {weights}: a sha256 has 64 hexadecimal digits", f"see: sha256sum {place}")
    if not place.startswith(("http://", "https://")):
        if Path(place).exists() or place not in NAMES:
            if mark and Path(place).is_file():
                _check(Path(place), wanted, weights)
            return Path(place)
        address, folder = f"{environment.get(MIRROR) or RELEASE}/{place}", ""
    else:
        # Two addresses can end in the same name.
        address, folder = place, hashlib.sha256(place.encode()).hexdigest()[:12]
    try:
        name = Path(urllib.parse.unquote(urllib.parse.urlsplit(address).path)).name
    except ValueError as error:
        raise TrainerError(f"--weights {weights}: not an address: {error}") from error
    if not name:
        raise TrainerError(f"--weights {weights}: the address names no file")
    target = cache(environment) / folder / name
    with one_per_machine(target.absolute()) as waited:
        if not target.is_file():
            if waited:
                raise TrainerError(f"--weights {weights}: another process of this machine could not fetch it")
            _fetch(address, target, wanted, weights)
        _check(target, wanted or _recorded(target), weights)
    return target


def cache(environment: Mapping[str, str]) -> Path:
    """The folder for what was fetched: clusterctl/weights in the user's cache folder."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clusterctl" / "weights"


def _fetch(address: str, target: Path, wanted: str, weights: str) -> None:
    print(f"weights: fetching {address}", flush=True)
    by_hand = f"put the file there by hand: {target}; XDG_CACHE_HOME selects another folder"
    found = fetch(address, target, wanted, f"--weights {weights}", by_hand)
    _record(target, found)
    print(f"weights: {target} ({target.stat().st_size / 1e6:.1f} MB, sha256 {found})", flush=True)


def partial(path: Path) -> Path:
    """Where a file is written until it is whole: random, as containers that share a folder have equal pids."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def fetch(address: str, target: Path, wanted: str, asked: str, by_hand: str) -> str:
    """Fetch an http(s) address to the file `target`, whole or not at all; returns its sha256.

    TrainerError if it cannot be had or is not the one with the sha256 `wanted` ("": any); the message begins with
    what `asked` for it, and `by_hand` is the hint where there is no network.
    """
    from rich.console import Console
    from rich.progress import wrap_file

    temporary, console = partial(target), Console(stderr=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer, temporary.open("wb") as file:
            size = int(answer.headers.get("Content-Length") or 0)
            shown = console.is_terminal
            with wrap_file(answer, size, description="", console=console, transient=True, disable=not shown) as source:
                shutil.copyfileobj(source, file, CHUNK)
            if size and file.tell() != size:
                raise OSError(f"the connection ended after {file.tell()} of {size} bytes")
            file.flush()
            os.fsync(file.fileno())
        found = sha256(temporary)
        if wanted and found != wanted:
            raise TrainerError(
                f"{asked}: {address} has sha256 {found}, not {wanted}: not kept", "is it the right file?"
            )
        temporary.replace(target)
        return found
    except urllib.error.HTTPError as error:
        error.close()
        raise TrainerError(f"{asked}: {address}: {error.code} {error.reason}", by_hand) from error
    except (OSError, ValueError, http.client.HTTPException) as error:  # no route, a full disk, a bad URL
        reason = getattr(error, "reason", None) or error
        raise TrainerError(f"{asked}: {address}: cannot be fetched: {reason}", by_hand) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _sum_file(target: Path) -> Path:
    return target.with_name(f"{target.name}.sha256")


def _record(target: Path, found: str) -> None:
    """Keep a sum beside the file, in the format that `sha256sum --check` reads."""
    path = _sum_file(target)
    temporary = partial(path)
    temporary.write_text(f"{found}  {target.name}\n", encoding="ascii")
    temporary.replace(path)


def _recorded(target: Path) -> str:
    """The sum that was kept; for a file that was put there by hand, the one it has now."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (_sum_file(target).read_text(encoding="ascii").split() or [""])[0]
    _record(target, found := sha256(target))
    return found


def _check(path: Path, wanted: str, weights: str) -> None:
    found = sha256(path)
    if found != wanted:
        raise TrainerError(
            f"--weights {weights}: {path} has sha256 {found}, not {wanted}",
            f"if it may have been damaged: rm {path} {_sum_file(path)}, then it is fetched again",
        )


def sha256(path: Path) -> str:
    """The SHA-256 of a file as hexadecimal digits; TrainerError if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise TrainerError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()
