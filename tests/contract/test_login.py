"""Logging in wherever `ssh -o BatchMode=yes HOST` does, with a real sshd: fabric first, else the ssh program.

`test_transport.py` runs the suite of all shells over both.
"""

import getpass
import io
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.errors import ClusterError, UnreachableError
from cluster.spec.model import Machine
from cluster.transport import close_all, files, keywords, parallel, reach, settings, ssh_to
from cluster.transport.process import piped
from tests.conftest import ended, processes_of, wait_until
from tests.contract.sshd import THROUGH_SSH, TICKS, Sshd, addresses, inventory

USER = getpass.getuser()


@pytest.fixture(scope="module")
def server(tmp_path_factory, worker):
    """One server for the cases that change only the client's configuration."""
    server = Sshd(tmp_path_factory.mktemp("login") / "sshd", addresses(worker, 3))
    other = make_key(server.folder / "other", "-t", "ecdsa")
    server.serve(
        "AcceptEnv CASE_* LANG", f"TrustedUserCAKeys {server.folder / 'user.pub'}", f"HostKey {other}"
    )
    yield server
    server.stop()


class Client:
    """An ssh_config and a known_hosts file for a server."""

    def __init__(self, server, folder):
        self.server = server
        self.folder = folder
        self.config = folder / "config"
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.write_text(self.known())
        self.values = {
            "address": server.addresses[0],
            "port": server.port,
            "folder": folder,
            "key": server.folder / "user",
            "user": USER,
            "known": self.known_hosts,
            "python": sys.executable,
        }
        self.configure()

    def known(self, names="", key="host", marker=""):
        """Return a line of known_hosts."""
        names = names or f"[{self.server.addresses[0]}]:{self.server.port}"
        public = " ".join((self.server.folder / f"{key}.pub").read_text().split()[:2])
        return f"{marker}{names} {public}\n"

    def configure(self, *lines, without=()):
        """Write the configuration of the host `h0`: the lines, then those for a login, without some keywords."""
        usual = {
            "HostName": "{address}",
            "Port": "{port}",
            "User": "{user}",
            "IdentityFile": "{key}",
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": "{known}",
        }
        chosen = [
            *lines,
            *(f"{keyword} {value}" for keyword, value in usual.items() if keyword not in without),
        ]
        self.config.write_text("".join(f"{line.format_map(self.values)}\n" for line in ["Host *", *chosen]))

    @property
    def node(self):
        return Machine("gpu-a", self.server.addresses[0], login="h0", ssh_config=str(self.config))

    @property
    def shell(self):
        return reach(self.node)

    def ssh(self, *words, options=()):
        """Run the plain ssh program, as a user does."""
        argv = ["ssh", "-F", self.config, "-o", "BatchMode=yes", *options, "h0", *words]
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=20
        )

    def logins(self):
        return (self.server.folder / "log").read_text().count("Accepted publickey")

    def reaches(self, why):
        """Check that ssh and the shell reach the host, the shell for this reason."""
        done = self.ssh("true")
        assert done.returncode == 0, done.stderr
        assert self.shell.run(["cat"], stdin="through").out == "through"
        assert self.shell.note == (f"through ssh ({why})" if why else "")

    def commands_and_files_arrive(self, why):
        """Check that the shell, a pipe and rsync reach the host, the shell for this reason."""
        assert self.shell.run(["echo", "hi"]).out == "hi\n"
        assert self.shell.note == (f"through ssh ({why})" if why else "")
        with piped(self.node, ["bash", "-c", "cat; exit 7"]) as running:
            running.stdin.write(b"piped")
            running.stdin.close()
            assert running.stdout.read() == b"piped"
            assert running.wait(10).code == 7
        (self.folder / "sent").write_text("file")
        (self.folder / "there").mkdir(exist_ok=True)
        files.send(self.node, self.folder / "sent", str(self.folder / "there"))
        assert (self.folder / "there" / "sent").read_text() == "file"

    def refused(self):
        """Return the error of a login that must fail, and nothing may remain of it."""
        with pytest.raises(UnreachableError) as refused:
            self.shell.run(["true"])
        return refused.value


@pytest.fixture(autouse=True)
def short(tmp_path, monkeypatch):
    """Return a folder with a name that is short enough for sockets. It is also the one for temporary files."""
    with tempfile.TemporaryDirectory(prefix="ct-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def client(server, tmp_path, short):
    client = Client(server, tmp_path)
    client.values["short"] = short
    yield client
    close_all()


@contextmanager
def agent(folder, *keys):
    """Run an ssh-agent with these keys; yield its socket."""
    path = folder / "agent"
    with subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL) as process:
        try:
            assert wait_until(path.is_socket)
            env = {**os.environ, "SSH_AUTH_SOCK": str(path)}
            if keys:
                subprocess.run(["ssh-add", "-q", *keys], env=env, check=True)
            yield path
        finally:
            process.terminate()


def make_key(path, *options):
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", path, *(options or ["-t", "ed25519"])], check=True)
    return path


