"""Push of a container image to nodes: sends only the layers that a node lacks.

An engine can use a layer only on top of its original parents. A node therefore lacks the layers above the longest
common prefix with any of its images. `docker load` accepts an archive without the layers that the engine has. The push
sends the image's configuration and the missing layers, each compressed once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from pathlib import Path
from subprocess import DEVNULL, PIPE

from cluster.errors import ClusterError, LaunchError, UnreachableError, UsageError
from cluster.images import engine, layer
from cluster.images.engine import HERE, Engine
from cluster.runtimes import short_id
from cluster.spec.model import Machine
from cluster.transport import parallel, reach
from cluster.transport.files import Report
from cluster.transport.process import interruptible, started
from cluster.transport.rsync import Rsync, at, error_of, require_rsync

#: Estimated compression ratio of a layer.
_RATIO = 0.5
#: The parent of the folder of compressed layers, which may be too large for /tmp.
_TEMPORARY = os.environ.get("TMPDIR", "/var/tmp")
_NAME = re.compile(r"[A-Za-z0-9][\w.:/-]*")


@dataclass(frozen=True)
class Pushed:
    """Result of a push for one node: the image's id, its unpacked `size` in bytes and number of `layers`.

    `missing` layers were sent, `sent` bytes over the network. `seconds` is 0 if the node already had the image.
    """

    id: str
    size: int
    layers: int
    missing: int = 0
    sent: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Layers:
    """Layers of an image in this machine's engine: unpacked `sizes` in bytes, and the command that prints a layer."""

    config: str
    sizes: tuple[int, ...]
    chains: tuple[str, ...]
    program: tuple[str, ...]

    @classmethod
    def of(cls, here: Engine) -> Layers:
        """Read the layers. Raise ClusterError without permission, or without Python in the image."""
        text = Path(layer.__file__).read_text(encoding="utf-8")
        chains = tuple(chain_ids(here.layers))
        if os.geteuid() == 0 and Path(here.root, "image", here.driver, "layerdb").is_dir():
            program: tuple[str, ...] = (sys.executable, "-c", text, here.root, here.driver)
        else:  # the permission to use the engine is enough
            mount = f"type=bind,source={here.root},target=/engine,readonly"
            run = (here.program, "run", "--rm", "--init", "--network=none", "--user=0:0", f"--mount={mount}")
            program = (*run, "--entrypoint", "python3", here.id, "-c", text, "/engine", here.driver)
        answer = reach(HERE).run([*program, "image", here.id, *chains], timeout_s=120)
        if answer.code:
            raise ClusterError(answer.last_line)
        about = json.loads(answer.out)
        return cls(about["config"], tuple(about["sizes"]), chains, program)


def push(
    nodes: Sequence[Machine], image: str, note: Callable[[str], None], report: Report
) -> dict[str, Pushed | ClusterError]:
    """Send this machine's image to every node, and return the result or the error of each.

    Nothing is sent unless all nodes can take the image. If sending to one node fails, the others still get the image.
    After an interruption the next push resumes the partial transfers. Raise ClusterError for errors of this machine.
    `note` receives lines of text.
    """
    refuse_name(image)
    here = engine.local(image)
    answers = parallel.each(nodes, lambda node: _inspect(node, image, here))
    if failed := _nothing_sent(answers):
        return failed
    seen = parallel.together(answers)
    lacking = [node for node in nodes if seen[node.name].id != here.id]
    done: dict[str, Pushed | ClusterError] = {
        node.name: Pushed(here.id, here.size, len(here.layers)) for node in nodes
    }
    if not lacking:
        return done
    require_rsync()
    if not os.access(_TEMPORARY, os.W_OK):
        raise UsageError(
            f"this machine: {_TEMPORARY} cannot be written", "set TMPDIR to a folder with free space"
        )
    made = parallel.each(lacking, engine.make_folder)
    if failed := _nothing_sent(made):
        return failed
    layers = None
    if here.takes_layers and all(seen[node.name].takes_layers for node in lacking):
        try:
            layers = Layers.of(here)
        except ClusterError as error:
            note(f"this machine: cannot read single layers ({error.message}): sending the whole image")
    held = {node.name: seen[node.name].held if layers else () for node in lacking}
    counts = {name: missing(here.layers, theirs) for name, theirs in held.items()}
    ending = "zst" if shutil.which("zstd") and all(seen[node.name].takes_zstd for node in lacking) else "gz"
    return done | send_missing(
        image, here, layers, ending, counts, parallel.together(made), lacking, note, report
    )


