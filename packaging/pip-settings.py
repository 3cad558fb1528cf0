"""Write the index settings of this machine's pip for a container image build.

    python3 packaging/pip-settings.py FOLDER     writes FOLDER/pip.conf and FOLDER/ca.crt

The build mounts both files as secrets, so the container image does not contain them. Without such settings, both are
empty. Local paths (`file://` indexes, find-links) are omitted; the certificate bundle is copied.
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
    """Return the effective settings of pip's files and `PIP_*` variables."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)  # fails without pip
    found = {}
    for line in sorted(listed.stdout.splitlines(), key=lambda line: line.startswith(":env:")):
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in ("global", "install", ":env:"):
            found[name] = str(ast.literal_eval(value))
    return found


def main(folder: Path) -> None:
    """Write the two files with mode 600, because an index URL can contain a password."""
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
