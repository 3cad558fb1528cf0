"""One suite for all shells, against a real sshd; then cases of SSH only."""

import contextlib
import getpass
import os
import shlex
import shutil
import socket
import subprocess
import threading
import time
from dataclasses import replace

import pytest

from cluster.errors import UnreachableError
from cluster.spec.model import Machine
from cluster.transport import LocalShell, close_all, files, reach
from cluster.transport.openssh import CONNECT_TIMEOUT_S, remote_line
from cluster.transport.process import piped
from tests.conftest import interrupted, wait_until
from tests.contract.sshd import THROUGH_SSH, Sshd, addresses

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIZAvwKQ6cVyjuM0SyLN4F8Sdu5RPw6h7nB6XzJ0Zr1z"
HOSTILE = ["a'; echo foo", 'a"=0"', "one\ntwo", "$HOME `id` \\", "", "-n", "ünïcode", "!x *"]


@pytest.fixture(params=["local", "fabric", "ssh"])
def node(request):
    if request.param == "local":
        yield Machine("here", "127.0.0.1")
        return
    server = request.getfixturevalue("sshd")
    yield reached(server, request.param).node(0, "gpu-a")
    close_all()


@pytest.fixture(params=["fabric", "ssh"])
def either(request, sshd):
    """The server, to which fabric logs in, and then the ssh program."""
    yield reached(sshd, request.param)
    close_all()


def reached(server, way):
    if way == "ssh":
        server.prefer(THROUGH_SSH)
    return server


@pytest.fixture
def shell(node):
    return reach(node)


def test_arguments_input_output_and_exit_code_are_exact(shell):
    done = shell.run(["python3", "-c", "import sys; print(sys.argv[1:])", *HOSTILE])
    assert (done.code, done.out, done.err) == (0, f"{HOSTILE}\n", "")
    done = shell.run(["bash", "-c", "cat; echo oops >&2; exit 7"], stdin="first\nlast $HOME")
    assert (done.code, done.out, done.err, done.last_line) == (7, "first\nlast $HOME", "oops\n", "oops")


def test_a_megabyte_each_way_does_not_deadlock(shell):
    done = shell.run(["bash", "-c", "cat; head -c 1000000 /dev/zero | tr '\\0' e >&2"], stdin="x" * 1_000_000)
    assert (done.code, len(done.out), len(done.err)) == (0, 1_000_000, 1_000_000)


def test_a_hanging_command_times_out_and_the_shell_stays_usable(shell):
    shell.run(["true"])  # the login is not part of the time
    began = time.monotonic()
    with pytest.raises(UnreachableError, match=r"`sleep 30` did not answer within 0.5 s"):
        shell.run(["sleep", "30"], timeout_s=0.5)
    assert time.monotonic() - began < 5
    assert shell.run(["echo", "still here"]).out == "still here\n"


def test_pipes_carry_bytes_both_ways(node):
    sent = os.urandom(3_000_000)
    with piped(node, ["bash", "-c", "cat; echo done >&2; exit 3"]) as running:

        def write():
            running.stdin.write(sent)
            running.stdin.close()

        writer = threading.Thread(target=write)
        writer.start()
        received = running.stdout.read()
        writer.join()
        done = running.wait(10)
    assert received == sent
    assert (done.code, done.err) == (3, "done\n")


def test_255_of_a_pipe_is_the_commands_unless_the_connection_breaks(either):
    connect(either).run(["true"])
    node = either.node(0, "gpu-a")
    with piped(node, ["bash", "-c", "echo closed by >&2; exit 255"]) as running:
        assert running.stdout.read() == b""
        assert running.wait(10).code == 255
    with piped(node, ["bash", "-c", "echo up; exec sleep 60"]) as running:
        assert running.stdout.readline() == b"up\n"
        either.drop_sessions()
        with pytest.raises(UnreachableError, match="gpu-a: the connection broke"):
            running.wait(20)


def test_a_block_that_is_left_ends_its_command(node, tmp_path):
    mark = str(tmp_path / "mark")
    with piped(node, ["bash", "-c", 'while echo x; do sleep 0.1; done; touch "$1"', "loop", mark]) as running:
        assert running.stdout.readline() == b"x\n"
    ended = 1  # of pgrep, without any match
    assert wait_until(lambda: LocalShell().run(["pgrep", "-f", f"loop {mark}"]).code == ended)


def test_the_path_has_the_folders_that_a_non_login_session_lacks(shell):
    folders = shell.run(["bash", "-c", 'echo "$PATH"']).out.strip().split(":")
    assert {"/usr/sbin", "/usr/lib/wsl/lib"} <= {*folders}


def connect(server, login="h0"):
    close_all()
    return reach(replace(server.node(0, "gpu-a"), login=login))