@pytest.fixture(params=["fabric", "ssh"])
def way(request):
    """Return the setting that leads to fabric, or to the ssh program."""
    return [THROUGH_SSH] if request.param == "ssh" else []


#: Settings with which fabric logs in, because it follows them, or because they do not matter.
WITH_FABRIC = {
    "locale": ["SendEnv LANG LC_*", "AddKeysToAgent yes", "HashKnownHosts yes", "UpdateHostKeys yes"],
    "terminal": [
        "StdinNull yes",
        "RequestTTY force",
        "EscapeChar none",
        "LogLevel DEBUG3",
        "VisualHostKey yes",
    ],
    "traffic": [
        "Compression yes",
        "RekeyLimit 1M 1h",
        "IPQoS throughput",
        "TCPKeepAlive no",
        "ConnectTimeout 60",
    ],
    "prompts": ["PasswordAuthentication no", "KbdInteractiveAuthentication no", "NumberOfPasswordPrompts 1"],
    "methods": [
        "PreferredAuthentications publickey",
        "GSSAPIAuthentication yes",
        "GSSAPIDelegateCredentials yes",
    ],
    "ciphers": ["Ciphers aes256-ctr", "MACs hmac-sha2-512", "KexAlgorithms ecdh-sha2-nistp384"],
    "keys": ["HostKeyAlgorithms ssh-ed25519", "PubkeyAcceptedAlgorithms ssh-ed25519", "RequiredRSASize 2048"],
    "forwardings": [
        "ForwardAgent {folder}/none",
        "ForwardX11 yes",
        "RemoteForward 0 localhost:1",
        "GatewayPorts yes",
    ],
    "trust": [
        "StrictHostKeyChecking accept-new",
        "NoHostAuthenticationForLocalhost yes",
        "CASignatureAlgorithms ssh-rsa",
    ],
    "evaluated": [
        "IgnoreUnknown Tag*",
        "Tagged x",
        "PermitLocalCommand yes",
        "LocalCommand echo connected to %h",
    ],
}


@pytest.mark.parametrize("lines", WITH_FABRIC.values(), ids=WITH_FABRIC.keys())
def test_settings_that_need_no_ssh_program(client, lines):
    client.configure(*lines)
    client.reaches("")
    client.commands_and_files_arrive("")


FOR_A_PERSON = {
    "tty": ["RemoteCommand tmux new -A", "RequestTTY yes"],
    "stdin": ["StdinNull yes"],
    "no session": ["SessionType none"],
    "background": ["ForkAfterAuthentication yes"],
    "forwarding": ["LocalForward 127.0.0.1:{taken} localhost:1", "ExitOnForwardFailure yes"],
}


