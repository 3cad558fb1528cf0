"""What an engine lacks of an image, the archive that brings it, and whether nodes have the same image: pure."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
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


def difference(found: Mapping[str, str], image: str, ours: str = "") -> tuple[str, str] | None:
    """Why nodes with these ids of an image cannot run one job, as (message, hint); None when all have the same.

    `ours` is the id on the launching machine, "" when it has none: then the first node that has one is the measure.
    """
    first = next((node for node, image_id in found.items() if image_id), "")
    measure, where = (ours, "here") if ours else (found.get(first, ""), f"on {first}")
    other = [node for node, image_id in found.items() if not image_id or image_id != measure]
    if not other:
        return None
    lines = [
        f"{node}: {image} is {short(found[node])} there and {short(measure)} {where}"
        if found[node]
        else f"{node}: no image {image}"
        for node in other
    ]
    return "\n       ".join(lines), f"clusterctl image push {' '.join(other)}   (or launch with --push)"


def short(image_id: str) -> str:
    """The first 7 hex digits of an id."""
    return image_id.removeprefix("sha256:")[:7]
