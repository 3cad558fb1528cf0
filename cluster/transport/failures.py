"""Why a login has failed, and what to type next, from what the ssh program says."""

import re
import shlex

from cluster.errors import UnreachableError
from cluster.transport import keywords, known_hosts
from cluster.transport.login import Login
from cluster.transport.settings import by_hand

#: Lines of ssh that explain nothing.
_NOISE = re.compile(r"debug\d: |OpenSSH_|@@@|@  |Host key verification failed|\s*$")
_HOST_KEY = re.compile(r"^debug1: Server host (?:key|certificate): (\S+) (SHA256:[^\s,]+)", re.MULTILINE)
_OFFENDING = re.compile(r"^Offending .*key.* in (.+):(\d+)$", re.MULTILINE)
_BUSY = re.compile("kex_exchange_identification|banner exchange:")
_ENDED = re.compile("Connection (closed|reset) by|stdio forwarding failed")


def is_busy(log: str, printed: str) -> bool:
    """Return whether sshd, or a jump host's, closed the connection before the login, as it does above MaxStartups."""
    others = [line for line in _lines(printed) if not _BUSY.search(line) and not _ENDED.search(line)]
    return bool(_BUSY.search(log)) and not others


def unreachable(login: Login, why: str) -> UnreachableError:
    """Return the error for a host without an sshd that answers."""
    return _error(login, f"cannot be reached: {why}", f"try by hand: {by_hand(login.node)}")


def unresolved(login: Login) -> UnreachableError:
    """Return the error for a host name without an address."""
    host = login.settings.text("hostname")
    hint = f"check it with: getent hosts {host}, or set its IP address as login in cluster.yaml"
    return _error(login, f"the host name {host} does not resolve", hint)


def explain(login: Login, log: str, printed: str) -> UnreachableError:
    """Return the error for a login by the ssh program that failed.

    `log` has ssh's own messages at level DEBUG1. `printed` has the rest of its stderr: the server's banner, and the
    messages of a ProxyCommand or of a jump host's ssh.
    """
    last = _last_line(log)
    if "Host key verification failed" in log:
        return _bad_host_key(login, log)
    if "Permission denied" in last or "Too many authentication failures" in log:
        return _refused(login, log, last)
    if "Could not resolve hostname" in last:
        return unresolved(login)
    if match := re.match(r"ssh: connect to .* port \d+: (.*)", last):
        return unreachable(login, match[1])
    proxy = next((name for name in ("ProxyJump", "ProxyCommand") if login.settings.text(name.lower())), "")
    said = [line for line in _lines(printed) if not _ENDED.search(line)]
    if proxy and said:
        return unreachable(login, f"{proxy}: {said[-1]}")
    return unreachable(login, last or "ssh gives no reason")


def _refused(login: Login, log: str, last: str) -> UnreachableError:
    hand = by_hand(login.node)
    if "with partial success" in log:
        return _error(
            login, "the login asks for a second factor, which clusterctl cannot type", _by_master(login)
        )
    if match := re.search(r"(?m)^sign_and_send_pubkey: (.*)$", log):
        return _error(login, f"the login is refused ({match[1]})", f"try by hand: {hand}")
    if match := re.search(r'(?m)^Load key "(.*)": (bad permissions)$', log):
        why = f"the login is refused (key {match[1]}: {match[2]})"
        return _error(login, why, f"run: chmod 600 {shlex.quote(match[1])}")
    if match := re.search(r"(?m)^debug1: Server accepts key: (.*) \S+ SHA256:", log):
        hint = f"run: eval $(ssh-agent) && ssh-add {shlex.quote(match[1])}"
        return _error(login, f"its key {match[1]} has a passphrase and is not in an agent", hint)
    if "Too many authentication failures" in log:
        hint = f"set IdentityFile and IdentitiesOnly yes for {login.settings.text('hostname')} in the ssh configuration"
        return _error(login, "the login is refused (the server has seen too many keys)", hint)
    why = last.partition(": ")[2].rstrip(".") or last
    hint = f"try by hand: {hand}; if it asks for a password or a code, {_by_master(login)}"
    return _error(login, f"the login is refused ({why})", hint)