@pytest.mark.parametrize("lines", FOR_A_PERSON.values(), ids=FOR_A_PERSON.keys())
def test_settings_for_a_person_at_a_terminal_do_not_reach_commands(client, way, lines):
    """A plain ssh refuses a command with them, or does not run it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        client.values["taken"] = taken.getsockname()[1]
        client.configure(*way, *lines)
        client.commands_and_files_arrive("IdentityAgent" if way else "")


#: Each of these settings needs the ssh program; the key is the right one with all of them.
WITH_SSH = {
    "AddressFamily": "inet",
    "BindAddress": "{address}",
    "BindInterface": "lo",
    "CheckHostIP": "yes",
    "ConnectionAttempts": "2",
    "GSSAPIKeyExchange": "yes",
    "HostbasedAuthentication": "yes",
    "IdentityAgent": "none",
    "PKCS11Provider": "/no/such/library.so",
    "PubkeyAuthentication": "unbound",
    "RevokedHostKeys": "{key}.pub",
    "SecurityKeyProvider": "/no/such/library.so",
    "SendEnv": "LANG CASE_*",
    "SetEnv": "CASE_B=b",
    "VerifyHostKeyDNS": "yes",
}


def test_settings_that_need_the_ssh_program(client, monkeypatch):
    for name, value in {"CASE_A": "a", "LANG": "xx"}.items():
        monkeypatch.setenv(name, value)
    client.configure("UpdateHostKeys yes", *(f"{keyword} {value}" for keyword, value in WITH_SSH.items()))
    assert client.ssh("true", options=["-o", "UpdateHostKeys=no"]).returncode == 0
    assert client.shell.run(["bash", "-c", "echo $CASE_A $CASE_B $LANG"]).out == "a b\n"
    assert set(client.shell.note.removeprefix("through ssh (").removesuffix(")").split(", ")) == set(WITH_SSH)
    client.commands_and_files_arrive(client.shell.note[13:-1])
    assert client.known_hosts.read_text() == client.known()


def test_every_keyword_of_openssh_is_in_the_table():
    named = {*keywords.WITHOUT_SSH, *keywords.UNSUPPORTED, *keywords.NAMES.lower().split()}
    assert {*settings.defaults().values} <= named
    assert {word.lower() for word in MANUAL.split()} <= named
    assert not {*keywords.WITHOUT_SSH} & {*keywords.UNSUPPORTED}
    # a keyword of a newer OpenSSH
    assert keywords.needs_ssh("warpdrive", ["yes"])


#: The keywords of ssh_config(5) of OpenSSH 9.2, and those that later releases have added.
MANUAL = """
AddKeysToAgent AddressFamily BatchMode BindAddress BindInterface CanonicalDomains CanonicalizeFallbackLocal
CanonicalizeHostname CanonicalizeMaxDots CanonicalizePermittedCNAMEs CASignatureAlgorithms CertificateFile CheckHostIP
Ciphers ClearAllForwardings Compression ConnectionAttempts ConnectTimeout ControlMaster ControlPath ControlPersist
DynamicForward EnableEscapeCommandline EnableSSHKeysign EscapeChar ExitOnForwardFailure FingerprintHash
ForkAfterAuthentication ForwardAgent ForwardX11 ForwardX11Timeout ForwardX11Trusted GatewayPorts GlobalKnownHostsFile
GSSAPIAuthentication GSSAPIClientIdentity GSSAPIDelegateCredentials GSSAPIKexAlgorithms GSSAPIKeyExchange
GSSAPIRenewalForcesRekey GSSAPIServerIdentity GSSAPITrustDns HashKnownHosts Host HostbasedAcceptedAlgorithms
HostbasedAuthentication HostKeyAlgorithms HostKeyAlias Hostname IdentitiesOnly IdentityAgent IdentityFile IgnoreUnknown
Include IPQoS KbdInteractiveAuthentication KbdInteractiveDevices KexAlgorithms KnownHostsCommand LocalCommand
LocalForward LogLevel LogVerbose MACs Match NoHostAuthenticationForLocalhost NumberOfPasswordPrompts
PasswordAuthentication PermitLocalCommand PermitRemoteOpen PKCS11Provider Port PreferredAuthentications ProxyCommand
ProxyJump ProxyUseFdpass PubkeyAcceptedAlgorithms PubkeyAuthentication RekeyLimit RemoteCommand RemoteForward RequestTTY
RequiredRSASize RevokedHostKeys SecurityKeyProvider SendEnv ServerAliveCountMax ServerAliveInterval SessionType SetEnv
StdinNull StreamLocalBindMask StreamLocalBindUnlink StrictHostKeyChecking SyslogFacility TCPKeepAlive Tunnel
TunnelDevice UpdateHostKeys User UserKnownHostsFile VerifyHostKeyDNS VisualHostKey XAuthLocation
ChannelTimeout ObscureKeystrokeTiming RefuseConnection Tag VersionAddendum WarnWeakCrypto
"""


# Keys and agents


def test_the_agent_of_the_configuration_is_asked(client):
    with agent(client.folder, client.server.folder / "user") as socket:
        client.configure(
            f"IdentityAgent {socket}", "IdentityFile none", without=("IdentityFile", "IdentitiesOnly")
        )
        client.reaches("IdentityAgent")


def test_only_the_configured_keys_are_tried(client, monkeypatch):
    """sshd ends the connection after six keys."""
    others = [make_key(client.folder / f"other{number}") for number in range(7)]
    with agent(client.folder, *others) as socket:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        client.reaches("")
        # the key is in the agent only, and the configuration names its public half
        (client.folder / "user.pub").write_bytes((client.server.folder / "user.pub").read_bytes())
        subprocess.run(["ssh-add", "-q", client.server.folder / "user"], check=True)
        client.configure("IdentityFile {folder}/user.pub", without=("IdentityFile",))
        close_all()
        assert client.ssh("true").returncode == 0
        assert client.shell.run(["echo", "hi"]).out == "hi\n"
        assert client.shell.note.startswith("through ssh (fabric: ")


def test_keys_of_the_agent_that_are_not_configured_are_not_tried(client, monkeypatch):
    """Another key can be tied to another command, or to another user."""
    make_key(client.folder / "mine")
    with agent(client.folder, client.server.folder / "user") as socket:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        client.configure("IdentityFile {folder}/mine", without=("IdentityFile",))
        assert client.ssh("true").returncode == 255
        assert "the login is refused" in client.refused().message
        client.configure("IdentityFile {folder}/mine", without=("IdentityFile", "IdentitiesOnly"))
        client.reaches("")


@pytest.mark.parametrize("name", ["{folder}/key_%r@%h", "%d/{home}/key 1", "${{KEYS}}/key", "~/{home}/key"])
def test_names_of_key_files_are_expanded(client, name, monkeypatch):
    home = Path("~").expanduser()
    client.values |= {"home": os.path.relpath(client.folder, home)}
    monkeypatch.setenv("KEYS", str(client.folder))
    for file in (f"key_{USER}@{client.values['address']}", "key 1", "key"):
        shutil.copy(client.server.folder / "user", client.folder / file)
    client.configure(f'IdentityFile "{name}"', without=("IdentityFile",))
    client.reaches("" if name[0] == "~" else "IdentityFile")


def test_a_certificate_logs_in(client):
    key = make_key(client.folder / "mine")
    authority = client.server.folder / "user"
    subprocess.run(["ssh-keygen", "-q", "-s", authority, "-I", "me", "-n", USER, f"{key}.pub"], check=True)
    (client.folder / "mine-cert.pub").rename(client.folder / "elsewhere.pub")
    client.configure(
        f"IdentityFile {key}", "CertificateFile {folder}/elsewhere.pub", without=("IdentityFile",)
    )
    client.reaches("CertificateFile")


# Host keys


def test_host_keys_are_looked_up_as_ssh_does(client):
    """Every known_hosts file has the key in another way; fabric can compare it."""
    address = client.values["address"]
    port = client.values["port"]
    hashed = client.folder / "hashed"
    hashed.write_text(client.known())
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", hashed], capture_output=True, check=True)
    subnet = address.rpartition(".")[0]
    known = {
        "wildcard": client.known(f"[{subnet}.*]:{port}"),
        "pattern": client.known(f"!other,[{subnet}.?]:*"),
        "without port": client.known(address),
        "latin-1": "# caf\xe9\n" + client.known().replace("\n", " caf\xe9\n"),
        "hashed": hashed.read_text(),
        "two keys": client.known(key="user") + client.known(),
        "damaged": f"[{address}]:{port} ssh-ed25519 AAAA\n[{address}]:{port}\n" + client.known(),
        "certificate authority of others": client.known("*.example.com", "user", "@cert-authority ")
        + client.known(),
        "revoked for others": client.known("*.example.com", "host", "@revoked ") + client.known(),
    }
    for name, text in known.items():
        close_all()
        client.known_hosts.write_text(text, encoding="latin-1")
        assert client.ssh("true").returncode == 0, name
        assert client.shell.run(["echo", name]).out == f"{name}\n"
        assert client.shell.note == "", name


@pytest.mark.parametrize(
    "files", ['"{folder}/path with space"', "{folder}/none {folder}/other", "none", "{folder}/%k {folder}/%n"]
)
def test_known_hosts_files_have_any_name(client, files):
    for name in ("path with space", "other", "global", "h0"):
        shutil.copy(client.known_hosts, client.folder / name)
    client.configure(
        f"UserKnownHostsFile {files}", "GlobalKnownHostsFile {folder}/global", without=("UserKnownHostsFile",)
    )
    if files != "none":
        (client.folder / "global").unlink()
    client.known_hosts.unlink()
    client.reaches("")


def test_the_alias_of_a_host_key_is_its_name(client):
    client.known_hosts.write_text(client.known("gpu-alias"))
    client.configure("HostKeyAlias gpu-alias")
    client.reaches("")


def test_a_key_is_known_by_a_command(client):
    client.known_hosts.rename(client.folder / "elsewhere")
    client.configure("KnownHostsCommand /bin/cat {folder}/elsewhere")
    client.reaches("KnownHostsCommand")


def test_a_certificate_authority_vouches_for_the_host(sshd, tmp_path):
    host = sshd.folder / "host.pub"
    authority = make_key(tmp_path / "ca")
    subprocess.run(
        ["ssh-keygen", "-q", "-s", authority, "-I", "h", "-h", "-n", sshd.addresses[0], host], check=True
    )
    sshd.serve(f"HostCertificate {sshd.folder}/host-cert.pub")
    client = Client(sshd, tmp_path)
    public = " ".join((tmp_path / "ca.pub").read_text().split()[:2])
    client.known_hosts.write_text(f"@cert-authority 127.0.* {public}\n")
    client.reaches(f"@cert-authority in {client.known_hosts}")
    close_all()
    # not the authority of this host
    client.known_hosts.write_text(f"@cert-authority *.example.com {public}\n")
    assert (
        f"its host key ssh-ed25519 {fingerprint(sshd)} is in no known_hosts file" in client.refused().message
    )


def fingerprint(server, key="host"):
    done = subprocess.run(
        ["ssh-keygen", "-lf", server.folder / f"{key}.pub"], capture_output=True, text=True, check=True
    )
    return done.stdout.split()[1]


@pytest.mark.parametrize("strict", ["ask", "accept-new", "no"])
def test_a_changed_host_key_is_refused(client, way, strict):
    client.configure(*way, f"StrictHostKeyChecking {strict}", "NoHostAuthenticationForLocalhost yes")
    client.known_hosts.write_text("# first line\n" + client.known(key="user"))
    before = client.logins()
    error = client.refused()
    assert "its host key is not the one in known_hosts" in error.message
    assert f"{client.known_hosts}:2" in error.message
    assert fingerprint(client.server) in error.message
    # the hint removes that line, and asks before it adds another
    name = f"[{client.values['address']}]:{client.values['port']}"
    assert f"ssh-keygen -R {shlex.quote(name)} -f {client.known_hosts} && ssh " in error.hint
    assert "StrictHostKeyChecking=ask" in error.hint
    with pytest.raises(UnreachableError, match="Host key verification failed"):
        piped(client.node, ["true"]).__enter__()
    assert client.logins() == before


def test_an_unknown_host_key_is_refused_whatever_the_configuration_says(client, way):
    client.known_hosts.write_text(client.known("other"))
    client.configure(*way, "StrictHostKeyChecking no", "VerifyHostKeyDNS yes")
    error = client.refused()
    assert f"its host key ssh-ed25519 {fingerprint(client.server)} is in no known_hosts file" in error.message
    assert "whatever StrictHostKeyChecking says" in error.message
    assert client.known_hosts.read_text() == client.known("other")
    follow(error.hint)
    client.configure(*way)
    assert client.shell.run(["echo", "known"]).out == "known\n"


def follow(hint):
    """Type the command of a hint, and answer `yes` to the question."""
    command = hint.rpartition("then: ")[2].replace(
        "StrictHostKeyChecking=ask", "StrictHostKeyChecking=accept-new"
    )
    subprocess.run(f"{command} true", shell=True, check=True, capture_output=True)


def test_a_host_key_of_localhost_is_checked_too(client, way):
    client.known_hosts.write_text("")
    client.configure(*way, "NoHostAuthenticationForLocalhost yes")
    assert client.ssh("true").returncode == 0
    error = client.refused()
    assert "clusterctl also checks host keys on localhost" in error.message
    follow(error.hint)
    assert client.shell.run(["echo", "known"]).out == "known\n"
    close_all()
    client.configure(*way, "UserKnownHostsFile /dev/null", without=("UserKnownHostsFile",))
    assert "set UserKnownHostsFile" in client.refused().hint


@pytest.mark.parametrize("where", ["known_hosts", "RevokedHostKeys"])
def test_a_revoked_host_key_is_refused(client, way, where):
    client.configure(*way)
    file = client.known_hosts
    if where == "known_hosts":
        file.write_text(client.known() + "# comment\n" + client.known("*", marker="@revoked "))
    else:
        file = client.folder / "revoked"
        others = (client.server.folder / "user.pub").read_text()
        file.write_text(f"# comment\n{others}{(client.server.folder / 'host.pub').read_text()}")
        client.configure(*way, f"RevokedHostKeys {file}")
    before = client.logins()
    error = client.refused()
    assert f"its host key ssh-ed25519 {fingerprint(client.server)} is revoked ({file}:3)" in error.message
    assert "ssh" not in error.hint
    assert client.logins() == before


def test_another_revoked_key_is_no_obstacle(client):
    client.known_hosts.write_text(client.known() + client.known("*", "user", "@revoked "))
    client.reaches(f"@revoked in {client.known_hosts}")


def test_a_line_for_many_hosts_is_not_removed_by_a_command(client):
    client.known_hosts.write_text("# comment\n" + client.known(f"[127.0.*]:{client.server.port}", "user"))
    error = client.refused()
    assert f"{client.known_hosts}:2" in error.message
    assert "ssh-keygen -R" not in error.hint
    assert f"edit line 2 of {client.known_hosts}" in error.hint


# Proxies and algorithms

#: Connects its stdin and stdout with a port.
RELAY = """
import os, socket, sys, threading
port = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def send():
    while data := os.read(0, 9999): port.sendall(data)
