"""Downloads: weights by name or URL, once per node, into the node's cache folder in a job, else into the user's.

pooch finds the same failures (a missing file, a connection that ends or falls silent), but would replace only the 20
lines of `fetch` that transfer the file, and bring seven packages (6.6 MB) into the container image. The lock between
ranks, the mirror, the two cache folders and the hints would stay.
"""

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
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainer import cache_folders
from trainer.distributed.machine_lock import one_per_machine
from trainer.errors import TrainerError

_YOLOV5 = "https://github.com/ultralytics/yolov5/releases/download/v7.0"
_ASSETS = "https://github.com/ultralytics/assets/releases/download"
# The smallest network of each family, and the folder of all its sizes.
_FAMILIES = {
    "yolov5n.pt": _YOLOV5,
    "yolov5n6.pt": _YOLOV5,
    "yolov8n.pt": f"{_ASSETS}/v8.3.0",
    "yolo11n.pt": f"{_ASSETS}/v8.3.0",
    "yolo26n.pt": f"{_ASSETS}/v8.4.0",
}
RELEASES = {name.replace("n", size): folder for name, folder in _FAMILIES.items() for size in "nsmlx"}
RELEASED = f"{', '.join(_FAMILIES)}, and s, m, l and x instead of n"  # for messages
MIRROR = "CLUSTERCTL_WEIGHTS_URL"  # environment variable: URL of a mirror
TIMEOUT_S = 20.0  # to connect, and between two reads
CHUNK = 1 << 20
_ANOTHER_FILE = "is it the right file?"


def locate(weights: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the local file of `weights`: a path, the name of a release file (yolov5s.pt), or an http(s) URL.

    A suffix `#sha256=...` is verified. Raise TrainerError, and leave no partial file.
    """
    source, mark, wanted = weights.partition("#sha256=")
    wanted = wanted.lower()
    if mark and not re.fullmatch("[0-9a-f]{64}", wanted):
        raise TrainerError(
            f"--weights {weights}: a sha256 has 64 hexadecimal digits", f"see: sha256sum {source}"
        )
    address, target = _address_and_target(weights, source, environment)
    if address:
        with one_per_machine(target.absolute()) as waited:
            if waited and not target.is_file():
                raise TrainerError(f"--weights {weights}: another process of this machine could not fetch it")
            if not target.is_file():
                _fetch_and_report(weights, address, target, wanted, environment)
    if wanted and target.is_file():
        hint = _ANOTHER_FILE
        if address:
            hint = "correct the sum, or remove a damaged file: it is downloaded again"
        check_sha256(target, wanted, f"--weights {weights}: {target}", hint)
    return target


def _address_and_target(weights: str, source: str, environment: Mapping[str, str]) -> tuple[str, Path]:
    """Return the URL of `source` and its file in the cache; for a path, "" and the path."""
    if source.startswith(("http://", "https://")):
        name = urllib.parse.unquote(source.partition("?")[0].rpartition("/")[2])
        if not name:
            raise TrainerError(f"--weights {weights}: the address names no file")
        # Two URLs can end in the same file name.
        folder = hashlib.sha256(source.encode()).hexdigest()[:12]
        return source, _cached(f"{folder}/{name}", environment)
    if source in RELEASES and not Path(source).exists():
        address = f"{environment.get(MIRROR) or RELEASES[source]}/{source}"
        return address, _cached(source, environment)
    return "", Path(source)


def _fetch_and_report(
    weights: str, address: str, target: Path, wanted: str, environment: Mapping[str, str]
) -> None:
    print(f"weights: fetching {address}", flush=True)
    by_hand = f"put the file there by hand: {target}"
    if not cache_folders.of_node(environment):
        by_hand += "; XDG_CACHE_HOME selects another folder"
    digest = fetch(address, target, wanted, f"--weights {weights}", by_hand)
    print(f"weights: {target} ({target.stat().st_size / 1e6:.1f} MB, sha256 {digest})", flush=True)


def _cached(name: str, environment: Mapping[str, str]) -> Path:
    """Return the path of a file that is in a cache folder, or where to download it.

    An image may bring the file in its user's cache folder.
    """
    paths = [cache_folders.of_user(environment) / "clusterctl" / "weights" / name]
    if of_node := cache_folders.of_node(environment):
        paths.insert(0, of_node / "weights" / name)
    return next((path for path in paths if path.is_file()), paths[0])


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name next to `path`. Its file replaces `path` at the end, or vanishes after an error.

    The name is random, because containers that share a folder have equal pids.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def fetch(address: str, target: Path, wanted: str, option: str, by_hand: str) -> str:
    """Download an http(s) URL to the file `target` atomically; return its SHA-256.

    Raise TrainerError if the download fails or the digest is not `wanted` ("": any). `option` starts the message, and
    `by_hand` is the hint for a machine without network.
    """
    from rich.console import Console
    from rich.progress import wrap_file

    console = Console(stderr=True)
    hidden = not console.is_terminal
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer, temporary.open("wb") as file:
                size = int(answer.headers.get("Content-Length") or 0)
                with wrap_file(
                    answer, size, description="", console=console, transient=True, disable=hidden
                ) as source:
                    shutil.copyfileobj(source, file, CHUNK)
                if size and file.tell() != size:
                    raise OSError(f"the connection ended after {file.tell()} of {size} bytes")
                file.flush()
                os.fsync(file.fileno())
            return check_sha256(temporary, wanted, f"{option}: not kept: {address}", _ANOTHER_FILE)
    except urllib.error.HTTPError as error:
        error.close()
        raise TrainerError(f"{option}: {address}: {error.code} {error.reason}", by_hand) from error
    except (OSError, ValueError, http.client.HTTPException) as error:  # no route, a full disk, a bad URL
        reason = getattr(error, "reason", None) or error
        raise TrainerError(f"{option}: {address}: cannot be fetched: {reason}", by_hand) from error


def check_sha256(path: Path, wanted: str, named: str, hint: str) -> str:
    """Return the SHA-256 of a file, called `named` in errors; raise TrainerError if it is not `wanted` ("": any)."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise TrainerError(f"{path}: cannot be read: {error.strerror}") from error
    if wanted not in ("", found := digest.hexdigest()):
        raise TrainerError(f"{named} has sha256 {found}, not {wanted}", hint)
    return found
