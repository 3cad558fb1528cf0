"""Unpack the tar archive on standard input into a folder, then create a file.

`unpack.py FOLDER FILE [NAME KEPT LAUNCH [fill]]`: what is below NAME in the archive belongs into the folder KEPT, which
outlives the pods and is shared by them. LAUNCH is a word of the job's launch. With `fill`, KEPT is filled unless this
launch has done it before: then it stays as the attempt before has left it. What an earlier job of this name has left is
moved aside. The pods wait until their FILE and the file SENT in KEPT have the same content, LAUNCH.

FILE says that the archive was complete: its last member is END. A connection can break off without an error.
"""

import os
import shutil
import sys
import tarfile
from pathlib import Path

#: In KEPT: it is complete. Its time tells what has changed since.
SENT = ".clusterctl-sent"


def clear(kept: Path) -> None:
    """Make an empty folder, and keep one with files of an earlier job beside it."""
    before = kept.with_name(kept.name + ".before")
    if Path(kept, SENT).exists():
        shutil.rmtree(str(before), ignore_errors=True)
        kept.rename(before)
    shutil.rmtree(str(kept), ignore_errors=True)
    kept.mkdir(parents=True)


def main(folder: str, file: str, name: str = "", kept: str = "", launch: str = "", fill: str = "") -> None:
    """Unpack, and print the number of files, and whether the archive was complete."""
    count = 0
    complete = False
    sent = Path(kept, SENT)
    fills = bool(fill) and not (sent.exists() and sent.read_text() == launch)
    if fills:
        clear(Path(kept))
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        # They are the launcher's own files, with links as they are.
        archive.extraction_filter = lambda member, _: member
        for member in archive:
            if member.name == "END":
                complete = True
                break
            to = folder
            if kept and (member.name + "/").startswith(name + "/"):
                if not fills:
                    continue
                to = kept
                member.name = os.path.relpath(member.name, name)
            path = Path(to, member.name)
            if path.is_symlink() or path.is_file():
                path.unlink()  # of a transfer that broke off
            archive.extract(member, to)
            count += not member.isdir()
    if complete:
        if fills:
            sent.write_text(launch)
        Path(file).write_text(launch)
    print("unpacked", count, complete)


if __name__ == "__main__":
    main(*sys.argv[1:])
