"""One run of the program rsync: its command line, changes, progress and errors."""

import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from subprocess import DEVNULL, PIPE

from cluster.errors import ClusterError, UnreachableError
from cluster.spec.model import Machine
from cluster.transport import ssh_to
from cluster.transport.openssh import BEGIN
from cluster.transport.process import CONNECTIONS, started
from cluster.transport.settings import by_hand, destination

#: The prefix of marker files and of the folder for incomplete transfers.
PREFIX = ".clusterctl-"
#: Marks a folder with results of jobs. The file's text is an rsync rule that excludes its folder.
RUNS_MARK = f"{PREFIX}runs"
RUNS_RULE = "- *\n"
#: Excluded names: caches of one machine, and marker files.
EXCLUDED = (".trainer-cache", "__pycache__", f"{PREFIX}*")

_OPTIONS = (
    *("--recursive", "--links", "--times", "--omit-dir-times", "--omit-link-times", "--modify-window=-1"),
    *("--protect-args", "--timeout=120", f"--partial-dir={PREFIX}partial"),
    *("--out-format=%i %l %n", "--info=progress2", "--stats", "--no-human-readable", "--outbuf=L"),
    *(f"--exclude={name}" for name in EXCLUDED),
    f"--filter=: {RUNS_MARK}",
)
#: What comes from a node is not trusted: no links that lead out, nor files that others may write or that run as their
#: owner. Without --perms, a new file also gets none of the permissions that the umask here forbids. `name` has rsync
#: name the links.
FROM_NODE = ("--safe-links", "--info=name", "--chmod=u+rwX,o-w,ug-s,o-t")
#: rsync's exit codes: source files vanished during the transfer; the connection failed.
VANISHED = 24
_DISCONNECTED = (10, 12, 30, 35, 255)
#: Two runs to one folder share the folder of incomplete transfers: the other one has used up a file of it.
_CONFLICT = "got a block match with no basis file"
#: Seconds of retries.
_BUSY_S = 20.0
#: A line of `--out-format`: the eleven letters of an itemized change, the size, the name.
_CHANGE = re.compile(r"(\*deleting  |[<>ch.][fdLDS]\S{9}) (\d+) (.*)")
#: A line of `--safe-links`: the name of a link, and its target.
_UNSAFE = re.compile(r'ignoring unsafe symlink "(.*)" -> "(.*)"')

#: Lines that only follow from the reason, which stands before them.
_CONSEQUENCE = re.compile(
    r"rsync error: |rsync: connection unexpectedly closed|\(see the rsync man|mux_client_request_session: "
    r"|ControlSocket .* already exists"
)

_HINTS = {
    "No space left on device": "free disk space there, or choose another data_dir in the inventory (clusterctl sync)",
    "could not make way": "move what is in the way there, or delete what is only there: clusterctl sync --delete",
    "is your shell clean": "a program there prints text when rsync starts: check what ~/.bashrc and `type rsync` name",
    "Permission denied": "choose a data_dir in the inventory that the login can write to",
}


def require_rsync() -> None:
    """Raise ClusterError if this machine has no rsync."""
    if not shutil.which("rsync"):
        raise ClusterError("this machine: rsync is not installed", "sudo apt-get install rsync")


def no_rsync(name: str) -> ClusterError:
    """Return the error for a node without rsync."""
    return ClusterError(f"{name}: rsync is not installed", f"on {name}: sudo apt-get install rsync")


def at(node: Machine) -> str:
    """Return the prefix `user@host:` of paths on the node, "" if the node is this machine."""
    if not node.login:
        return ""
    user, mark, host = destination(node.login).rpartition("@")
    is_ipv6 = ":" in host
    return f"{user}{mark}[{host}]:" if is_ipv6 else f"{user}{mark}{host}:"


