"""Versions of Python, torch, NCCL and CUDA or HIP, printed as lines `NAME=VALUE`.

`python3 -c` runs this file on a node or in a container. It reads torch's files as text, because importing torch takes
seconds.
"""

import importlib.metadata
import pathlib
import re
import sys


def main() -> None:
    """Print the versions; a missing package has no line."""
    print(f"python={sys.version.split()[0]}")
    for found in importlib.metadata.distributions():
        name = (found.metadata["Name"] or "").lower()
        if name.startswith("nvidia-nccl"):
            print(f"nccl={found.version}")
        elif name == "torch":
            print(f"torch={found.version}")
            text = pathlib.Path(str(found.locate_file("torch/version.py"))).read_text()
            for key, value in re.findall(r"^(cuda|hip)\b[^=]*= *'([^']+)'", text, re.M):
                print(f"{key}={value}")
    if pathlib.Path("/usr/local/cuda/compat").is_dir():  # libraries that make an older driver sufficient
        print("compat=yes")


if __name__ == "__main__":
    main()
