"""Report words that the project does not use, names that mean too much, and large files. `make check` runs this."""

import re
import subprocess
import sys
from pathlib import Path

WORDS = re.compile(
    r"(?<![a-z])(pictures?|anew|errands?|leftovers?|told|nobody|somebody|goes[ _]on|looks|wish(es|ed)?|lends?|whoever"
    r"|in vain|followers?|observers?)(?![a-z])",
    re.IGNORECASE,
)
NOUNS = "place|mode|record|stream|run|course|position"
NAMES = re.compile(rf"^\s*class _?({NOUNS})\b|(^|/)({NOUNS})\.py$", re.IGNORECASE)
LARGEST = 1_000_000  # bytes of a file: a larger one is a result that was added by mistake
BINARY = {".png", ".jpg", ".pt", ".gz", ".ico"}


def main() -> int:
    """Print each find as `path:line: word`; 1 if there are any."""
    found = []
    for name in subprocess.run(
        ["git", "ls-files"], capture_output=True, text=True, check=True
    ).stdout.splitlines():
        path = Path(name)
        if NAMES.search(name) or WORDS.search(path.stem):
            found.append(f"{name}: the file's name")
        if path.is_file() and path.stat().st_size > LARGEST:
            found.append(f"{name}: {path.stat().st_size:,} bytes, at most {LARGEST:,} are allowed")
        if path.suffix in BINARY or not path.is_file() or path == Path(sys.argv[0]):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            found += [
                f"{name}:{number}: {match.group()}"
                for match in (*WORDS.finditer(line), *NAMES.finditer(line))
            ]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
