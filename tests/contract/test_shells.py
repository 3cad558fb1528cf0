"""One suite over every way to reach a machine, against a real sshd; then what only SSH can meet."""

import contextlib
import getpass
import os
import re
import shlex
import shutil
import socket
import subprocess
import threading
import time

import pytest

from cluster import files, rsync
from cluster.errors import ClusterError, UnreachableError
from cluster.model import Node
from cluster.shells import LocalShell, close_all, reach
from cluster.shells.ssh import _connection, _line
from tests.contract.sshd import Sshd, addresses

HOSTILE = ["a'; echo foo", 'a"=0"', "one\ntwo", "$HOME `id` \\", "", "-n", "ünïcode", "!x *"]


@pytest.fixture(params=["local", "ssh"])
def shell(request):
    if request.param == "local":
        yield reach(Node("here", "127.0.0.1"))
        return
    server = request.getfixturevalue("sshd")
    yield reach(Node("gpu-a", server.addresses[0], login="h0", ssh_config=str(server.config)))
    close_all()


def test_arguments_input_output_and_exit_code_arrive_as_they_are(shell):
    done = shell.run(["python3", "-c", "import sys; print(sys.argv[1:])", *HOSTILE])
    assert (done.code, done.out, done.err) == (0, f"{HOSTILE}\n", "")
    done = shell.run(["bash", "-c", "cat; echo oops >&2; exit 7"], stdin="first\nlast $HOME")
    assert (done.code, done.out, done.err, done.last_line) == (7, "first\nlast $HOME", "oops\n", "oops")


def test_a_megabyte_each_way_does_not_lock_up(shell):
    done = shell.run(["bash", "-c", "cat; head -c 1000000 /dev/zero | tr '\\0' e >&2"], stdin="x" * 1_000_000)
    assert (done.code, len(done.out), len(done.err)) == (0, 1_000_000, 1_000_000)


def test_a_command_that_hangs_is_an_error_in_time_and_the_shell_goes_on(shell):
    began = time.monotonic()
    with pytest.raises(UnreachableError, match=r"`sleep 30` did not answer within 0.5 s"):
        shell.run(["sleep", "30"], timeout_s=0.5)
    assert time.monotonic() - began < 5
    assert shell.run(["echo", "still here"]).out == "still here\n"


def test_a_stream_carries_bytes_both_ways(shell):
    sent = os.urandom(3_000_000)
    with shell.stream(["bash", "-c", "cat; echo done >&2; exit 3"]) as stream:

        def write():
            stream.stdin.write(sent)
            stream.stdin.close()

        writer = threading.Thread(target=write)
        writer.start()
        received = stream.stdout.read()
        writer.join()
        done = stream.wait(10)
    assert received == sent
    assert (done.code, done.err) == (3, "done\n")


def test_a_stream_that_is_left_ends_its_command(shell, tmp_path):
    mark = str(tmp_path / "mark")
    with shell.stream(["bash", "-c", 'while echo x; do sleep 0.1; done; touch "$1"', "loop", mark]) as stream:
        assert stream.stdout.readline() == b"x\n"
    until = time.time() + 5
    pattern = f"loop {mark}"
    while subprocess.run(["pgrep", "-f", pattern], capture_output=True, check=False).stdout and time.time() < until:
        time.sleep(0.1)
    assert not subprocess.run(["pgrep", "-f", pattern], capture_output=True, check=False).stdout


def test_programs_are_found_where_a_session_without_a_login_may_not_look(shell):
    folders = shell.run(["bash", "-c", 'echo "$PATH"']).out.strip().split(":")
    assert {"/usr/sbin", "/usr/lib/wsl/lib"} <= {*folders}


def connect(server, login="h0"):
    close_all()
    return reach(Node("gpu-a", server.addresses[0], login=login, ssh_config=str(server.config)))


def test_one_connection_is_used_for_everything_and_replaced_when_it_breaks(sshd):
    shell = connect(sshd)
    for _ in range(3):
        shell.run(["true"])
    assert (sshd.folder / "log").read_text().count("Accepted publickey") == 1
    sshd.drop_sessions()
    assert shell.run(["echo", "again"]).out == "again\n"
    assert (sshd.folder / "log").read_text().count("Accepted publickey") == 2


@pytest.fixture
def greeting(tmp_path, worker):
    """A machine whose ~/.bashrc prints, the last line without its end, and notes that it was read."""
    server = Sshd(tmp_path / "sshd", addresses(worker, 1), bare=True)
    (server.folder / ".bashrc").write_text(
        "echo Welcome to gpu-a; printf 'have a nice'\n"
        "echo bash: /usr/share/greeting: No such file or directory >&2; echo >> ~/read\n"
    )
    yield server
    close_all()
    server.stop()