def test_one_connection_is_used_for_everything_and_replaced_when_it_breaks(either):
    sshd = either
    shell = connect(either)
    for _ in range(3):
        shell.run(["true"])
    assert (sshd.folder / "log").read_text().count("Accepted publickey") == 1
    sshd.drop_sessions()
    assert shell.run(["echo", "again"]).out == "again\n"
    assert (sshd.folder / "log").read_text().count("Accepted publickey") == 2


@pytest.fixture(params=["fabric", "ssh"])
def greeting(tmp_path, worker, request):
    """A machine whose ~/.bashrc prints, without a final newline, and counts how often it was read."""
    server = Sshd(tmp_path / "sshd", addresses(worker, 1))
    (server.folder / ".bashrc").write_text(
        "echo Welcome to gpu-a; printf 'have a nice'\n"
        "echo bash: /usr/share/greeting: No such file or directory >&2; echo >> ~/read\n"
    )
    yield reached(server, request.param)
    close_all()
    server.stop()


def test_the_output_of_a_login_shell_is_not_that_of_the_command(greeting):
    shell = connect(greeting)
    assert shell.run(["echo", "mine"]).out == "mine\n"
    done = shell.run(["bash", "-c", "bash -c 'cat; exit 7'"], stdin="one\ntwo")
    assert (done.code, done.out, done.err) == (7, "one\ntwo", "")
    assert (greeting.folder / "read").read_text() == "\n" * 2  # once for each command
    sent = os.urandom(1_000_000)
    with piped(greeting.node(0, "gpu-a"), ["bash", "-c", "cat; exit 3"]) as running:
        running.stdin.write(b"first\n" + sent)
        running.stdin.close()
        assert running.stdout.readline() == b"first\n"
        assert running.stdout.read(1000) + running.stdout.read() == sent
        assert running.wait(10).code == 3
    with piped(greeting.node(0, "gpu-a"), ["bash", "-c", "echo mine >&2; exit 3"]) as running:
        assert running.wait(10).err == "mine\n"


def test_files_are_compared_sent_and_fetched_despite_a_greeting(greeting, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a").write_text("a")
    node = greeting.node(0, "gpu-a", data_dir=str(tmp_path / "there"))
    assert files.differences([node], str(tmp_path / "set"))["gpu-a"].missing == ("a",)
    files.sync([node], str(tmp_path / "set"), copy=True)
    assert not files.differences([node], str(tmp_path / "set"))["gpu-a"]
    files.collect(node, node.mirror(str(tmp_path / "set")), str(tmp_path / "back"))
    assert (tmp_path / "back" / "a").read_text() == "a"


def test_a_login_shell_that_runs_no_command_is_an_error_with_its_output(greeting):
    (greeting.folder / ".bashrc").write_text("echo This account is closed.; exit 0\n")
    with pytest.raises(
        UnreachableError, match="its login shell does not run commands: This account is close"
    ) as refused:
        connect(greeting).run(["true"])
    assert refused.value.hint == f'try by hand: ssh -F {greeting.config} h0 "bash --version"'


@pytest.mark.parametrize(
    "login", [each for each in ("sh", "bash", "zsh", "fish", "tcsh", "csh") if shutil.which(each)]
)
def test_any_login_shell_runs_the_exact_command(login):
    """Test the shells of this machine; csh is the strictest."""
    words = [
        *HOSTILE,
        "tab\t\x7f",
        "\\0041 \\\\ \\'",
        "%s ~ [a] {b,c} #",
        "it's long, isn't it! " * 1000,
        "the end\n",
    ]
    line = remote_line(["python3", "-c", "import sys; print(sys.argv[1:])", *words], marked=True)
    assert line.isascii()
    assert line.isprintable()
    assert "!" not in line
    assert "\\\\" not in line
    assert max(map(len, shlex.split(line))) < 1024
    done = LocalShell().run([login, "-c", line])
    assert (done.code, done.out.partition("\n")[2], done.err) == (0, f"{words}\n", "clusterctl begins\n")
    # a background process does not delay the end of the output; csh would pass copies of its stdin and stdout to it
    LocalShell().run(
        [login, "-c", remote_line(["bash", "-c", "sleep 20 <&- >&- 2>&- &"], marked=True)], timeout_s=10
    )


def test_an_unknown_host_key_is_refused_with_its_fingerprint_and_the_command_that_adds_it(either):
    sshd = either
    fingerprint = LocalShell().run(["ssh-keygen", "-lf", str(sshd.folder / "host.pub")]).out.split()[1]
    sshd.known_hosts.write_text("")
    with pytest.raises(UnreachableError) as refused:
        connect(sshd).run(["true"])
    assert refused.value.message.startswith("gpu-a (")
    assert fingerprint in refused.value.message
    assert f"ssh -o StrictHostKeyChecking=ask -F {sshd.config} h0" in refused.value.hint


def test_another_host_key_than_the_known_one_is_refused(either):
    sshd = either
    other = " ".join((sshd.folder / "user.pub").read_text().split()[:2])
    sshd.known_hosts.write_text(f"[{sshd.addresses[0]}]:{sshd.port} {other}\n")
    with pytest.raises(
        UnreachableError, match=r"gpu-a .*: its host key is not the one in known_hosts"
    ) as refused:
        connect(sshd).run(["true"])
    assert f"({sshd.known_hosts}:1)" in refused.value.message
    assert (
        f"ssh-keygen -R '[{sshd.addresses[0]}]:{sshd.port}' -f {sshd.known_hosts} && ssh "
        in refused.value.hint
    )


def test_a_refused_login_a_locked_key_and_unknown_hosts_are_errors(either):
    sshd = either
    (sshd.folder / "authorized").write_text("")
    with pytest.raises(UnreachableError, match=r"gpu-a .*: the login is refused"):
        connect(sshd).run(["true"])
    with pytest.raises(UnreachableError, match=r"gpu-a: the connection failed: .*Permission denied"):
        piped(sshd.node(0, "gpu-a"), ["true"]).__enter__()
    shutil.copy(sshd.folder / "user.pub", sshd.folder / "authorized")
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-N", "secret", "-P", "", "-f", sshd.folder / "user"], check=True
    )
    with pytest.raises(UnreachableError, match=r"gpu-a .*passphrase") as refused:
        connect(sshd).run(["true"])
    assert "ssh-add" in refused.value.hint
    with pytest.raises(UnreachableError, match=r"gpu-a .*: the host name nowhere\.invalid does not resolve"):
        connect(sshd, "nowhere.invalid").run(["true"])
    with pytest.raises(
        UnreachableError, match=rf"gpu-a .*{sshd.addresses[0]}:1\): cannot be reached: .*refused"
    ):
        connect(sshd, f"{sshd.addresses[0]}:1").run(["true"])


