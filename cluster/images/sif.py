"""A Docker image of this machine as one SIF file on a cluster's common disk, made there by Apptainer."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable

from cluster import readiness
from cluster.errors import ClusterError, LaunchError, UsageError
from cluster.model import Node
from cluster.shells import reach

_CHUNK = 1 << 20
#: Unpacking and packing 6 GB takes minutes, on a busy disk many.
_BUILD_TIMEOUT_S = 3600.0

# The archive comes as input; what is unfinished stands beside the target, on the same disk, and goes whatever happens.
_MAKE = r"""
set -e -o pipefail
command -v apptainer >/dev/null || { echo "there is no apptainer" >&2; exit 3; }
mkdir -p -- "$(dirname -- "$1")"
work=$(mktemp -d -- "$1.XXXXXX")
trap 'rm -rf -- "$work"' EXIT
cat > "$work/image.tar"
options=()
if mksquashfs -help 2>&1 | grep -q zstd; then options=(--mksquashfs-args "-comp zstd -Xcompression-level 3"); fi
APPTAINER_TMPDIR="$work" APPTAINER_CACHEDIR="$work/cache" \
    apptainer --silent build "${options[@]}" "$work/image.sif" "docker-archive:$work/image.tar" >&2
mv -f -- "$work/image.sif" "$1"
"""


def make(node: Node, image: str, target: str, sent: Callable[[int, int], None]) -> None:
    """Send the image to the node and make the SIF file there; it is whole or not there.

    `sent` hears how many of about how many bytes have gone. Raises UsageError without the image, LaunchError with what
    Apptainer says.
    """
    size = _size(image)
    with (
        contextlib.closing(_archive(image)) as archive,
        reach(node).stream(["bash", "-c", _MAKE, "sif", target]) as there,
    ):
        done = 0
        try:
            for chunk in archive:
                there.stdin.write(chunk)
                done += len(chunk)
                sent(done, max(size, done))
            there.stdin.close()
        except OSError:  # it has ended, and says why below
            with contextlib.suppress(OSError):
                there.stdin.close()
        ended = there.wait(_BUILD_TIMEOUT_S)
    if ended.code:
        raise LaunchError(
            f"{readiness.place(node)}: apptainer build: {ended.last_line}", "df -h there; or another TARGET"
        )


class _archive:
    """`docker save`, in pieces."""

    def __init__(self, image: str) -> None:
        self._process = subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def __iter__(self) -> _archive:
        return self

    def __next__(self) -> bytes:
        assert self._process.stdout is not None
        if chunk := os.read(self._process.stdout.fileno(), _CHUNK):
            return chunk
        _, said = self._process.communicate()
        if self._process.returncode:
            raise ClusterError(f"this machine: docker save: {said.decode(errors='replace').strip()}", "docker info")
        raise StopIteration

    def close(self) -> None:
        """End it, also in the middle."""
        self._process.kill()
        self._process.communicate()


def _size(image: str) -> int:
    try:
        found = subprocess.run(
            ["docker", "image", "inspect", "--format", "{{.Size}}", image], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise UsageError("this machine: there is no docker to take the image from", "make engine") from None
    if found.returncode:
        raise UsageError(f"this machine: no image {image}", "make image   (or name one that is there: --image NAME)")
    return int(found.stdout)
