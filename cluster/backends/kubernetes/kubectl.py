"""Client of a Kubernetes cluster: runs the program kubectl, and translates its errors.

kubectl knows every way to log in to a cluster, costs 0.1 s a call, and needs no package.
"""

import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from subprocess import PIPE
from typing import IO, Any, NamedTuple

from cluster.errors import ClusterError, GpusHeldError, NameTakenError, UnreachableError, UsageError
from cluster.transport import Completed, LocalShell
from cluster.transport.local import environment
from cluster.transport.process import started

#: Timeout of one request to the API server, and of a call, which may make several.
REQUEST_S = 10
CALL_S = 25.0
#: Time for objects to disappear that were created a moment ago.
_GONE_S = 60.0
#: A pod of which nothing runs yet is removed by force after this time: Kubernetes 1.20 can take half a minute.
_PENDING_S = 3.0
#: What to do about a missing right.
RIGHTS_HINT = "ask for that permission; the documentation's page Kubernetes has the Role that a job needs"
#: How `kubectl get` prints an object of the API.
Document = dict[str, Any]


class NotFoundError(ClusterError):
    """An object does not exist."""


class ForbiddenError(UsageError):
    """The user lacks a right in the cluster."""


class QuotaError(GpusHeldError):
    """A quota of the namespace does not allow more at present."""


class ContainerEndedError(ClusterError):
    """The container of a command does not run any more."""


class NodeSilentError(UnreachableError):
    """The API server answers, and the kubelet of a pod's node does not."""


class _Rule(NamedTuple):
    """A pattern in kubectl's stderr, and the error for it; message and hint may use the pattern's groups."""

    pattern: str
    kind: type[ClusterError]
    message: str
    hint: str = ""


_LOG_IN = "log in to the cluster again, then try: kubectl auth whoami"
#: The first that is found decides. `{all}` is kubectl's own sentence.
_RULES = (
    _Rule(
        r'context "?([^"\n]+?)"? does not exist|context was not found for specified context: (\S+)'
        r"|cannot locate context (\S+)",
        UsageError,
        "the kubeconfig has no context {0}",
        "kubectl config get-contexts; then context: in the section kubernetes of cluster.yaml",
    ),
    _Rule(
        r"localhost:8080|Missing or incomplete configuration|current-context must exist",
        UsageError,
        "kubectl does not know the cluster: this machine has no kubeconfig, or its kubeconfig has no current context",
        "set KUBECONFIG to the file of your cluster, or kubectl config use-context NAME; then try: kubectl get pods",
    ),
    _Rule(
        r"error loading config file|invalid configuration|cannot locate (?:cluster|user)"
        r"|unable to read (?:client-|certificate)",
        UsageError,
        "the kubeconfig cannot be used: {all}",
        "kubectl config view",
    ),
    _Rule(
        r"exec: executable (\S+) not found",
        UsageError,
        "the kubeconfig logs in with the program {0}, which is not installed",
        "install it, then try: kubectl get pods",
    ),
    _Rule(
        r"Unauthorized|must be logged in|provide credentials|token has expired|getting credentials",
        UsageError,
        "the cluster does not accept the credentials in the kubeconfig",
        _LOG_IN,
    ),
    _Rule(r"x509: ", UsageError, "the certificates of kubeconfig and cluster do not match: {all}", _LOG_IN),
    _Rule(
        r"exceeded quota: ([^,]+), requested: ([^\n]+?), used: ([^\n]+?), limited: ([^\n]+)",
        QuotaError,
        "the quota {0} of the namespace is exhausted: requested {1}, used {2}, limited to {3}",
        "wait until other jobs of the namespace have ended; to see its limits: kubectl describe quota {0}",
    ),
    _Rule(
        r'violates PodSecurity "([^":]+)[^"]*": ([^\n]+)',
        UsageError,
        "the namespace enforces the Pod Security level {0}: {1}",
        "remove these from the section kubernetes of cluster.yaml, or use another namespace",
    ),
    _Rule(
        r'namespaces "([^"]+)" not found',
        UsageError,
        "the cluster has no namespace {0}",
        "namespace: in the section kubernetes of cluster.yaml, or: kubectl create namespace {0}",
    ),
    _Rule(
        r'User "([^"]+)" cannot (\w+) resource "([^"]+)"[^\n]*? in the namespace "([^"]+)"',
        ForbiddenError,
        "{0} has no permission to {1} {2} in the namespace {3}",
        RIGHTS_HINT,
    ),
    _Rule(
        r'User "([^"]+)" cannot (\w+) resource "([^"]+)"[^\n]*? at the cluster scope',
        ForbiddenError,
        "{0} has no permission to {1} {2}, which needs a permission for the whole cluster",
        RIGHTS_HINT,
    ),
    _Rule(r"\(Forbidden\)|is forbidden", ForbiddenError, "the cluster refuses it: {all}"),
    _Rule(
        r"in a completed pod|container not found|ontainer \S+ is not running|in a stopped state",
        ContainerEndedError,
        "its container has ended",
    ),
    _Rule(
        r'unknown field "([^"]+)"',
        UsageError,
        "the cluster does not know the field {0}",
        "correct it under pod in the section kubernetes; kubectl explain pod.spec lists the fields",
    ),
    _Rule(
        r"AlreadyExists|already exists", NameTakenError, "{all}", "choose another --name, or clusterctl gc"
    ),
    _Rule(r"NotFound|not found", NotFoundError, "{all}"),
    _Rule(
        r"error dialing backend|unable to upgrade connection|:10250\b.*(?:refused|timeout|no route)|proxy error from",
        NodeSilentError,
        "its kubelet does not answer: {all}",
    ),
    _Rule(
        r"was refused|connection refused|timeout|deadline exceeded|no such host|no route to host|Unable to connect"
        r"|unreachable|connection reset|\bEOF\b|currently unable|InternalError|TooManyRequests|etcdserver",
        UnreachableError,
        "the cluster's API server does not answer: {all}",
        "kubectl get --raw /readyz",
    ),
)
#: Lines in which kubectl logs its retries (E0101 ...), and warnings of the server. The reason comes after them.
_NO_REASON = re.compile(r"[EWI]\d{4} |Warning: |\s*$")
_PREFIX = re.compile(
    r"^(?:error: |Error from server(?: \(\w+\))?: |error when creating \S+: |Unable to connect to the server: "
    r"|error dialing backend: )+"
)
#: An error of `kubectl exec` itself, not of the command in the container.
_OWN_ERROR = re.compile(r"^(error: |Error from server|Unable to connect|E\d{4} )", re.MULTILINE)


