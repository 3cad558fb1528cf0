"""Writes what this machine's pip is told about its package index as a pip.conf that also holds inside an image build.

    python3 packaging/pip-settings.py FOLDER     writes FOLDER/pip.conf and FOLDER/ca.crt

The build mounts both as secrets: they are used and leave no trace in the image. An ordinary machine has no such
settings, and both files are then empty. Paths of this machine (`file://` indexes, find-links) do not exist in a build
and are left out; the certificate bundle is copied and named by the path at which the build sees it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

CA_IN_BUILD = "/run/secrets/ca.crt"
INDEXES = ("index-url", "extra-index-url")
KEPT = (*INDEXES, "trusted-host", "proxy", "timeout", "default-timeout", "retries")


def settings() -> dict[str, str]:
    """pip's own view of its files and `PIP_*` variables: name to value, the last and strongest source winning."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)  # a Python without pip has none
    found = {}
    for line in sorted(listed.stdout.splitlines(), key=lambda line: line.startswith(":env:")):
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in ("global", "install", ":env:"):
            found[name] = str(ast.literal_eval(value))
    return found


def main(folder: Path) -> None:
    """Write the two files, readable by their owner only: an index address may hold a password."""
    found = settings()
    lines = []
    for name in KEPT:
        value = found.get(name, "")
        if name in INDEXES:
            value = " ".join(url for url in value.split() if url.startswith("http"))
        if value:
            lines.append(f"{name} = {value}\n")
    bundle = Path(found["cert"]).read_bytes() if found.get("cert") else b""
    if bundle:
        lines.append(f"cert = {CA_IN_BUILD}\n")

    folder.mkdir(parents=True, exist_ok=True)
    text = "[global]\n" + "".join(lines) if lines else ""
    for path, content in ((folder / "pip.conf", text.encode()), (folder / "ca.crt", bundle)):
        path.touch(mode=0o600)
        path.write_bytes(content)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
