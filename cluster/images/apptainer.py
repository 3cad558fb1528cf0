"""SIF file of a Docker image: sends the image's files to a login node, where Apptainer builds the file."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from subprocess import PIPE
from typing import Any

from cluster.agent import scripts
from cluster.errors import ClusterError, LaunchError
from cluster.images import engine
from cluster.spec.model import Machine
from cluster.transport import reach
from cluster.transport.files import Report
from cluster.transport.process import piped, started

_CHUNK = 1 << 20
#: A build of 6 GB takes minutes, or longer on a busy disk.
_BUILD_TIMEOUT_S = 3600.0


def make(node: Machine, image: str, target: str, report: Report) -> None:
    """Build the image's SIF file on the node, atomically. Raise UsageError if this machine lacks it, or LaunchError."""
    here = engine.local(image)
    config = json.loads(_run(here.program, "image", "inspect", "--format", "{{json .Config}}", image))
    values = {"environment": variables(config.get("Env") or []), "runscript": runscript(config)}
    container = _run(here.program, "create", image, "true")
    try:
        with (
            started([here.program, "export", container], stdout=PIPE) as export,
            piped(node, scripts.bash("images/sif.sh", target=target, size=here.size, **values)) as there,
        ):
            assert export.stdout is not None
            done = 0
            try:
                while chunk := export.stdout.read(_CHUNK):
                    there.stdin.write(chunk)
                    done += len(chunk)
                    report(node.name, "sending", done, max(here.size, done))
                if export.wait():
                    raise ClusterError(f"this machine: {here.program} export failed", f"{here.program} info")
            except OSError:  # the build ended; its error is reported below
                export.kill()
            with suppress(OSError):
                there.stdin.close()
            ended = there.wait(_BUILD_TIMEOUT_S)
    finally:
        reach(engine.HERE).run([here.program, "rm", "--force", container])
    if ended.code:
        raise LaunchError(
            f"{node.name}: apptainer build: {ended.last_line}", "df -h there; or another TARGET"
        )


def variables(pairs: Sequence[str]) -> str:
    """Return the script that sets the image's variables (`NAME=value` each)."""
    values = dict(pair.split("=", 1) for pair in pairs)
    return f"#!/bin/sh\n{scripts.exports(values)}\n"


def runscript(config: Mapping[str, Any]) -> str:
    """Return the script that runs the image's entry point with the arguments, by default the image's command."""
    text = "#!/bin/sh\n"
    if command := config.get("Cmd"):
        text += f"[ $# -gt 0 ] || set -- {scripts.line(command)}\n"
    return text + f'exec {scripts.line(config.get("Entrypoint") or [])} "$@"\n'


def _run(*words: str) -> str:
    """Return the output of a command of this machine's engine."""
    done = reach(engine.HERE).run(words, timeout_s=120)
    if done.code:
        raise ClusterError(f"this machine: {words[0]} {words[1]}: {done.last_line}", f"{words[0]} info")
    return done.out.strip()
