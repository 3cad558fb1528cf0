"""Reader of single image layers from a Docker Engine's data folder, faster than `docker save` of the whole image.

The engine unpacks a layer into a folder and stores the other bytes of its tar separately (tar-split). Together they
give the original tar. This file runs as root, else as `python3 -c` in a container with the engine's folder mounted. It
uses only the standard library.
"""

from __future__ import annotations

import base64
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path


def image(root: str, driver: str, image_id: str, chain_ids: list[str]) -> str:
    """Return JSON with the image's `config` (its SHA-256 is the id) and the unpacked `sizes` of its layers in bytes."""
    folder = Path(root, "image", driver)
    config = Path(folder, "imagedb/content", image_id.replace(":", "/")).read_text(encoding="utf-8")
    sizes = [int(Path(folder, "layerdb", chain.replace(":", "/"), "size").read_text()) for chain in chain_ids]
    return json.dumps({"config": config, "sizes": sizes})


def layer(root: str, driver: str, chain_id: str) -> Iterator[bytes]:
    """Yield the layer's tar in chunks. Raise OSError for an engine that stores layers differently."""
    about = Path(root, "image", driver, "layerdb", chain_id.replace(":", "/"))
    files = Path(root, driver, (about / "cache-id").read_text(), "diff")
    with gzip.open(about / "tar-split.json.gz") as entries:
        for line in entries:
            entry = json.loads(line)
            if entry["type"] == 2:  # bytes of the tar itself: headers and padding
                yield base64.b64decode(entry["payload"])
            elif entry.get("size"):  # the content of a file
                raw = base64.b64decode(entry.get("name_raw") or "") or entry["name"].encode()
                with open(bytes(files) + b"/" + raw, "rb") as file:  # noqa: PTH123 (a Path cannot hold any bytes)
                    while chunk := file.read(1 << 20):
                        yield chunk


def main(root: str, driver: str, operation: str, *chain_ids: str) -> None:
    """Run `ROOT DRIVER image ID CHAIN...` (prints JSON) or `ROOT DRIVER layer CHAIN` (prints a tar)."""
    if operation == "layer":
        for chunk in layer(root, driver, chain_ids[0]):
            sys.stdout.buffer.write(chunk)
    else:
        print(image(root, driver, chain_ids[0], list(chain_ids[1:])))


if __name__ == "__main__":
    main(*sys.argv[1:])