def error_of(stderr: str, code: int = 1) -> ClusterError:
    """Return the error that a failed kubectl printed, as one sentence with the next step."""
    lines = [line.strip() for line in stderr.splitlines() if not _NO_REASON.match(line)]
    text = "\n".join(lines) or stderr.strip()
    first = _PREFIX.sub("", lines[0]) if lines else f"kubectl: exit {code}"
    for rule in _RULES:
        if match := re.search(rule.pattern, text):
            groups = [group for group in match.groups() if group is not None]
            return rule.kind(rule.message.format(*groups, all=first), rule.hint.format(*groups))
    return ClusterError(f"kubectl: {first}")


@dataclass(frozen=True)
class Kubectl:
    """kubectl with a context and a namespace ("": those of the kubeconfig)."""

    context: str = ""
    namespace: str = ""

    def argv(self, *words: str) -> list[str]:
        """Return a complete command; `words` may end with a command for a container."""
        context = [f"--context={self.context}"] if self.context else []
        namespace = [f"--namespace={self.namespace}"] if self.namespace else []
        return ["kubectl", *context, *namespace, *words]

    def run(self, *words: str, stdin: str = "", timeout_s: float = CALL_S) -> Completed:
        """Run kubectl to its end, whatever its exit code. Raise UnreachableError if it has not ended in `timeout_s`."""
        request_s = max(1, min(REQUEST_S, int(timeout_s)))
        return self._run([f"--request-timeout={request_s}s", *words], stdin, timeout_s)

    def text(self, *words: str, stdin: str = "", timeout_s: float = CALL_S) -> str:
        """Return what kubectl prints. Raise the ClusterError that its error translates to."""
        done = self.run(*words, stdin=stdin, timeout_s=timeout_s)
        if done.code:
            raise error_of(done.err or done.out, done.code)
        return done.out

    def get(self, kind: str, *words: str, timeout_s: float = CALL_S) -> list[Document]:
        """Return the objects of a kind; `words` are names, or a selector. Raise NotFoundError for a missing name."""
        text = self.text("get", kind, *words, "--output=json", timeout_s=timeout_s)
        answer = json.loads(text or "{}")
        return list(answer["items"]) if "items" in answer else [answer]

    def create(self, text: str, *, dry_run: bool = False) -> list[str]:
        """Create the objects of a manifest and return their names, `pod/x`; with `dry_run` the server only checks it.

        If one is refused, deletes the others and raises the error. After an UnreachableError some may exist.
        """
        words = ["--dry-run=server"] if dry_run else []
        done = self.run("create", *words, "--filename=-", "--output=name", stdin=text, timeout_s=60)
        created = done.out.split()
        if done.code:
            if not dry_run:
                self._delete_again(created)
            raise error_of(done.err, done.code)
        return created

    def _delete_again(self, created: Sequence[str]) -> None:
        """Delete what has just been created, and wait until it is gone."""
        if not created:
            return
        began = time.monotonic()
        self.delete(*created, grace_s=1)
        left = list(created)
        while left and time.monotonic() < began + _GONE_S:
            left = self.text("get", *left, "--ignore-not-found", "--output=name").split()
            pods = [name for name in left if name.startswith("pod/")]
            if pods and time.monotonic() > began + _PENDING_S:
                self._delete_pending(pods)
            time.sleep(0.3)

    def _delete_pending(self, pods: Sequence[str]) -> None:
        """Remove by force those pods of which nothing runs yet."""
        pending = []
        for pod in self.get(*pods, "--ignore-not-found"):
            if pod.get("status", {}).get("phase") == "Pending":
                pending.append(pod["metadata"]["name"])
        if pending:
            self.delete("pods", *pending, force=True)

    def delete(self, *words: str, grace_s: int | None = None, force: bool = False) -> None:
        """Delete objects, and do not wait for their end. Those that do not exist are no error."""
        grace = []
        if force:
            grace = ["--grace-period=0", "--force"]
        elif grace_s is not None:
            grace = [f"--grace-period={grace_s}"]
        self.text("delete", *words, *grace, "--wait=false", "--ignore-not-found")

    def exec_argv(
        self, pod: str, argv: Sequence[str], *, container: str = "node", stdin: bool = True, tty: bool = False
    ) -> list[str]:
        """Return the command that runs `argv` in a container of a running pod."""
        return self.argv(*_exec_words(pod, argv, container, stdin=stdin, tty=tty))

    def exec(
        self, pod: str, argv: Sequence[str], *, container: str = "node", timeout_s: float = 10.0
    ) -> Completed:
        """Run `argv` in a container without input. Raise NodeSilentError if its node does not answer in `timeout_s`.

        kubectl ends with 0 if the kubelet dies: check what the command printed.
        """
        words = _exec_words(pod, argv, container, stdin=False)
        try:
            done = self._run(words, "", timeout_s)
        except UnreachableError as error:
            raise NodeSilentError(f"its kubelet did not answer within {timeout_s:g} s") from error
        if done.code and _OWN_ERROR.search(done.err):
            raise error_of(done.err, done.code)
        return done

    @contextmanager
    def piped(self, pod: str, argv: Sequence[str], *, container: str = "node") -> Iterator["Piped"]:
        """Start `argv` in a container with pipes. Ctrl-C in `interruptible` ends it, as does leaving the block."""
        words = self.exec_argv(pod, argv, container=container)
        _require()
        with (
            tempfile.TemporaryFile() as errors,
            started(words, stdin=PIPE, stdout=PIPE, stderr=errors, env=_environment()) as process,
        ):
            assert process.stdin
            assert process.stdout

            def end(timeout_s: float) -> ClusterError | None:
                process.wait(timeout_s)
                errors.seek(0)
                text = errors.read().decode(errors="replace")
                return error_of(text, process.returncode) if process.returncode else None

            yield Piped(process.stdin, process.stdout, end)

    def _run(self, words: Sequence[str], stdin: str, timeout_s: float) -> Completed:
        _require()
        return LocalShell().run(["env", "LC_ALL=C", *self.argv(*words)], stdin=stdin, timeout_s=timeout_s)


@dataclass(frozen=True)
class Piped:
    """A running command in a container: its input, its output, and a function that waits and returns its error."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    end: Callable[[float], ClusterError | None]


def _exec_words(
    pod: str, argv: Sequence[str], container: str, *, stdin: bool, tty: bool = False
) -> list[str]:
    """Return the arguments of kubectl that run `argv` in a container."""
    options = []
    if stdin:
        options.append("--stdin")
    if tty:
        options.append("--tty")
    return ["exec", *options, pod, f"--container={container}", "--", *argv]


def problem() -> tuple[str, str] | None:
    """Return why this machine has no kubectl, as (message, hint), or None."""
    if shutil.which("kubectl", path=environment()["PATH"]):
        return None
    return (
        "this machine: kubectl is not installed",
        "https://kubernetes.io/docs/tasks/tools/ has one file to download",
    )


def _require() -> None:
    if missing := problem():
        raise UsageError(*missing)


def _environment() -> dict[str, str]:
    return {**environment(), "LC_ALL": "C"}
