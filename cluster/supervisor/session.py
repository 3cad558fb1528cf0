"""Sessions with a running job: commands in a node's container, copies of files, forwarded ports, TensorBoard."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socketserver
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from cluster import contract
from cluster.backends import BACKENDS
from cluster.errors import ClusterError, UsageError
from cluster.spec.model import JobRecord, Node
from cluster.transport import inside, parallel
from cluster.transport.archive import RefusedError, extract
from cluster.transport.process import interruptible, started

#: Connects its standard input and output to a port of the node.
_RELAY = """
import os, socket, sys, threading
try: port = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
except OSError as error: sys.exit("port %s: %s" % (sys.argv[1], error.strerror))
def send():
    for data in iter(lambda: os.read(0, 65536), b""): port.sendall(data)
    port.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
for data in iter(lambda: port.recv(65536), b""): sys.stdout.buffer.write(data); sys.stdout.flush()
"""
#: TensorBoard on a free port, until the session's input ends: a closed connection does not end a remote program.
_TENSORBOARD = f"""
exec 3<&0
"$0" -m tensorboard.main --logdir "${contract.RUN_DIR}" --host localhost --port 0 2>&1 &
child=$!
{{ cat <&3; kill "$child"; }} > /dev/null 2>&1 &
wait "$child"
"""
_TAR = f"""
cd -- "${contract.RUN_DIR}" || exit
[ -e "$1" ] || [ -L "$1" ] || {{ echo "error: $1: no such file or folder" >&2; exit 1; }}
cd -- "$(dirname -- "$1")" && LC_ALL=C exec tar -cf - -- "$(basename -- "$1")"
"""
#: What tar says of files that a job appends to, replaces or removes meanwhile. It exits with 1 then.
_CHANGED = ("file changed as we read it", "File removed before we read it")


def node_named(record: JobRecord, text: str) -> Node:
    """Return the job's node with this name or number. Raises UsageError."""
    names = [node.name for node in record.plan.nodes]
    wanted = f"node-{text}" if text.isdigit() and f"node-{text}" in names else text
    if text.isdigit() and wanted not in names and int(text) < len(names):
        wanted = names[int(text)]
    if wanted not in names:
        raise UsageError(f"--node {text!r}: {record.plan.job_id} has {', '.join(names)}")
    return record.plan.nodes[names.index(wanted)]


def command(record: JobRecord, node: Node, argv: Sequence[str], *, tty: bool = False) -> list[str]:
    """Return the command that runs `argv` in the container of a running node, from this machine.

    Raises UsageError if the job or the node is not running any more.
    """
    _refuse_ended(record)
    return BACKENDS[record.plan.backend].exec(record, node, argv, tty=tty)


def _refuse_ended(record: JobRecord) -> None:
    if record.outcome:
        raise UsageError(
            f"{record.plan.job_id} is not running: {record.outcome}",
            f"its files are in {record.plan.run_dir}",
        )


def run_on_all(record: JobRecord, argv: Sequence[str], show: Callable[[str, str], None]) -> int:
    """Run a command on all nodes at once; `show` gets (node, line). Return the first exit code that is not 0."""
    _refuse_ended(record)

    def run(node: Node) -> int:
        words = command(record, node, argv)
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with started(words, stdin=subprocess.DEVNULL, text=True, **out) as process:
            for line in cast("IO[str]", process.stdout):
                show(node.name, line.rstrip("\n"))
            return process.wait()

    codes = interruptible(lambda: parallel.all_of(record.plan.nodes, run))
    return next((code for code in codes.values() if code), 0)


def copy(
    record: JobRecord,
    node: Node,
    path: str,
    into: Path,
    count: Callable[[int], None] = lambda _: None,
    left_out: Callable[[str], None] = lambda _: None,
) -> Path:
    """Copy a file or folder of a job to `into` on this machine as `docker cp` does, and return its path there.

    In a folder the copy gets the name of the source, otherwise the name `into`, of a file that is replaced or of a new
    file or folder. A folder that exists is merged with the copied one. A relative `path` is in the job's run directory,
    an absolute one in the node's container. `count` gets the bytes read so far. Links are copied as links; `left_out`
    gets a sentence about each file that is not copied: devices, and links that lead out of the folder. Raises
    UsageError if `into` cannot become the copy, ClusterError if the copy fails, or if there was nothing else to copy.
    """
    job_id = record.plan.job_id
    name = Path(path).name
    refused: list[str] = []
    if not name:
        raise UsageError(f"{path!r}: expected a file or a folder")
    target = into / name if into.is_dir() else into
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent}: no such folder", f"make it first: mkdir -p {target.parent}")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".clusterctl-") as partial:
        copied = Path(partial, name)
        if record.outcome:
            source = Path(record.plan.run_dir, path)
            if not os.path.lexists(source) or Path(path).is_absolute():
                raise UsageError(f"{job_id} is not running, and there is no {path} in {record.plan.run_dir}")
            _copy_here(record.plan.run_dir, path, copied, refused.append)
        else:
            words = command(record, node, ["sh", "-c", _TAR, "sh", path])
            _unpack(node.name, words, partial, count, refused.append)
        if not os.path.lexists(copied):
            why = refused[0] if refused else f"{path} was removed while it was being copied"
            raise ClusterError(f"{node.name}: {why}")
        _refuse_kinds(copied, target)
        _put(copied, target)
    for text in refused:
        left_out(text)
    return target


