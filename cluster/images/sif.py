"""A Docker image of this machine as one SIF file on a cluster's common disk, made there by Apptainer."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cluster import quoting, readiness, resources
from cluster.errors import ClusterError, LaunchError, UsageError
from cluster.model import Node
from cluster.shells import reach

_CHUNK = 1 << 20
#: Unpacking and packing 6 GB takes minutes, on a busy disk many.
_BUILD_TIMEOUT_S = 3600.0


def make(node: Node, image: str, target: str, sent: Callable[[int, int], None]) -> None:
    """Send the image to the node and make the SIF file there; it is whole or not there.

    `sent` hears how many of about how many bytes have gone. Raises UsageError without the image, LaunchError with what
    Apptainer says.
    """
    about = _about(image)
    words = [target, variables(about["Config"]["Env"] or []), runscript(about["Config"])]
    size = int(about["Size"])
    with (
        _files(image) as files,
        reach(node).stream(["bash", "-c", resources.text("images/sif.sh"), "sif", *words]) as there,
    ):
        done = 0
        try:
            for chunk in files:
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


def variables(pairs: Sequence[str]) -> str:
    """The script that sets an image's variables, `NAME=value` each."""
    values = dict(pair.split("=", 1) for pair in pairs)
    return f"#!/bin/sh\n{quoting.exports(values)}\n"


def runscript(config: Mapping[str, Any]) -> str:
    """The script that does what a container of the image does with its arguments: entry point, else they alone."""
    text = "#!/bin/sh\n"
    if command := config.get("Cmd"):
        text += f"[ $# -gt 0 ] || set -- {quoting.line(command)}\n"
    return text + f'exec {quoting.line(config.get("Entrypoint") or [])} "$@"\n'


@contextlib.contextmanager
def _files(image: str) -> Iterator[Iterator[bytes]]:
    """All files of the image, as one tar in pieces."""
    made = subprocess.run(["docker", "create", image, "true"], capture_output=True, text=True, check=False)
    if made.returncode:
        raise ClusterError(f"this machine: docker create: {made.stderr.strip()}", "docker info")
    container = made.stdout.strip()
    export = subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def pieces() -> Iterator[bytes]:
        assert export.stdout is not None
        while chunk := os.read(export.stdout.fileno(), _CHUNK):
            yield chunk
        _, said = export.communicate()
        if export.returncode:
            raise ClusterError(f"this machine: docker export: {said.decode(errors='replace').strip()}", "docker info")

    try:
        yield pieces()
    finally:
        export.kill()
        export.communicate()
        subprocess.run(["docker", "rm", "--force", container], capture_output=True, check=False)


def _about(image: str) -> dict[str, Any]:
    """What the engine of this machine knows of the image."""
    try:
        found = subprocess.run(["docker", "image", "inspect", image], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UsageError("this machine: there is no docker to take the image from", "make engine") from None
    if found.returncode:
        raise UsageError(f"this machine: no image {image}", "make image   (or name one that is there: --image NAME)")
    about: dict[str, Any] = json.loads(found.stdout)[0]
    return about
