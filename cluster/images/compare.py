"""What an engine lacks of an image, and the archive that brings it: pure."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from itertools import accumulate


def missing(layers: Sequence[str], held: Iterable[Sequence[str]]) -> int:
    """How many of the image's last layers an engine lacks that has images with the layers `held` (diff ids)."""
    best = 0
    for other in held:
        known = 0
        while known < min(len(layers), len(other)) and layers[known] == other[known]:
            known += 1
        best = max(best, known)
    return len(layers) - best


def chain_ids(layers: Sequence[str]) -> list[str]:
    """What an engine calls each layer on top of all below it (OCI image-spec, "Layer ChainID")."""

    def onto(chain: str, diff: str) -> str:
        return f"sha256:{hashlib.sha256(f'{chain} {diff}'.encode()).hexdigest()}"

    return list(accumulate(layers, onto))


def file_name(digest: str, ending: str) -> str:
    """What a layer is called in an archive, and on its way there."""
    return f"{digest.removeprefix('sha256:')}.{ending}"


def head(config: str, image: str, layers: Sequence[str], ending: str) -> bytes:
    """The beginning of an archive for `docker load`: all but the layers' files, and without the archive's end."""
    manifest = [{"Config": "config.json", "RepoTags": [image], "Layers": [file_name(each, ending) for each in layers]}]
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, text in (("manifest.json", json.dumps(manifest)), ("config.json", config)):
            data = text.encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
        end = archive.offset
    return made.getvalue()[:end]