def send_missing(
    image: str,
    here: Engine,
    layers: Layers | None,
    ending: str,
    counts: Mapping[str, int],
    folders: Mapping[str, str],
    nodes: Sequence[Machine],
    note: Callable[[str], None],
    report: Report,
) -> dict[str, Pushed | ClusterError]:
    """Send each node its missing layers, or the whole image if `layers` is None, and load the image there.

    `ending` is the compression, zst or gz. `counts` are the numbers of missing layers, and `folders` the folders for
    received files, by node name.
    """
    total = len(here.layers)
    start = time.monotonic()
    packer = ("zstd", "-q", "-3", "-T0", "-c") if ending == "zst" else ("gzip", "-n", "-1", "-c")
    #: The name of each file, its unpacked size, and the command that prints it.
    sources: list[tuple[str, int, Sequence[str]]]
    manifest = ""
    config = ""
    if layers is None:
        sources = [(f"whole-{file_name(here.id, ending)}", here.size, (here.program, "save", image))]
    else:
        stored = [file_name(digest, ending) for digest in here.layers]
        manifest = json.dumps([{"Config": "config.json", "RepoTags": [image], "Layers": stored}])
        config = layers.config
        sources = [
            (name, size, (*layers.program, "layer", chain))
            for name, size, chain in zip(stored, layers.sizes, layers.chains, strict=True)
        ]

    def names(count: int) -> list[str]:
        wanted = sources[total - count :] if layers else sources
        return list(dict.fromkeys(name for name, *_ in wanted))

    with (
        tempfile.TemporaryDirectory(prefix="clusterctl-", dir=_TEMPORARY) as folder,
        ThreadPoolExecutor(1) as background,
    ):
        blobs = {}
        for name, size, argv in sources:
            blobs[name] = Blob(Path(folder, name), int(_RATIO * size), argv, packer)
        for name in names(max(counts.values())):
            blobs[name].made = background.submit(blobs[name].make)

        def one(node: Machine) -> Pushed:
            count = counts[node.name]
            files = names(count)
            note(f"{node.name}: sending {count} of {total} layers")
            sent = send(node, folders[node.name], [blobs[name] for name in files], report)
            note(f"{node.name}: transfer complete; the engine unpacks the image")
            loaded_id = engine.load(node, image, files, manifest, config)
            if loaded_id != here.id:
                why = f"{image} is {short_id(loaded_id)}, but on this machine it is {short_id(here.id)}"
                raise LaunchError(f"{node.name}: {why}", "clusterctl image push")
            return Pushed(here.id, here.size, total, count, sent, time.monotonic() - start)

        try:
            return interruptible(lambda: parallel.each(nodes, one))
        finally:
            background.shutdown(cancel_futures=True)


@dataclass
class Blob:
    """A file to send: the output of `source | packer`. `size` in bytes is an estimate until the file is complete."""

    file: Path
    size: int
    source: Sequence[str]
    packer: Sequence[str]
    made: Future[None] = field(default_factory=Future)

    def make(self) -> None:
        """Write the file. Raise ClusterError."""
        with (
            self.file.open("wb") as packed,
            tempfile.TemporaryFile() as errors,
            started(self.source, stdin=DEVNULL, stdout=PIPE, stderr=errors) as source,
            started(self.packer, stdin=source.stdout, stdout=packed, stderr=errors) as packer,
        ):
            assert source.stdout
            source.stdout.close()  # the source ends with SIGPIPE if the packer ends
            failed = packer.wait(), source.wait()
            errors.seek(0)
            stderr = errors.read().decode(errors="replace")
        if failed[0]:
            raise error_of(f"this machine: {self.file.parent} cannot be written", stderr)
        if failed[1]:
            why = (stderr.strip().splitlines() or [f"{self.source[0]}: exit {failed[1]}"])[-1]
            raise ClusterError(f"this machine: a layer cannot be read: {why}", "docker info")
        self.size = self.file.stat().st_size


def send(node: Machine, folder: str, blobs: Sequence[Blob], report: Report) -> int:
    """Send files into a folder of the node, each once it is compressed, and return the bytes over the network.

    The next call resumes a partial file. Raise ClusterError.
    """
    moved = 0
    before = 0

    def sent(now: int) -> None:
        report(node.name, "sending", before + now, sum(blob.size for blob in blobs))

    for blob in blobs:
        blob.made.result()
        run = Rsync(node, ["--", str(blob.file), f"{at(node)}{folder}/"], sent=sent)
        run(f"{node.name}: {folder} cannot be written", f"this machine: {blob.file} cannot be read")
        moved += run.moved
        before += blob.size
    return moved


def _inspect(node: Machine, image: str, here: Engine) -> Engine:
    """Return the facts of the node's engine. Raise ClusterError if it cannot take the image."""
    there = engine.inspect(node, image)
    if there.platform != here.platform:
        hint = "build the image on a machine of that architecture, and push it from there"
        raise UsageError(
            f"{node.name}: the image is for {here.platform}, but the machine is {there.platform}", hint
        )
    if there.containerd != here.containerd:
        where = "there, but not here" if there.containerd else "here, but not there"
        why = f"{node.name}: the engine keeps images in containerd's store {where}: one image has two ids"
        hint = 'the same "features": {"containerd-snapshotter": ...} in both /etc/docker/daemon.json'
        raise UsageError(why, hint)
    return there


def _nothing_sent(answers: Mapping[str, object]) -> dict[str, Pushed | ClusterError]:
    """Return an error for every node if any node has one, else an empty dict."""
    failed = {name: answer for name, answer in answers.items() if isinstance(answer, ClusterError)}
    names = ", ".join(failed)
    return {
        name: failed.get(name) or UnreachableError(f"{name}: nothing was sent, because of {names}")
        for name in (answers if failed else ())
    }


def refuse_name(image: str) -> None:
    """Raise UsageError for an invalid image name."""
    if not _NAME.fullmatch(image):
        raise UsageError(f"--image {image!r}: not an image's name", "for example: --image trainer:0.1")


def missing(layers: Sequence[str], held: Iterable[Sequence[str]]) -> int:
    """Return how many of the last `layers` an engine lacks; `held` has the layers of its images (diff ids)."""

    def shared(other: Sequence[str]) -> int:
        return len([*takewhile(lambda pair: pair[0] == pair[1], zip(layers, other, strict=False))])

    return len(layers) - max(map(shared, held), default=0)


def chain_ids(layers: Sequence[str]) -> list[str]:
    """Return the chain id of each layer (OCI image-spec, "Layer ChainID")."""
    digest = hashlib.sha256
    return list(
        accumulate(layers, lambda chain, diff: f"sha256:{digest(f'{chain} {diff}'.encode()).hexdigest()}")
    )


def file_name(digest: str, ending: str) -> str:
    """Return the file name of a layer in the cache and in an archive."""
    return f"{digest.removeprefix('sha256:')}.{ending}"