def test_the_first_proxy_setting_wins_and_none_is_not_a_host(either):
    """Configurations often have `Host *` with a jump host, and exceptions."""
    sshd = either
    text = sshd.config.read_text()
    more = f"Host h1\n  ProxyCommand none\nHost inner\n  HostName {sshd.addresses[1]}\n  ProxyJump h2,h1\n"
    more += "Host *\n  ProxyJump h0\n"
    rest = f"  User {getpass.getuser()}\n  IdentityFile {sshd.folder / 'user'}\n  UserKnownHostsFile {sshd.known_hosts}\n"
    sshd.config.write_text(f"Host h0\n  ProxyJump none\n{text}{more}{rest}  Port {sshd.port}\n")

    before = (sshd.folder / "log").read_text().count("Accepted publickey")
    shell = connect(sshd, "inner")
    assert shell.run(["echo", "through"]).out == "through\n"
    assert (sshd.folder / "log").read_text().count("Accepted publickey") == before + 4
    jumps = ["pgrep", "-f", rf"ssh .*-W \[{sshd.addresses[1]}\]:{sshd.port} "]
    assert LocalShell().run(jumps).code == 0
    shell.close()
    assert wait_until(lambda: LocalShell().run(jumps).code == 1)


STARTING = """
import os, signal, threading
from cluster.transport.process import interruptible, started

def start_and_interrupt(thread, start=threading.Thread.start):
    start(thread)
    os.kill(os.getpid(), signal.SIGINT)

def work():
    with started(["sleep", "600"]) as process:
        process.wait()

threading.Thread.start = start_and_interrupt
try:
    interruptible(work)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_ends_a_transfer_that_is_just_starting():
    """The signal arrives when the thread of the transfer exists, before anybody waits for its result."""
    done = interrupted(STARTING, timeout_s=60)
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


CONNECTING = """
import os, signal, sys, threading, time
from pathlib import Path
from cluster.spec.model import Machine
from cluster.transport import process, reach
node, port = Machine("gpu-a", "", login="silent", ssh_config=sys.argv[1]), int(sys.argv[2])

def unanswered():
    return Path("/proc/self/net/tcp").read_text().count(f":{port:04X} 02 ")  # SYN_SENT

before = unanswered()  # the connections that fill the queue

def interrupt():
    while unanswered() == before:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
began = time.monotonic()
try:
    process.interruptible(lambda: reach(node).run(["true"]))
except KeyboardInterrupt:
    print(time.monotonic() - began, flush=True)
"""


def test_ctrl_c_ends_a_login_to_a_machine_that_does_not_answer(tmp_path):
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        port = server.getsockname()[1]
        for _ in range(4):  # the queue of the socket is full, so the system answers no further connection
            client = opened.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        (tmp_path / "known_hosts").write_text(f"[127.0.0.1]:{port} {KEY}\n")
        (tmp_path / "config").write_text(
            f"Host silent\n  HostName 127.0.0.1\n  Port {port}\n  UserKnownHostsFile {tmp_path}/known_hosts\n"
        )
        done = interrupted(CONNECTING, tmp_path / "config", port, timeout_s=60)
    assert float(done.stdout) < CONNECT_TIMEOUT_S / 2, done.stderr