def _by_master(login: Login) -> str:
    """Return how to log in by hand so that clusterctl can use the connection."""
    missing = [] if login.settings.is_strict else ["StrictHostKeyChecking ask"]
    missing += [] if login.settings.text("controlpath") else ["a ControlPath"]
    command = f"keep a connection open: {by_hand(login.node, '-fNM')}"
    return f"set {' and '.join(missing)} in the configuration, then {command}" if missing else command


def _bad_host_key(login: Login, log: str) -> UnreachableError:
    kind, fingerprint = next(iter(_HOST_KEY.findall(log)), ("", ""))
    kind = kind.removesuffix("-cert-v01@openssh.com")  # the fingerprint belongs to the key in the certificate
    key = f"its host key {kind} {fingerprint}".rstrip()
    if revoked := _revoked(login, log, fingerprint):
        hint = "do not log in, an attacker may have this key: ask the administrator of the machine for its new one"
        return _error(login, f"{key} is revoked ({revoked})", hint)
    compare = "compare the key with `ssh-keygen -lf /etc/ssh/ssh_host_*.pub` on the machine, then: "
    if "has changed and you have requested strict checking" in log:
        file, line = next(iter(_OFFENDING.findall(log)), ("", "0"))
        where = f"known_hosts ({file}:{line})" if file else "known_hosts"
        why = f"its host key is not the one in {where}: the machine is new, or another one answers"
        hint = f"if the machine is new: {compare}{_removal(login, file, int(line))}{_acceptance(login)}"
        return _error(login, f"{why} with {kind} {fingerprint}", hint)
    if "host key is known for" in log:
        return _error(
            login, f"{key} is in no known_hosts file{_unread(login)}", f"{compare}{_acceptance(login)}"
        )
    return _error(login, f"{key} is refused: {_last_line(log)}", f"try by hand: {by_hand(login.node)}")


def _revoked(login: Login, log: str, fingerprint: str) -> str:
    """Return where the key is revoked, `FILE:LINE` or `FILE`, or ""."""
    if match := re.search(r"(?m)^Host key .* revoked by file (.*)$", log):
        line = known_hosts.line_of(match[1], fingerprint)
        return f"{match[1]}:{line}" if line else match[1]
    if "is marked as revoked" not in log:
        return ""
    marked = [key for key in login.known if key.marker == "@revoked"]
    return str(
        next(
            (key for key in marked if key.fingerprint == fingerprint), marked[0] if marked else "known_hosts"
        )
    )


def _removal(login: Login, file: str, line: int) -> str:
    """Return what removes a line of a known_hosts file, before another command."""
    names = next((key.names for key in login.known if (key.file, key.line) == (file, line)), "")
    if set(names) & set("*?"):  # ssh-keygen -R removes no patterns
        return f"edit line {line} of {file}, which can name other machines too, and run: "
    return shlex.join(["ssh-keygen", "-R", known_hosts.name_of(login.settings), "-f", file]) + " && "


def _acceptance(login: Login) -> str:
    """Return the command that shows an unknown host key, asks, and adds it to the user's first known_hosts file."""
    options = ["-o", "StrictHostKeyChecking=ask"]
    if login.settings.text("nohostauthenticationforlocalhost") == "yes":
        options += ["-o", "NoHostAuthenticationForLocalhost=no"]
    command = by_hand(login.node, *options)
    if login.settings.text("userknownhostsfile") in ("none", "/dev/null"):
        return f"set UserKnownHostsFile to a file that can keep keys, and run: {command}"
    return command


def _unread(login: Login) -> str:
    """Return which known_hosts files could not be read, and which setting is not followed, after the message."""
    parts = [f"{file} cannot be read" for file in known_hosts.unreadable(login.settings)]
    relaxed = [key for key, values in keywords.RELAXED.items() if login.settings.text(key) in values]
    parts += [keywords.UNSUPPORTED[keyword] for keyword in relaxed]
    return f" ({'; '.join(parts)})" if parts else ""


def _error(login: Login, why: str, hint: str) -> UnreachableError:
    return UnreachableError(f"{login.where}: {why}", hint)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if not _NOISE.match(line)]


def _last_line(log: str) -> str:
    return next(reversed(_lines(log)), "")