def test_what_a_login_shell_prints_is_no_output_of_a_command(greeting):
    shell = connect(greeting)
    assert shell.run(["echo", "mine"]).out == "mine\n"
    done = shell.run(["bash", "-c", "bash -c 'cat; exit 7'"], stdin="one\ntwo")
    assert (done.code, done.out, done.err) == (7, "one\ntwo", "")
    assert (greeting.folder / "read").read_text() == "\n" * 2  # once for each command
    sent = os.urandom(1_000_000)
    with shell.stream(["bash", "-c", "cat; exit 3"]) as stream:
        stream.stdin.write(b"first\n" + sent)
        stream.stdin.close()
        assert stream.stdout.readline() == b"first\n"
        assert stream.stdout.read(1000) + stream.stdout.read() == sent
        assert stream.wait(10).code == 3
    with shell.stream(["bash", "-c", "echo mine >&2; exit 3"]) as stream:
        assert stream.wait(10).err == "mine\n"


def test_a_greeting_does_not_keep_files_from_being_compared_sent_and_fetched(greeting, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a").write_text("a")
    node = Node("gpu-a", "", login="h0", ssh_config=str(greeting.config), data_dir=str(tmp_path / "there"))
    assert files.differences([node], str(tmp_path / "set"))["gpu-a"].missing == ("a",)
    files.sync([node], str(tmp_path / "set"), copy=True)
    assert not files.differences([node], str(tmp_path / "set"))["gpu-a"]
    files.collect(node, files.mirror(node, str(tmp_path / "set")), str(tmp_path / "back"))
    assert (tmp_path / "back" / "a").read_text() == "a"


def test_a_greeting_is_not_taken_for_the_reason_of_a_failure(greeting, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a").write_text("a")
    (tmp_path / "file").write_text("")
    node = Node("gpu-a", "", login="h0", ssh_config=str(greeting.config), data_dir=str(tmp_path / "file"))
    done = files.sync([node], tmp_path / "set")["gpu-a"]
    assert isinstance(done, ClusterError)
    assert done.message.endswith(": Not a directory")
    said = "bash: /usr/share/greeting: No such file or directory"
    assert rsync.reason(f'{said}\nrsync: [Receiver] mkdir "/a/b" failed: Not a directory (20)') == "Not a directory"


def test_a_login_shell_that_never_gets_to_the_command_is_an_error_that_quotes_it(greeting):
    (greeting.folder / ".bashrc").write_text("echo This account is closed.; exit 0\n")
    with pytest.raises(
        UnreachableError, match=r"^gpu-a: commands do not run there: This account is closed\.$"
    ) as refused:
        connect(greeting).run(["true"])
    assert refused.value.hint == f'try by hand: ssh -F {greeting.config} h0 "bash --version"'


@pytest.mark.parametrize("login", [each for each in ("sh", "bash", "zsh", "fish", "tcsh", "csh") if shutil.which(each)])
def test_any_login_shell_passes_a_command_on_as_it_is(login):
    """Of those that this machine has; csh is the strictest, and what it takes no part of is nowhere in the line."""
    words = [*HOSTILE, "tab\t\x7f", "\\0041 \\\\ \\'", "%s ~ [a] {b,c} #", "it's long, isn't it! " * 1000, "the end\n"]
    line = _line(["python3", "-c", "import sys; print(sys.argv[1:])", *words])
    assert line.isascii()
    assert line.isprintable()
    assert "!" not in line
    assert "\\\\" not in line
    assert max(map(len, shlex.split(line))) < 1024
    done = LocalShell().run([login, "-c", line])
    assert (done.code, done.out.partition("\n")[2], done.err) == (0, f"{words}\n", "clusterctl begins\n")
    # what goes on in the background keeps no caller waiting: csh hands copies of its own input and output down
    LocalShell().run([login, "-c", _line(["bash", "-c", "sleep 20 <&- >&- 2>&- &"])], timeout_s=10)


def test_an_unknown_host_key_is_refused_with_its_fingerprint_and_the_command_that_adds_it(sshd):
    fingerprint = subprocess.run(
        ["ssh-keygen", "-lf", sshd.folder / "host.pub"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    sshd.known_hosts.write_text("")
    with pytest.raises(UnreachableError) as refused:
        connect(sshd).run(["true"])
    assert refused.value.message.startswith("gpu-a (")
    assert fingerprint in refused.value.message
    assert f"ssh-keyscan -p {sshd.port} {sshd.addresses[0]} >> ~/.ssh/known_hosts" in refused.value.hint


def test_another_host_key_than_the_known_one_is_refused(sshd):
    other = " ".join((sshd.folder / "user.pub").read_text().split()[:2])
    sshd.known_hosts.write_text(f"[{sshd.addresses[0]}]:{sshd.port} {other}\n")
    with pytest.raises(UnreachableError, match=r"gpu-a .*: its host key is not the one in known_hosts") as refused:
        connect(sshd).run(["true"])
    assert "ssh-keygen -R" in refused.value.hint


def test_a_refused_login_a_locked_key_and_names_that_lead_nowhere_say_so(sshd):
    (sshd.folder / "authorized").write_text("")
    with pytest.raises(UnreachableError, match=r"gpu-a .*: the login is refused"):
        connect(sshd).run(["true"])
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-P", "", "-f", sshd.folder / "user"], check=True)
    with pytest.raises(UnreachableError, match=r"gpu-a .*passphrase") as refused:
        connect(sshd).run(["true"])
    assert "ssh-add" in refused.value.hint
    with pytest.raises(UnreachableError, match=r"gpu-a: the host name nowhere\.invalid does not resolve"):
        connect(sshd, "nowhere.invalid").run(["true"])
    with pytest.raises(
        UnreachableError, match=rf"gpu-a .*{re.escape(sshd.addresses[0])}:1\): cannot be reached: .*refused"
    ):
        connect(sshd, f"{sshd.addresses[0]}:1").run(["true"])


def test_proxy_jump_is_honoured(sshd):
    with sshd.config.open("a") as file:
        file.write(f"Host inner\n  HostName {sshd.addresses[1]}\n  Port {sshd.port}\n  ProxyJump h0\n")
        file.write(f"  IdentityFile {sshd.folder / 'user'}\n  UserKnownHostsFile {sshd.known_hosts}\n")
    assert connect(sshd, "inner").run(["echo", "through"]).out == "through\n"
    assert (sshd.folder / "log").read_text().count("Accepted publickey") == 2


def test_of_several_proxies_the_first_one_said_counts_and_none_is_no_host(sshd):
    """`Host *` with a jump host, and hosts that want none, is how it is usually written."""
    text = sshd.config.read_text()
    more = f"Host h1\n  ProxyCommand none\nHost inner\n  HostName {sshd.addresses[1]}\n  ProxyJump h2,h1\n"
    more += "Host *\n  ProxyJump h0\n"
    rest = (
        f"  User {getpass.getuser()}\n  IdentityFile {sshd.folder / 'user'}\n  UserKnownHostsFile {sshd.known_hosts}\n"
    )
    sshd.config.write_text(f"Host h0\n  ProxyJump none\n{text}{more}{rest}  Port {sshd.port}\n")

    def way(login):
        connection, hops = _connection(login, str(sshd.config), 5), []
        while connection := connection.gateway:
            hops.append(connection.original_host)
        return hops

    assert (way("h0"), way("h1"), way("h2"), way("inner")) == ([], [], ["h0"], ["h1", "h2", "h0"])
    before = (sshd.folder / "log").read_text().count("Accepted publickey")
    assert connect(sshd, "inner").run(["echo", "through"]).out == "through\n"
    assert (sshd.folder / "log").read_text().count("Accepted publickey") == before + 4


def test_an_included_file_is_read_again_when_it_has_changed_or_is_new_and_a_circle_is_an_error(sshd, tmp_path):
    outer = tmp_path / "outer"
    outer.write_text(f"Include {tmp_path}/conf.d/*\n")
    (tmp_path / "conf.d").mkdir()

    def shell():
        close_all()
        return reach(Node("gpu-a", "", login="h0", ssh_config=str(outer)))

    with pytest.raises(UnreachableError, match=r"^gpu-a: the host name h0 does not resolve"):
        shell().run(["true"])
    (tmp_path / "conf.d" / "hosts").write_text(sshd.config.read_text())
    assert shell().run(["echo", "there"]).out == "there\n"
    (tmp_path / "conf.d" / "hosts").write_text(f"Include {outer}\n")
    with pytest.raises(UnreachableError, match="Too many recursive configuration includes") as refused:
        shell().run(["true"])
    assert refused.value.hint == f"check it: ssh -F {outer} -G h0"


def pour(source, sink):
    """Everything that one connection brings into the other, and the end of it; a reset is an end as well."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def test_a_server_that_hangs_up_at_first_is_asked_again(sshd):
    """As sshd does when more log in at once than its MaxStartups; a second server in front of it, here."""
    with socket.create_server((sshd.addresses[2], 0)) as front:
        sshd.known_hosts.write_text(sshd.known_hosts.read_text().replace(sshd.addresses[2], "other"))
        key = " ".join((sshd.folder / "host.pub").read_text().split()[:2])
        port = front.getsockname()[1]
        with sshd.known_hosts.open("a") as known:
            known.write(f"[{sshd.addresses[2]}]:{port} {key}\n")
        turned_away = []

        def serve():
            for _ in range(3):
                caller, _ = front.accept()
                caller.sendall(b"Exceeded MaxStartups\r\n")
                caller.close()
                turned_away.append(caller)
            caller, _ = front.accept()
            with caller, socket.create_connection((sshd.addresses[0], sshd.port)) as server:
                back = threading.Thread(target=pour, args=(server, caller))
                back.start()
                pour(caller, server)
                back.join()

        serving = threading.Thread(target=serve)
        serving.start()
        shell = connect(sshd, f"{getpass.getuser()}@h2:{port}")
        assert shell.run(["echo", "let in"]).out == "let in\n"
        assert len(turned_away) == 3
        close_all()
        serving.join(10)


def test_jump_hosts_that_need_each_other_are_an_error(tmp_path):
    config = tmp_path / "config"
    config.write_text("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    with pytest.raises(UnreachableError, match="ProxyJump leads in a circle: a -> b -> a"):
        reach(Node("gpu-a", "", login="a", ssh_config=str(config))).run(["true"])
