"""Reads an image out of a Docker Engine's own folder: the exact tar of one layer, without `docker save` of all of them.

The engine unpacks a layer into a folder and keeps what else stood in its tar beside it (tar-split), so that the tar can
be put together again, byte for byte. This file is a program of its own: as root it runs here, otherwise as
`python3 -c` in a container that has the engine's folder mounted. It needs nothing but Python's standard library.
"""

from __future__ import annotations

import base64
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path


def image(root: str, driver: str, image_id: str, chain_ids: list[str]) -> str:
    """JSON with the image's `config` (the text whose SHA-256 is its id) and its layers' `sizes` in bytes, unpacked."""
    folder = Path(root, "image", driver)
    config = Path(folder, "imagedb/content", image_id.replace(":", "/")).read_text(encoding="utf-8")
    sizes = [int(Path(folder, "layerdb", chain.replace(":", "/"), "size").read_text()) for chain in chain_ids]
    return json.dumps({"config": config, "sizes": sizes})


def layer(root: str, driver: str, chain_id: str) -> Iterator[bytes]:
    """The layer's tar in pieces; raises OSError for an engine that keeps layers in another way."""
    about = Path(root, "image", driver, "layerdb", chain_id.replace(":", "/"))
    files = Path(root, driver, (about / "cache-id").read_text(), "diff")
    with gzip.open(about / "tar-split.json.gz") as entries:
        for line in entries:
            entry = json.loads(line)
            if entry["type"] == 2:  # bytes of the tar itself: headers and padding
                yield base64.b64decode(entry["payload"])
            elif entry.get("size"):  # a file's content, which is in the folder
                raw = base64.b64decode(entry.get("name_raw") or "") or entry["name"].encode()
                with open(bytes(files) + b"/" + raw, "rb") as file:  # noqa: PTH123 (a Path cannot hold any bytes)
                    while True:
                        piece = file.read(1 << 20)
                        if not piece:
                            break
                        yield piece


def main(root: str, driver: str, what: str, *chain_ids: str) -> None:
    """`ROOT DRIVER image ID CHAIN...` prints JSON, `ROOT DRIVER layer CHAIN` a tar."""
    if what == "layer":
        for piece in layer(root, driver, chain_ids[0]):
            sys.stdout.buffer.write(piece)
    else:
        print(image(root, driver, chain_ids[0], list(chain_ids[1:])))


if __name__ == "__main__":
    main(*sys.argv[1:])