class Rsync:
    """A run of rsync: exit code, stderr, changes, transferred bytes, and the targets of links that were left out."""

    def __init__(
        self, node: Machine, words: Sequence[str], sent: Callable[[int], None] = lambda _: None
    ) -> None:
        self._node = node
        self._sent = sent
        self._argv = ["rsync", *_OPTIONS]
        if node.login:
            # Without --blocking-io, writes of the remote shell's filter fail if rsync reads too slowly.
            self._argv += ["--blocking-io", "-e", ssh_to(node).remote_shell()]
            self._argv += [f"--rsync-path=echo {BEGIN}; exec rsync"]
        self._argv += words
        self.code = 0
        self.errors = ""
        self.moved = 0
        self.changes: list[tuple[str, int, str]] = []
        self.links_out: dict[str, str] = {}

    def __call__(self, receiver: str, sender: str, *, may_vanish: bool = False) -> None:
        """Run rsync, and retry if sshd refuses the connection because of MaxStartups, or after a conflict.

        `receiver` and `sender` are the messages for a failure on each side, such as `gpu-a: /data cannot be written`.
        With `may_vanish` other programs may remove files. Raises LaunchError after an interruption, else ClusterError.
        """
        require_rsync()
        until = time.monotonic() + _BUSY_S
        with CONNECTIONS:
            self._run()
            while self._is_passing and time.monotonic() <= until:
                time.sleep(random.uniform(0.5, 1.5))
                self._run()
        is_expected = may_vanish and self.code == VANISHED
        if self.code and not is_expected:
            raise self._failure(receiver, sender)

    @property
    def _is_passing(self) -> bool:
        """Whether the same run may succeed a moment later."""
        if _CONFLICT in self.errors:
            return self.code != 0
        was_refused = re.search("kex_exchange|banner exchange", self.errors) is not None
        return was_refused and self.code in _DISCONNECTED

    def _run(self) -> None:
        # In the C locale rsync escapes every byte except printable ASCII as \#ooo.
        environment = {**os.environ, "LC_ALL": "C"}
        text = {"encoding": "ascii", "errors": "surrogateescape"}
        options = {"stdin": DEVNULL, "stdout": PIPE, "env": environment, **text}
        with (
            tempfile.TemporaryFile() as errors,
            started(self._argv, stderr=errors, **options) as process,
        ):
            assert process.stdout
            for line in process.stdout:
                self._read(line.rstrip("\n"))
            self.code = process.wait()
            errors.seek(0)
            self.errors = errors.read().decode(errors="replace")

    def _failure(self, receiver: str, sender: str) -> ClusterError:
        name = self._node.name
        if self.code in _DISCONNECTED and "failed" not in self.errors:
            why = reason(self.errors)
            if "Permission denied" in why:
                hint = f"try by hand: {by_hand(self._node)}"
                return UnreachableError(f"{name}: rsync cannot log in: {why}", hint)
            hint = "repeat the command: it continues the transfer"
            return UnreachableError(f"{name}: the connection broke: {why}", hint)
        if re.search(r"rsync.*not found", self.errors):
            return no_rsync(name)
        # If the receiver failed, the sender reports a write error, too.
        errors = re.sub(r"(?m)^rsync: \[sender\] write error.*", "", self.errors)
        is_sender = self.code == VANISHED or re.search(r"(?m)^rsync: \[sender\]", errors)
        return error_of(sender if is_sender else receiver, errors)

    def _read(self, line: str) -> None:
        if match := _CHANGE.fullmatch(line):
            self.changes.append((match[1], int(match[2]), _unescaped(match[3])))
        elif match := _UNSAFE.fullmatch(line):
            self.links_out[_unescaped(match[1])] = _unescaped(match[2])
        elif match := re.match(r"\s*(\d+)\s+\d+%", line):
            self._sent(int(match[1]))
        elif match := re.match(r"Total bytes (?:sent|received): (\d+)", line):
            self.moved = max(self.moved, int(match[1]))


def _unescaped(text: str) -> str:
    """Return a name as it is on the disk: rsync prints a byte as `\\#ooo`, in octal."""
    escaped = os.fsencode(text)
    name = re.sub(rb"\\#(\d{3})", lambda octal: bytes([int(octal[1], 8)]), escaped)
    return os.fsdecode(name)


def error_of(failed: str, errors: str) -> ClusterError:
    """Return the error `FAILED: REASON`, with the reason from a program's stderr."""
    why = reason(errors)
    hint = next((hint for part, hint in _HINTS.items() if part in why), "")
    return ClusterError(f"{failed}: {why}", hint)


def reason(errors: str) -> str:
    """Return the reason in the stderr of rsync, ssh or mkdir: `No space left on device`, or the most telling line."""
    printed = [line.strip() for line in errors.splitlines()]
    lines = [line for line in printed if line and not _CONSEQUENCE.match(line)]
    for line in lines:
        if "is your shell clean" in line:  # broken pipes of rsync follow from it, before or after
            return line
    # Lines of rsync first: ssh and the login shell also write to stderr.
    for line in sorted(lines, key=lambda line: not line.startswith("rsync: [")):
        match = re.search(r": ([A-Z][A-Za-z' -]+?)(?: \(\d+\))?$", line)
        if match and not match[1].startswith("Exiting"):
            return match[1]
    return lines[-1] if lines else "no reason was printed"
