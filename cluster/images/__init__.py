"""The same image on every node: which nodes lack which of its layers, and how those get there.

An engine can use a layer only on top of the very layers that it was built on. So a node lacks those above the longest
run of layers, from the lowest on, that any image there has. `docker load` takes an archive without the layers that it
has: what is sent is the image's configuration and the missing layers, each read and compressed once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cluster import fanout
from cluster.errors import ClusterError, LaunchError, UsageError
from cluster.images import engine, layer
from cluster.images.compare import chain_ids, file_name, head, missing
from cluster.images.delivery import Blob, Show, SourceError, folder_here, send
from cluster.images.engine import HERE, Engine
from cluster.model import Node
from cluster.rsync import interruptible, require_rsync
from cluster.runtimes.containers import short_id
from cluster.shells import reach

#: Room needed on a node as a multiple of the unpacked layers: the engine first copies what it is given.
_ROOM = 1.5
#: The share that compression leaves of a layer: an estimate until it is compressed.
_RATIO = 0.5
_NAME = re.compile(r"[A-Za-z0-9][\w.:/-]*")


@dataclass(frozen=True)
class Pushed:
    """What a push did for one node: `sent` bytes over the wire, as `missing` of its `layers` layers, in `seconds`.

    These are 0 where the image was there already. `size` is the image's, unpacked, in bytes. `whole`: an engine, here
    or there, handles only whole images.
    """

    id: str
    size: int
    layers: int
    missing: int = 0
    sent: int = 0
    seconds: float = 0.0
    compression: str = ""
    whole: bool = False


def push(nodes: Sequence[Node], image: str, show: Show) -> dict[str, Pushed]:
    """Give every node the image that this machine has; returns what that took, by node.

    Nothing is sent unless all nodes can take it; when sending fails for some, the others still get theirs. Raises
    ClusterError that names the nodes. Interrupted, it leaves on them only parts, from which the next push goes on.
    """
    refuse_name(image)
    here = engine.look(HERE, image)
    if not here.id:
        raise UsageError(f"this machine: no image {image}", "make image   (or name one that is there: --image NAME)")
    seen = fanout.all_of(nodes, lambda node: engine.look(node, image))
    lacking = [node for node in nodes if seen[node.name].id != here.id]
    done = {node.name: Pushed(here.id, here.size, len(here.layers)) for node in nodes}
    if lacking:
        try:
            layers = _Layers.of(here) if here.takes_layers else None
            done |= _Push(image, here, seen, layers, show).to(lacking)
        except SourceError as error:
            show.note(f"this machine: the layers cannot be read one by one ({error}): sending the whole image")
            done |= _Push(image, here, seen, None, show).to(lacking)
    return done


@dataclass(frozen=True)
class _Layers:
    """An image's layers in this machine's engine: their unpacked `sizes` in bytes, and the command that prints one."""

    config: str
    sizes: tuple[int, ...]
    chains: tuple[str, ...]
    program: tuple[str, ...]

    @classmethod
    def of(cls, here: Engine) -> _Layers:
        """Raises SourceError: another storage driver, no rights, no Python in the image."""
        text = Path(layer.__file__).read_text(encoding="utf-8")
        chains = tuple(chain_ids(here.layers))
        if os.geteuid() == 0 and Path(here.root, "image", here.driver, "layerdb").is_dir():
            program: tuple[str, ...] = (sys.executable, "-c", text, here.root, here.driver)
        else:  # whoever may use the engine may do this
            mount = f"type=bind,source={here.root},target=/engine,readonly"
            as_root = ("--rm", "--init", "--network", "none", "--user", "0:0", "--mount", mount)
            program = (
                "docker",
                "run",
                *as_root,
                "--entrypoint",
                "python3",
                here.id,
                "-c",
                text,
                "/engine",
                here.driver,
            )
        answer = reach(HERE).run([*program, "image", here.id, *chains], timeout_s=120)
        if answer.code:
            raise SourceError(answer.last_line)
        about = json.loads(answer.out)
        return cls(about["config"], tuple(about["sizes"]), chains, program)


@dataclass
class _Push:
    """One image on its way to nodes that lack it: as layers where `layers` are given and the node takes them."""

    image: str
    here: Engine
    seen: Mapping[str, Engine]
    layers: _Layers | None
    show: Show

    def to(self, nodes: Sequence[Node]) -> dict[str, Pushed]:
        """Raises ClusterError, and SourceError when this machine's engine does not give what it should."""
        fanout.together({node.name: self._refusal(node) for node in nodes})
        require_rsync()
        zstd = shutil.which("zstd") is not None and all(self.seen[node.name].takes_zstd for node in nodes)
        files = {node.name: self._files(node, zstd) for node in nodes}
        arrived = fanout.all_of(nodes, engine.arrived)
        began, unwanted = time.monotonic(), threading.Event()

        def one(node: Node) -> Pushed:
            count, total = self._missing(node), len(self.here.layers)
            what = "the whole image" if count is None else f"{count} of {total} layers"
            self.show.note(f"{node.name}: to send: {what}")
            folder, complete = arrived[node.name]
            sent = send(node, folder, [blobs[name] for name in files[node.name] if name not in complete], self.show)
            self.show.note(f"{node.name}: all there; the engine unpacks it")
            begin = b""
            if count is not None and self.layers is not None:
                begin = head(self.layers.config, self.image, self.here.layers, _ending(zstd))
            became = engine.load(node, self.image, files[node.name], begin)
            if became != self.here.id:
                raise LaunchError(
                    f"{node.name}: {self.image} is {short_id(became)} there and {short_id(self.here.id)} here"
                )
            return Pushed(
                id=became,
                size=self.here.size,
                layers=total,
                missing=total if count is None else count,
                sent=sent,
                seconds=time.monotonic() - began,
                compression="zstd" if zstd else "gzip",
                whole=count is None,
            )

        with folder_here() as here, ThreadPoolExecutor(1) as background:
            blobs = self._blobs(here, zstd, unwanted)
            wanted = dict.fromkeys(
                name for node in nodes for name in files[node.name] if name not in arrived[node.name][1]
            )
            for name in wanted:
                blobs[name].made = background.submit(blobs[name].make)
            try:
                return interruptible(lambda: fanout.all_of(nodes, one))
            finally:
                unwanted.set()
                background.shutdown(cancel_futures=True)

    def _missing(self, node: Node) -> int | None:
        """How many layers the node lacks; None when it must be given the whole image."""
        if self.layers is None or not self.seen[node.name].takes_layers:
            return None
        return missing(self.here.layers, self.seen[node.name].held)

    def _files(self, node: Node, zstd: bool) -> list[str]:
        """What the node must be sent, by the names of the files."""
        count = self._missing(node)
        if count is None:
            return [f"whole-{file_name(self.here.id, _ending(zstd))}"]
        lacks = self.here.layers[len(self.here.layers) - count :]
        return list(dict.fromkeys(file_name(digest, _ending(zstd)) for digest in lacks))

    def _blobs(self, folder: Path, zstd: bool, unwanted: threading.Event) -> dict[str, Blob]:
        """Everything that any node may need, by file name."""
        packer = ("zstd", "-q", "-3", "-T0", "-c") if zstd else ("gzip", "-n", "-1", "-c")
        name = f"whole-{file_name(self.here.id, _ending(zstd))}"
        sources: dict[str, tuple[int, tuple[str, ...], str]]
        sources = {name: (self.here.size, (self.here.program, "save", self.image), "")}
        if self.layers is not None:
            for digest, size, chain in zip(self.here.layers, self.layers.sizes, self.layers.chains, strict=True):
                name = file_name(digest, _ending(zstd))
                sources[name] = (size, (*self.layers.program, "layer", chain), digest)
        return {
            name: Blob(folder / name, int(_RATIO * size), source, packer, digest, unwanted)
            for name, (size, source, digest) in sources.items()
        }

    def _refusal(self, node: Node) -> ClusterError | None:
        """Why the node cannot take the image."""
        here, there = self.here, self.seen[node.name]
        if there.platform != here.platform:
            return UsageError(
                f"{node.name}: the image is for {here.platform}, the machine is {there.platform}",
                "build the image on such a machine, and push it from there",
            )
        if there.containerd != here.containerd:
            where = "there, but not here" if there.containerd else "here, but not there"
            return UsageError(
                f"{node.name}: the engine keeps images in containerd's store {where}: one image has two ids",
                'the same "features": {"containerd-snapshotter": ...} in both /etc/docker/daemon.json',
            )
        count = self._missing(node)
        size = here.size
        if count is not None and self.layers is not None:
            size = sum(self.layers.sizes[len(self.layers.sizes) - count :])
        if there.free is not None and there.free < _ROOM * size:
            need = f"the image needs {_ROOM * size / 1e9:.1f} GB there"
            return LaunchError(
                f"{node.name}: {there.root} has {there.free / 1e9:.1f} GB free: {need}",
                f"make room, for example there: {there.program} image prune",
            )
        return None


def _ending(zstd: bool) -> str:
    return "zst" if zstd else "gz"


def refuse_name(image: str) -> None:
    """Raise UsageError for what is no image's name."""
    if not _NAME.fullmatch(image):
        raise UsageError(f"--image {image!r}: not an image's name", "for example: --image trainer:0.1")