threading.Thread(target=send, daemon=True).start()
while data := port.recv(9999): os.write(1, data)
"""
#: Passes a connection to its parent.
PASSES = """
import array, socket, sys
port = socket.create_connection((sys.argv[1], int(sys.argv[2])))
socket.socket(fileno=1).sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [port.fileno()]))])
"""


@pytest.mark.parametrize("passes", [False, True], ids=["relay", "fdpass"])
def test_a_proxy_command_runs_in_a_shell(client, passes):
    (client.folder / "relay.py").write_text(PASSES if passes else RELAY)
    command = "{python} {folder}/relay.py $(echo %h) %p 2>{folder}/%n-errors"
    client.configure(f"ProxyCommand {command}", *(["ProxyUseFdpass yes"] if passes else []))
    client.reaches("ProxyUseFdpass, ProxyCommand" if passes else "ProxyCommand")
    assert (client.folder / "h0-errors").exists()


def jump(client, *lines, known=("first", "hop")):
    """Configure two jump hosts, the other addresses of the server; `lines` are for the target."""
    server = client.server
    hops = dict(zip(("first", "hop"), server.addresses[1:], strict=True))
    keys = [client.known(f"[{hops[name]}]:{server.port}") for name in known]
    client.known_hosts.write_text("".join([client.known(), *keys]))
    client.configure(*lines)
    text = "".join(
        f"Host {name}\n  HostName {address}\n  RemoteCommand tmux\n  RequestTTY force\n"
        for name, address in hops.items()
    )
    client.config.write_text(f"{text}Host h0\n  ProxyJump first,hop\n{client.config.read_text()}")


def test_jump_hosts_lead_to_the_host(client, way):
    jump(client, *way)
    client.reaches("IdentityAgent" if way else "")
    # OpenSSH's own ProxyJump fails with such a name
    client.config = client.config.rename(client.folder / "my 50% config")
    client.commands_and_files_arrive("IdentityAgent" if way else "")


@pytest.mark.parametrize("known", ["first", "hop"])
def test_a_jump_host_must_have_a_known_key_too(client, way, known):
    """Whatever StrictHostKeyChecking says: the ssh that OpenSSH starts for a ProxyJump follows it."""
    jump(client, *way, "StrictHostKeyChecking no", known=[known])
    text = client.known_hosts.read_text()
    assert client.ssh("true").returncode == 0
    client.known_hosts.write_text(text)
    assert re.search(
        r"gpu-a .*: cannot be reached: ProxyJump: No .* host key is known for", client.refused().message
    )
    with pytest.raises(UnreachableError, match="the connection failed"):
        piped(client.node, ["true"]).__enter__()
    assert client.known_hosts.read_text() == text


ONLY = {
    "Ciphers": "chacha20-poly1305@openssh.com",
    "MACs": "umac-128-etm@openssh.com",
    "KexAlgorithms": "sntrup761x25519-sha512@openssh.com",
}


@pytest.mark.parametrize("side", ["server", "client"])
def test_algorithms_that_paramiko_lacks(sshd, tmp_path, side):
    client = Client(sshd, tmp_path)
    lines = [f"{keyword} {value}" for keyword, value in ONLY.items()]
    if side == "server":
        sshd.serve(*lines)
    else:
        sshd.serve(f"KexAlgorithms +{ONLY['KexAlgorithms']}")
        client.configure(*lines)
    assert client.ssh("true").returncode == 0
    assert client.shell.run(["echo", "hi"]).out == "hi\n"
    assert client.shell.note.startswith("through ssh (fabric: ")


def test_algorithms_of_the_configuration_are_not_exceeded(client):
    """fabric must not use an algorithm that ssh would refuse."""
    client.configure("Ciphers aes256-ctr", "MACs hmac-sha2-512", "KexAlgorithms ecdh-sha2-nistp384")
    client.shell.run(["true"])
    transport = client.shell._link._connection.transport
    assert (transport.local_cipher, transport.remote_cipher) == ("aes256-ctr", "aes256-ctr")
    assert (transport.local_mac, transport.remote_mac) == ("hmac-sha2-512", "hmac-sha2-512")


def test_a_configuration_of_canonical_names_and_includes(client):
    (client.folder / "more").write_text(f"IdentityFile {client.server.folder / 'user'}\n")
    lines = ["CanonicalizeHostname yes", "Match canonical host {address}", "  Include {folder}/more"]
    client.configure(without=("IdentityFile",))
    client.config.write_text(client.config.read_text() + "\n".join(lines).format_map(client.values) + "\n")
    client.reaches("")
    client.configure('Match exec "test %n = h0"', "  User {user}", without=("User",))
    client.config.write_text('Match exec "test %n != h0"\n  User stranger\n' + client.config.read_text())
    close_all()
    client.reaches("")


# The connection of the ssh program


@pytest.fixture
def through_ssh(client):
    """The client, to which the ssh program has logged in; nothing may remain of it."""
    client.configure(THROUGH_SSH)
    client.shell.run(["true"])
    assert processes(client, "-M -N") == 1
    yield client
    close_all()
    assert nothing_remains(client)


def processes(client, words=""):
    """Return the number of ssh processes with this client's configuration, and with these words."""
    done = subprocess.run(
        ["pgrep", "-fc", "--", f"^ssh .*{words}.*{client.config} "], capture_output=True, text=True
    )
    return int(done.stdout)


