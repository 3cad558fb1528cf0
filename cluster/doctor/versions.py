"""Prints the versions of Python, torch, NCCL and CUDA or HIP, a line `NAME=VALUE` each.

This file is a program of its own: `python3 -c` runs it on a node or in a container. It reads torch's files as text,
because the import of torch takes seconds.
"""

import importlib.metadata
import importlib.util
import pathlib
import re
import sys


def main() -> None:
    """Print what is installed; a package that is missing has no line."""
    print(f"python={sys.version.split()[0]}")
    for found in importlib.metadata.distributions():
        name = (found.metadata["Name"] or "").lower()
        if name == "torch":
            print(f"torch={found.version}")
        elif name.startswith("nvidia-nccl"):
            print(f"nccl={found.version}")
    spec = importlib.util.find_spec("torch")
    file = pathlib.Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if file and file.is_file():
        for name, value in re.findall(r"^(cuda|hip)\b[^=]*= *'([^']+)'", file.read_text(), re.M):
            print(f"{name}={value}")


if __name__ == "__main__":
    main()