def _refuse_kinds(copied: Path, target: Path) -> None:
    """Raise UsageError if a folder would take a file's place, or a file a folder's."""
    if not os.path.lexists(target):
        return
    is_folder, replaces_folder = (path.is_dir() and not path.is_symlink() for path in (copied, target))
    if is_folder != replaces_folder:
        what = (
            "it is not a folder, but the copy is one"
            if is_folder
            else "it is a folder, but the copy is a file"
        )
        raise UsageError(f"{target}: {what}", "copy it to another name")
    for entry in sorted(copied.iterdir()) if is_folder else ():
        _refuse_kinds(entry, target / entry.name)


def _put(copied: Path, target: Path) -> None:
    """Move a copy to `target`. A file or link there is replaced, and the files of a folder go into one that exists."""
    is_merged = copied.is_dir() and not copied.is_symlink() and os.path.lexists(target)
    if not is_merged:
        copied.replace(target)
        return
    for entry in sorted(copied.iterdir()):
        _put(entry, target / entry.name)


def _copy_here(run_dir: str, path: str, target: Path, left_out: Callable[[str], None]) -> None:
    """Copy a file or folder of the run directory on this machine, but nothing that is outside of it."""
    source = Path(run_dir, path)
    try:
        if not (source.is_dir() and inside.is_inside(source, run_dir)):
            _copy_file(run_dir, source, target, left_out)
            return
        for where, folders, names in os.walk(source):
            copied = target / os.path.relpath(where, source)
            copied.mkdir(mode=Path(where).stat().st_mode & 0o777 | 0o700)
            for child in (Path(where, name) for name in (*folders, *names)):
                if not child.is_symlink():
                    if child.name in names:
                        _copy_file(run_dir, child, copied / child.name, left_out)
                elif inside.leads_out(child, source):
                    left_out(f"{child} leads out of {source}: it is a link to {child.readlink()}")
                else:
                    (copied / child.name).symlink_to(child.readlink())
    except OSError as error:
        raise ClusterError(f"{error.filename or source} cannot be copied: {error.strerror}") from error


def _copy_file(run_dir: str, source: Path, target: Path, left_out: Callable[[str], None]) -> None:
    try:
        opened = inside.open_file(run_dir, source)
    except OSError as error:
        if error.errno not in inside.REFUSED:
            raise
        left_out(f"{source} {error.strerror}")
        return
    with opened as file:
        about = os.fstat(file.fileno())
        made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, about.st_mode & 0o777)
        with os.fdopen(made, "wb") as copied:
            shutil.copyfileobj(file, copied, 1 << 20)
    os.utime(target, ns=(about.st_atime_ns, about.st_mtime_ns))


def _unpack(
    name: str,
    words: Sequence[str],
    folder: str,
    count: Callable[[int], None],
    left_out: Callable[[str], None],
) -> None:
    """Unpack the archive that a command prints. A file that changes meanwhile is copied as it was."""
    with tempfile.TemporaryFile() as errors:
        with started(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as process:
            read = 0
            failure = ""
            try:
                with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                    for entry in archive:
                        try:
                            extract(archive, entry, Path(folder))
                        except RefusedError as error:
                            left_out(str(error))
                        read += entry.size
                        count(read)
            except (tarfile.TarError, OSError) as error:
                failure = str(error)
            assert process.stdout is not None
            process.stdout.close()
            process.wait()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    printed = [line for line in lines if line.startswith(("tar: ", "error: "))]
    only_changed = process.returncode == 1 and printed and all(line.endswith(_CHANGED) for line in printed)
    if failure or (process.returncode and not only_changed):
        printed = printed or lines[-1:]
        raise ClusterError(
            f"{name}: {printed[0].partition(': ')[2] if process.returncode and printed else failure}"
        )


@contextmanager
def forwarded(
    record: JobRecord, node: Node, local: int, remote: int, note: Callable[[str], None]
) -> Iterator[int]:
    """Forward a port of this machine (0: a free one) to a port of a node while the block runs; yield its number.

    Each connection runs a relay in the node's container, so the program may listen on localhost only. `note` gets
    errors of connections. Raises UsageError if the local port is taken.
    """
    words = command(record, node, [record.job.python, "-c", _RELAY, str(remote)])
    running: set[subprocess.Popen[str]] = set()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with subprocess.Popen(
                words, stdin=self.request, stdout=self.request, stderr=subprocess.PIPE, text=True
            ) as process:
                running.add(process)
                _, errors = process.communicate()
                running.discard(process)
            if process.returncode > 0:
                note(f"{node.name}: {(errors.strip().splitlines() or ['the connection broke'])[-1]}")

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = daemon_threads = True

    try:
        server = Server(("127.0.0.1", local), Handler)
    except OSError as error:
        raise UsageError(
            f"port {local} of this machine: {error.strerror}", "choose another: LOCAL:REMOTE"
        ) from error
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            for process in list(running):
                process.terminate()


@contextmanager
def tensorboard(record: JobRecord, node: Node) -> Iterator[int]:
    """Run TensorBoard on a node while the block runs; yield its port there. Raises ClusterError if it cannot start."""
    words = command(record, node, ["sh", "-c", _TENSORBOARD, record.job.python])
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            last = ""
            for line in cast("IO[str]", process.stdout):
                if match := re.search(r" at http://\S+:(\d+)/", line):
                    threading.Thread(target=cast("IO[str]", process.stdout).read, daemon=True).start()
                    yield int(match[1])
                    return
                last = line.strip() or last
            raise ClusterError(
                f"{node.name}: TensorBoard: {last}",
                "install it for the job: --setup 'pip install tensorboard'",
            )
        finally:
            with contextlib.suppress(OSError):
                cast("IO[str]", process.stdin).close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.terminate()