def nothing_remains(client):
    return wait_until(lambda: processes(client) == 0 and not folders())


def folders():
    return [*Path(tempfile.gettempdir()).glob("clusterctl-ssh-*")]


def test_commands_pipes_and_rsync_share_one_login(through_ssh):
    before = through_ssh.logins()
    through_ssh.commands_and_files_arrive("IdentityAgent")
    with ThreadPoolExecutor(6) as pool:
        outs = pool.map(lambda number: through_ssh.shell.run(["echo", str(number)]).out, range(12))
    assert [*outs] == [f"{number}\n" for number in range(12)]
    assert through_ssh.shell.ping()
    assert through_ssh.logins() == before


def test_255_of_a_command_is_no_failure_of_ssh(through_ssh):
    assert through_ssh.shell.run(["bash", "-c", "echo out; echo err >&2; exit 255"]).code == 255
    started = through_ssh.folder / "started"
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(
            through_ssh.shell.run, ["bash", "-c", 'touch "$1"; sleep 60', "sleep", str(started)]
        )
        assert wait_until(started.exists)
        through_ssh.server.drop_sessions()
        with pytest.raises(UnreachableError, match="gpu-a: the connection broke"):
            done.result(20)
    assert through_ssh.shell.run(["echo", "again"]).out == "again\n"


