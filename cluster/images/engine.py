"""Container engine of a node: its facts, its images and their layers, and the loading of an image."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.agent import scripts
from cluster.errors import ClusterError, LaunchError, UnreachableError, UsageError
from cluster.runtimes import ARCHITECTURES, DOCKER, ENGINES, RUNTIMES
from cluster.spec.image import how_to_get
from cluster.spec.model import Machine, this_machine
from cluster.transport import reach
from cluster.transport.process import started
from cluster.transport.rsync import no_rsync, reason

#: Exit code of engine.sh on a machine without rsync.
_NO_RSYNC = 4
#: This machine, as a node without a login.
HERE = this_machine()


@dataclass(frozen=True)
class Engine:
    """Facts of an engine and of one image in it: `id` ("": not there), `size` in bytes, and `layers`.

    `held` has the layers of every image in the engine. Layers are diff ids, lowest first.
    """

    program: str
    version: tuple[int, ...]
    platform: str
    root: str = ""
    driver: str = ""
    containerd: bool = False
    id: str = ""
    size: int = 0
    layers: tuple[str, ...] = ()
    held: tuple[tuple[str, ...], ...] = ()

    @property
    def takes_layers(self) -> bool:
        """Whether single layers can be read from the engine, and loaded: not with Podman or other storage drivers."""
        return self.driver == "overlay2" and not self.containerd

    @property
    def takes_zstd(self) -> bool:
        """Whether the engine unpacks zstd. Every engine unpacks gzip."""
        return self.version >= ENGINES[self.program].zstd_since


def inspect(node: Machine, image: str) -> Engine:
    """Return the facts of the node's engine. Raise UnreachableError if it does not answer."""
    answer = reach(node).run(_script("inspect", node, image=image), timeout_s=120)
    if answer.code:
        raise _no_answer(node, answer.last_line)
    held = [tuple(json.loads(layers) or ()) for layers in answer.by_word.get("layers", ())]
    facts = {key: rest for key, (rest, *_) in answer.by_word.items()}
    image_id, size, layers = facts.get("image", " 0 []").split(" ", 2)
    driver, _, status = facts.get("driver", "").partition(" ")
    system, _, machine = facts["platform"].partition("/")
    return Engine(
        program=facts["engine"],
        version=tuple(int(number) for number in re.findall(r"\d+", facts["version"])[:3]),
        platform=f"{system}/{ARCHITECTURES.get(machine, machine)}",
        root=facts["root"],
        driver=driver,
        containerd="io.containerd" in status,
        id=_full(image_id),
        size=int(size),
        layers=tuple(json.loads(layers) or ()),
        held=tuple(held),
    )


def local(image: str) -> Engine:
    """Return the facts of this machine's engine. Raise UsageError if it lacks the image."""
    here = inspect(HERE, image)
    if not here.id:
        raise UsageError(f"this machine has no image {image}", how_to_get(image, here.program))
    return here


def make_folder(node: Machine) -> str:
    """Create the node's folder for the files of a push, and return it. Raise ClusterError."""
    answer = reach(node).run(_script("folder", node))
    if answer.code == _NO_RSYNC:
        raise no_rsync(node.name)
    if answer.code:
        why = f"{node.name}: ~/.cache/clusterctl cannot be written: {reason(answer.err)}"
        raise LaunchError(why, f"on {node.name}: ls -ld ~/.cache; df -h ~/.cache")
    return answer.out.strip()


def load(node: Machine, image: str, files: Sequence[str], manifest: str, config: str) -> str:
    """Load an image from files, remove them, and return its id. Raise LaunchError.

    Without a `manifest` the file is an archive; else the files are layers, and `config` is the configuration (JSON).
    """
    done = reach(node).run(
        _script("load", node, *files, image=image, manifest=manifest), stdin=config, timeout_s=3600
    )
    if done.code:
        raise LaunchError(
            f"{node.name}: the image cannot be loaded: {done.last_line}", f"on {node.name}: docker info"
        )
    return _full(done.out.strip())


def build(folder: str, image: str) -> None:
    """Build an image on this machine with docker, whose progress goes to stderr. Raises UsageError or LaunchError."""
    if not Path(folder, "Dockerfile").is_file():
        raise UsageError(
            f"--build {folder}: no Dockerfile",
            f"the full path would be {Path(folder, 'Dockerfile').absolute()}",
        )
    try:
        with started([DOCKER.name, "build", "--tag", image, folder], stdout=sys.stderr) as process:
            code = process.wait()
    except UnreachableError as error:
        raise UsageError(f"--build {folder}: {error.message}", "install Docker, or use --image") from error
    if code:
        raise LaunchError(f"--build {folder}: docker build failed with exit code {code}")


def _script(operation: str, node: Machine, *files: str, **values: str) -> list[str]:
    # Of several, engine.sh chooses one.
    known = [ENGINES[node.runtime]] if node.runtime in ENGINES else [*ENGINES.values()]
    if node is not HERE and node.runtime and not RUNTIMES[node.runtime].engine:
        hint = (
            RUNTIMES[node.runtime].image_command()
            or f"to use an image, in cluster.yaml: runtime: {DOCKER.name}"
        )
        raise UsageError(f"{node.name}: runtime {node.runtime} has no engine that keeps images", hint)
    engines = [word for engine in known for word in (engine.name, *engine.image_facts)]
    return scripts.bash("images/engine.sh", operation, *files, engines=engines, **values)


def _no_answer(node: Machine, message: str) -> ClusterError:
    if "permission denied" in message.lower():
        hint = 'there: sudo usermod -aG docker "$USER", then log in again'
    elif message.startswith("no program"):
        hint = (
            "make engine, in a clone of the repository"
            if node is HERE
            else "install Docker Engine there, or podman"
        )
    else:
        hint = (
            "docker info"
            if node is HERE
            else f"there: docker info   (or: clusterctl doctor --only {node.name})"
        )
    return UnreachableError(f"{node.name}: no engine answers: {message}", hint)


def _full(image_id: str) -> str:
    """Return the id with its digest algorithm, which podman omits."""
    return f"sha256:{image_id.removeprefix('sha256:')}" if image_id else ""
