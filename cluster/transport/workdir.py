"""Working directory of a program: the files that travel with a job, their copy on each node, and their way back.

Each job has its own copy, `workdir` in its run directory on the node, so that a program may write there. rsync copies
files that an earlier job has already brought to the node from that job's copy.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from rich.filesize import decimal

from cluster.errors import ClusterError, UnreachableError, UsageError
from cluster.spec.model import WORKDIR, Machine, Plan
from cluster.transport import files, parallel, reach
from cluster.transport.local import LocalShell
from cluster.transport.process import interruptible
from cluster.transport.rsync import EXCLUDED, PREFIX, RUNS_MARK, Rsync, at

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

#: A working directory is code. More than this is data, or a virtual environment.
LIMIT_BYTES = 1_000_000_000
#: Nor has code so many files. The scan of a home directory, or of a whole disk, ends here.
LIMIT_FILES = 100_000
#: Files of patterns that do not travel, with the syntax of .gitignore, in any folder. `!NAME` in the second one also
#: sends a file with a secret.
SENT_FILE = ".clusterignore"
IGNORE_FILES = (".gitignore", SENT_FILE)
#: Names, and ends of paths, of files that usually hold a secret, in lower case; and names that match but hold none.
SECRETS = (
    *(".env", ".env.*", ".envrc", "*.env"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "*.kdbx", "*.ovpn"),
    *(".npmrc", ".yarnrc.yml", ".pypirc", ".netrc", "_netrc"),
    *(".pgpass", ".my.cnf", ".git-credentials", ".htpasswd"),
    *("kubeconfig", "kubeconfig.*", "*.kubeconfig", ".kube/config", ".docker/config.json", ".dockercfg"),
    *(".aws/credentials", ".boto", ".s3cfg", "rclone.conf", ".azure/*", ".config/gcloud/*"),
    *("credentials", "credentials.json", "application_default_credentials.json", "client_secret*.json"),
    *("service-account*.json", "service_account*.json"),
    *("*.tfstate", "*.tfvars", ".vault-token", "secrets.toml"),
    *("kaggle.json", ".huggingface/token", ".cache/huggingface/token", ".ssh/*"),
)
NO_SECRETS = ("*.example", "*.sample", "*.template", "*.dist", "*.pub", "known_hosts", "authorized_keys")
#: How many copies of earlier jobs rsync may take files from.
EARLIER = 3


def scan(folder: str, without: Sequence[str] = (), limit: int = LIMIT_BYTES) -> dict[str, int]:
    """Return the files of a folder that travel: all but `.git`, caches, run directories, and what is ignored.

    Returns their sizes in bytes by their names relative to the folder. `without` are absolute paths of files with
    secrets, which never travel. Raises UsageError, which names the largest folders, if the sum is above `limit`, or if
    there are more than LIMIT_FILES files.
    """
    hint = "list what the program does not need in .clusterignore; data: clusterctl sync, and --mount"
    sizes: dict[str, int] = {}
    try:
        for name, size in _files(folder, "", []):
            if len(sizes) == LIMIT_FILES:
                raise UsageError(f"the working directory {folder} has more than {LIMIT_FILES:,} files", hint)
            if f"{folder}/{name}" not in without:
                sizes[name] = size
    except OSError as error:
        why = f"{error.filename} cannot be read: {error.strerror}"
        raise UsageError(why, "list it in .clusterignore") from error
    total = sum(sizes.values())
    if total > limit:
        parts: Counter[str] = Counter()
        for name, size in sizes.items():
            parts[name.partition("/")[0]] += size
        largest = ", ".join(f"{name} {decimal(size)}" for name, size in parts.most_common(3))
        why = f"the working directory {folder} has {decimal(total)}, more than {decimal(limit)}: {largest}"
        raise UsageError(why, hint)
    return sizes


def secrets(folder: str, names: Iterable[str]) -> list[str]:
    """Return a folder's files that usually hold secrets, without those that a line `!NAME` of .clusterignore sends.

    Links are not among them: they travel as links. Raises UsageError for a .clusterignore that cannot be read.
    """
    likely = [name for name in names if _is_secret(name.lower())]
    likely_files = [name for name in likely if not Path(folder, name).is_symlink()]
    return [name for name in likely_files if not _is_sent(folder, name)]


def _is_secret(name: str) -> bool:
    def matches(patterns: Sequence[str]) -> bool:
        return any(fnmatch(f"/{name}", f"*/{pattern}") for pattern in patterns)

    return matches(SECRETS) and not matches(NO_SECRETS)


def _is_sent(folder: str, name: str) -> bool:
    """Return whether the closest .clusterignore with a pattern for a file says that it travels."""
    for above in PurePath(name).parents:
        below = "" if above == PurePath() else f"{above}/"
        names = {SENT_FILE} if Path(folder, below, SENT_FILE).exists() else set()
        for _, spec in _rules(folder, below, names):
            is_ignored = spec.check_file(name[len(below) :]).include
            if is_ignored is not None:
                return not is_ignored
    return False


def send(
    sizes: Mapping[str, int],
    plan: Plan,
    nodes: Sequence[Machine],
    earlier: Sequence[str],
    report: files.Report,
) -> str:
    """Copy the plan's working directory to the job's folder on each node. Return a sentence with the counts.

    `earlier` are jobs whose copies may have the same files. Raises ClusterError, with no copy left, if one fails.
    """
    total = sum(sizes.values())
    machines = list({(node.login, node.ssh_config, node.run_dir): node for node in nodes}.values())
    with tempfile.NamedTemporaryFile(prefix=PREFIX) as listed:
        listed.write(b"".join(os.fsencode(name) + b"\0" for name in sizes))
        listed.flush()
        try:
            one = partial(_send, total, plan, listed.name, earlier, report)
            sent = interruptible(lambda: parallel.all_of(machines, one))
        except (ClusterError, KeyboardInterrupt):
            remove = f'rm -rf -- "$0/{WORKDIR}"; rmdir -- "$0" 2> /dev/null'
            parallel.each(machines, lambda node: reach(node).run(["bash", "-c", remove, plan.dir_on(node)]))
            raise
    most = max(sent.values(), default=0)
    where = f"{len(machines)} nodes" if len(machines) > 1 else "".join(node.name for node in machines)
    return f"working directory: {len(sizes)} files, {decimal(total)}; {most} sent to {where}"


def without_copy(plan: Plan, nodes: Sequence[Machine]) -> list[Machine]:
    """Return the nodes that answer and have no copy, for example because their disk was replaced."""

    def test(node: Machine) -> int:
        return reach(node).run(["test", "-d", f"{plan.dir_on(node)}/{WORKDIR}"]).code

    codes = parallel.each(nodes, test)
    return [node for node in nodes if codes[node.name] == 1]


def fetch(plan: Plan, node: Machine) -> None:
    """Copy files that the job has written or changed in its workdir on a node to `workdir` here. Raise ClusterError."""
    source = f"{plan.dir_on(node)}/{WORKDIR}"
    target = f"{plan.run_dir}/{WORKDIR}"
    if reach(node).run(["test", "-d", source]).code:
        return
    options = ["--prune-empty-dirs", f"--compare-dest={plan.workdir}"]
    run = files.fetch(node, source, target, plan.run_dir, options)
    # The user's own links may lead out: the node got them as they are, and has only sent them back.
    foreign = {name: to for name, to in run.links_out.items() if not _is_link(f"{plan.workdir}/{name}", to)}
    files.refuse_links(node, source, foreign)


def _is_link(path: str, target: str) -> bool:
    try:
        return str(Path(path).readlink()) == target
    except OSError:
        return False


def commit(folder: str) -> str:
    """Return the commit of a folder in a git repository, with ` (dirty)` if files differ from it; else ""."""
    try:
        head = LocalShell().run(["git", "-C", folder, "rev-parse", "HEAD"], timeout_s=10)
        changed = LocalShell().run(["git", "-C", folder, "status", "--porcelain"], timeout_s=60)
    except UnreachableError:  # no git
        return ""
    if head.code:
        return ""
    dirty = " (dirty)" if changed.out.strip() else ""
    return f"{head.out.strip()}{dirty}"


def _send(
    size: int, plan: Plan, listed: str, earlier: Sequence[str], report: files.Report, node: Machine
) -> int:
    """Copy the files to one node, and return how many were sent."""
    target = f"{plan.dir_on(node)}/{WORKDIR}"
    made = reach(node).run(["mkdir", "-p", "--", target])
    if made.code:
        raise ClusterError(f"{node.name}: {target} cannot be written: {made.last_line}")
    options = ["--perms", "--ignore-missing-args", "--from0", f"--files-from={listed}"]
    options += [f"--copy-dest=../../{job}/{WORKDIR}" for job in earlier[:EARLIER]]
    what = "sending the working directory"
    words = [*options, "--", f"{plan.workdir}/", f"{at(node)}{target}/"]
    run = Rsync(node, words, lambda sent: report(node.name, what, min(sent, size), size))
    run(f"{node.name}: {target} cannot be written", f"{plan.workdir} cannot be read", may_vanish=True)
    return sum(change[:2] in ("<f", ">f") for change, _, _ in run.changes)


def _files(top: str, below: str, rules: list[tuple[str, GitIgnoreSpec]]) -> Iterator[tuple[str, int]]:
    """Yield the names and sizes of the files in the folder `below`, relative to `top`, by the rules of its parents."""
    entries = sorted(os.scandir(Path(top, below)), key=lambda entry: entry.name)
    names = {entry.name for entry in entries}
    if RUNS_MARK in names:
        return
    rules = [*rules, *_rules(top, below, names)]
    for entry in entries:
        if any(fnmatch(entry.name, pattern) for pattern in (".git", *EXCLUDED)):
            continue
        is_folder = entry.is_dir(follow_symlinks=False)
        name = f"{below}{entry.name}/" if is_folder else f"{below}{entry.name}"
        if _is_ignored(name, rules):
            continue
        if is_folder:
            yield from _files(top, name, rules)
            continue
        try:
            about = entry.stat(follow_symlinks=False)
        except FileNotFoundError:  # another program removes files
            continue
        if stat.S_ISREG(about.st_mode) or stat.S_ISLNK(about.st_mode):
            yield name, about.st_size


def _rules(top: str, below: str, names: set[str]) -> Iterator[tuple[str, GitIgnoreSpec]]:
    from pathspec import GitIgnoreSpec

    for name in IGNORE_FILES:
        if name in names:
            file = Path(top, below, name)
            lines = file.read_text("utf-8", "surrogateescape").splitlines()
            try:
                yield below, GitIgnoreSpec.from_lines(lines)
            except ValueError as error:
                raise UsageError(f"{file}: {error}", "it has the syntax of .gitignore") from error


def _is_ignored(name: str, rules: Sequence[tuple[str, GitIgnoreSpec]]) -> bool:
    """Return whether the last matching pattern ignores a file, or a folder (with a final slash)."""
    for below, spec in reversed(rules):
        is_ignored = spec.check_file(name[len(below) :]).include
        if is_ignored is not None:
            return bool(is_ignored)
    return False