def test_closing_ends_running_commands(through_ssh):
    started = through_ssh.folder / "started"
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(
            through_ssh.shell.run, ["bash", "-c", 'touch "$1"; exec sleep 60', "sleep", str(started)]
        )
        assert wait_until(started.exists)
        close_all()
        with pytest.raises(UnreachableError, match="gpu-a: the connection broke"):
            done.result(20)
    assert nothing_remains(through_ssh)
    assert not through_ssh.shell.ping()


LAUNCHER = """
import sys
from cluster.spec.model import Machine
from cluster.transport import reach
print(reach(Machine("gpu-a", "", login="h0", ssh_config=sys.argv[1])).run(["echo", "up"]).out, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["exit", "SIGTERM", "SIGKILL"])
def test_nothing_remains_of_a_launcher(client, end):
    client.configure(THROUGH_SSH)
    argv = [sys.executable, "-c", LAUNCHER, client.config]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline() == "up\n"
        assert processes(client, "-M -N") == 1
        assert len(folders()) == 1
        if end != "exit":
            launcher.send_signal(getattr(signal, end))
    assert nothing_remains(client)


def test_the_name_of_the_folder_for_temporary_files_may_be_long(client, monkeypatch):
    folder = client.folder / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    client.configure(THROUGH_SSH)
    assert client.shell.run(["echo", "hi"]).out == "hi\n"


def test_a_machine_without_bash_is_named(client, monkeypatch):
    (client.folder / "bin").mkdir()
    for name in ("ssh", "ssh-keygen"):
        (client.folder / "bin" / name).symlink_to(shutil.which(name))
    client.configure(THROUGH_SSH)
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(client.folder / "bin"))
        assert client.refused().message == "this machine: bash: No such file or directory"
    assert folders() == []


def test_a_login_that_is_refused_leaves_nothing(client):
    client.configure(THROUGH_SSH, "IdentityFile none", without=("IdentityFile",))
    assert "the login is refused (Permission denied (publickey" in client.refused().message
    assert nothing_remains(client)


def test_more_commands_than_the_server_allows_wait_for_each_other(sshd, tmp_path):
    sshd.serve("MaxSessions 2")
    client = Client(sshd, tmp_path)
    client.configure(THROUGH_SSH)
    with ThreadPoolExecutor(8) as pool:
        command = ["bash", "-c", "sleep 0.2; echo $0"]
        outs = pool.map(lambda number: client.shell.run([*command, str(number)]).out, range(8))
    assert [*outs] == [f"{number}\n" for number in range(8)]
    assert client.logins() == 1


def test_many_hosts_at_once_although_the_server_drops_logins(tmp_path, worker):
    server = Sshd(tmp_path / "many", addresses(worker, 16), startups="2:60:100")
    server.prefer(THROUGH_SSH)
    nodes = [server.node(number) for number in range(16)]
    try:
        done = parallel.each(nodes, lambda node: reach(node).run(["echo", node.name]).out)
        assert done == {node.name: f"{node.name}\n" for node in nodes}
        assert {reach(node).note for node in nodes} == {"through ssh (IdentityAgent)"}
        # else the server's limit was not reached, and nothing was tested
        assert re.search(r"drop connection .* past MaxStartups", (server.folder / "log").read_text())
    finally:
        close_all()
        server.stop()


def test_a_host_that_does_not_answer_is_an_error_in_time(client):
    """It accepts connections, and says nothing."""
    with socket.create_server((client.values["address"], 0)) as silent:
        client.values["port"] = silent.getsockname()[1]
        client.known_hosts.write_text(client.known(f"[{client.values['address']}]:{client.values['port']}"))
        client.configure(THROUGH_SSH)
        with pytest.raises(
            UnreachableError, match=r"gpu-a .*: cannot be reached: the login takes longer than 1 s"
        ):
            client.shell.run(["true"], timeout_s=1)
    client.configure(THROUGH_SSH)
    with pytest.raises(UnreachableError, match=r"gpu-a .*: cannot be reached: Connection refused"):
        client.shell.run(["true"])
    assert nothing_remains(client)


def test_errors_are_those_of_ssh_and_not_the_banner(sshd, tmp_path, way):
    (sshd.folder / "banner").write_text(
        "Welcome!\nPermission denied to strangers\n\nLast line of the banner\n"
    )
    sshd.serve(f"Banner {sshd.folder / 'banner'}")
    client = Client(sshd, tmp_path)
    (sshd.folder / "authorized").write_text("")
    client.configure(*way)
    assert (
        "the login is refused (Permission denied (publickey,keyboard-interactive))"
        in client.refused().message
    )
    with pytest.raises(UnreachableError, match=r"the connection failed: .*: Permission denied .publickey"):
        piped(client.node, ["true"]).__enter__()
    shutil.copy(sshd.folder / "user.pub", sshd.folder / "authorized")
    done = client.shell.run(["bash", "-c", "echo mine >&2"])
    assert (done.out, done.err) == ("", "mine\n")
    session = subprocess.run(
        ssh_to(client.node).command(["echo", "hi"]), capture_output=True, text=True, check=True
    )
    assert (session.stdout, session.stderr) == ("hi\n", "")


def test_a_key_that_others_can_read_is_named(client):
    key = shutil.copy(client.server.folder / "user", client.folder / "my key")
    key.chmod(0o644)
    client.configure(THROUGH_SSH, f'IdentityFile "{key}"', without=("IdentityFile",))
    error = client.refused()
    assert f"(key {key}: bad permissions)" in error.message
    subprocess.run(error.hint.removeprefix("run: "), shell=True, check=True)
    client.reaches("IdentityAgent")


def test_a_second_factor_is_named_and_not_asked_for(sshd, tmp_path, monkeypatch, way):
    sshd.serve("UsePAM yes", "AuthenticationMethods publickey,keyboard-interactive:pam")
    monkeypatch.setattr(sys, "stdin", io.StringIO("123456\n"))
    client = Client(sshd, tmp_path)
    client.configure(*way)
    error = client.refused()
    assert "asks for a second factor" in error.message
    assert "-fNM" in error.hint
    assert sys.stdin.read() == "123456\n"


# A ControlMaster of the user


@contextmanager
def master(client):
    """Open a ControlMaster as a user does after a one-time password: no other login is possible then."""
    authorized = client.server.folder / "authorized"
    assert (
        client.ssh("true", options=["-o", "ControlPersist=yes", "-o", "ControlMaster=yes", "-fN"]).returncode
        == 0
    )
    saved = authorized.read_text()
    authorized.write_text("")
    try:
        yield lambda: client.ssh(options=["-O", "check"]).returncode == 0
    finally:
        authorized.write_text(saved)
        client.ssh(options=["-O", "exit"])


def test_an_open_master_of_the_user_is_the_login_and_stays_open(client):
    client.configure("ControlPath {short}/cm-%C")
    with master(client) as is_open:
        before = client.logins()
        client.reaches("an open ControlMaster")
        client.commands_and_files_arrive("an open ControlMaster")
        assert client.shell.run(["bash", "-c", "exit 255"]).code == 255
        assert client.shell.ping()
        close_all()
        assert is_open()
        assert client.logins() == before
    # without it, there is no other way
    authorized = client.server.folder / "authorized"
    saved = authorized.read_text()
    authorized.write_text("")
    try:
        assert "the login is refused" in client.refused().message
    finally:
        authorized.write_text(saved)


def test_a_master_that_ends_is_replaced(client):
    client.configure("ControlPath {short}/cm-%C")
    with master(client):
        assert client.shell.run(["echo", "over it"]).out == "over it\n"
    assert client.shell.run(["echo", "over another"]).out == "over another\n"
    assert client.shell.note == ""


def test_a_master_with_an_unchecked_host_key_is_not_used(client):
    client.configure("ControlPath {short}/cm-%C", "StrictHostKeyChecking no")
    with master(client):
        client.known_hosts.write_text(client.known(key="user"))
        assert client.ssh("true").returncode == 0
        assert "its host key is not the one in known_hosts" in client.refused().message
        with pytest.raises(UnreachableError, match="Host key verification failed"):
            piped(client.node, ["true"]).__enter__()


def test_no_master_of_the_user_is_started(client, way):
    client.configure(*way, "ControlPath {short}/cm-%C", "ControlMaster auto", "ControlPersist yes")
    client.commands_and_files_arrive("IdentityAgent" if way else "")
    close_all()
    assert not [*client.values["short"].iterdir()]
    assert processes(client) == 0


def test_a_job_starts_is_followed_and_stops(clusterctl, sshd, job_name):
    sshd.prefer(THROUGH_SSH, "RemoteCommand tmux", "RequestTTY force")
    shutil.copy(TICKS, clusterctl.folder)
    inventory(clusterctl.folder, sshd, clusterctl.folder / "remote")
    words = [
        "launch",
        "--name",
        job_name,
        "--nodes",
        "2",
        "--python",
        sys.executable,
        "--command",
        "ticks.py",
    ]
    process = clusterctl.start(*words)
    clusterctl.wait_for(job_name, "tick 1", node="node-1")
    assert clusterctl.run("exec", job_name, "--node", "1", "--", "sh", "-c", "exit 255")[0] == 255
    clusterctl.expect(0, "stop", job_name)
    ended(process, 1, has="stopped")
    assert processes_of(job_name) == []
    assert folders() == []


# What the user reads


def test_init_and_doctor_say_which_machine_is_reached_through_ssh_and_why(clusterctl, client):
    client.configure(THROUGH_SSH)
    text = clusterctl.expect(0, "init", "h0", "--ssh-config", str(client.config))
    assert "h0: through ssh (IdentityAgent)\n" in text
    skipped = [f"--skip={check}" for check in ("runtime", "versions", "image", "address")]
    _, text = clusterctl.run("doctor", *skipped)
    assert re.search(r"ok +login +h0 +reachable, host key known, through ssh \(IdentityAgent\)\n", text)
    client.configure()
    assert "through ssh" not in clusterctl.expect(
        0, "init", "h0", "--ssh-config", str(client.config), "--force"
    )


def test_rsync_says_what_disturbs_it(client):
    (client.server.bin() / "rsync").write_text(
        "#!/bin/sh\necho 'Loading module rsync'\nexec /usr/bin/rsync \"$@\"\n"
    )
    (client.server.bin() / "rsync").chmod(0o755)
    try:
        with pytest.raises(
            ClusterError, match=r"protocol version mismatch -- is your shell clean\?$"
        ) as failed:
            client.commands_and_files_arrive("")
    finally:
        (client.server.bin() / "rsync").unlink()
    assert "~/.bashrc" in failed.value.hint
