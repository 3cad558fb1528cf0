"""What a user does with a running job, on any backend: exec, shell, cp, port-forward. Each check is one function."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.request


def wait_until_it_runs(clusterctl, job, ranks=2):
    """Wait until each rank has printed a line."""
    until = time.time() + 60
    while not all(
        f"tick 1: rank {rank} of" in (text := clusterctl.run("logs", job)[1]) for rank in range(ranks)
    ):
        assert time.time() < until, text
        time.sleep(0.5)


def check_exec(clusterctl, job, nodes):
    text = clusterctl.expect(
        7, "exec", job, "--node", "1", "--", "sh", "-c", 'echo "rank $PET_NODE_RANK at $(pwd -P)"; exit 7'
    )
    assert re.fullmatch(r"rank 1 at /\S*\n", text), text
    text = clusterctl.expect(
        0, "exec", job, "--all", "--", "sh", "-c", "echo $CLUSTER_ATTEMPT $CLUSTER_JOB_ID"
    )
    assert sorted(text.splitlines()) == [f"{node} | 1 {job}" for node in nodes], text
    words = [sys.executable, "-m", "cluster", "exec", job, "--", "sh", "-c", "wc -c; echo wrong >&2"]
    data = bytes(range(256)) * 1000
    done = subprocess.run(
        words, input=data, capture_output=True, cwd=clusterctl.folder, env=clusterctl.env, check=True
    )
    assert done.stdout.strip() == b"256000"
    assert b"wrong" in done.stderr


def check_top(clusterctl, job, nodes):
    until = time.time() + 20
    while True:
        text = clusterctl.expect(0, "top", job, "--json")
        samples = [node["usage"] for node in json.loads(text)["nodes"]]
        if all(samples):
            break
        assert time.time() < until, text
        time.sleep(0.5)
    assert [row["rank"] for usage in samples for row in usage["ranks"]] == [0, 1]
    assert all(row["rss"] > 1 << 20 for usage in samples for row in usage["ranks"])
    text = clusterctl.expect(0, "top", job)
    assert [line.split()[:2] for line in text.splitlines()[2:]] == [[nodes[0], "0"], [nodes[1], "1"]]


def check_cp(clusterctl, job, nodes):
    script = 'mkdir -p "$CLUSTER_RUN_DIR/made/deep" && seq 100000 > "$CLUSTER_RUN_DIR/made/deep/a file"'
    assert clusterctl.run("exec", job, "--node", "1", "--", "sh", "-c", script)[0] == 0
    into = clusterctl.folder / "copies"
    into.mkdir()
    clusterctl.expect(0, "cp", f"{job}:made", str(into), "--node", nodes[1])
    assert (into / "made" / "deep" / "a file").read_text().splitlines()[-1] == "100000"
    check_cp_targets(clusterctl, job, into)
    for path in ("none", "none/deeper"):
        text = clusterctl.expect(3, "cp", f"{job}:{path}", str(into))
        assert text == f"error: {nodes[0]}: {path}: no such file or folder\n"
    assert [path.name for path in into.iterdir()] == ["made"]
    # a file that grows while it is copied
    grow = (
        'cd "$CLUSTER_RUN_DIR" && touch made/grows && seq 3000000 > log && { while [ -e made/grows ]; do seq 9 >> log; '
        "sleep 0.01; done >/dev/null 2>&1 & }"
    )
    assert clusterctl.run("exec", job, "--node", "1", "--", "sh", "-c", grow)[0] == 0
    clusterctl.expect(0, "cp", f"{job}:log", str(into), "--node", "1")
    assert (into / "log").read_text().startswith("1\n2\n")
    assert (
        clusterctl.run("exec", job, "--node", "1", "--", "sh", "-c", 'rm "$CLUSTER_RUN_DIR/made/grows"')[0]
        == 0
    )


def check_cp_targets(clusterctl, job, into):
    """As with docker cp: a new name, a file that is replaced, a folder that is merged, and what does not fit."""
    file = into / "made/deep/a file"
    own = into / "made/own"
    own.touch()
    file.write_text("old")
    clusterctl.expect(0, "cp", f"{job}:made", str(into), "--node", "1")
    assert file.read_text().startswith("1\n")
    assert own.exists()
    elsewhere = clusterctl.folder / "elsewhere"
    elsewhere.mkdir()
    for name in ("named", "named"):  # the second one replaces the first
        clusterctl.expect(0, "cp", f"{job}:made/deep/a file", str(elsewhere / name), "--node", "1")
    clusterctl.expect(0, "cp", f"{job}:made/deep", str(elsewhere / "folder"), "--node", "1")
    assert sorted(str(path.relative_to(elsewhere)) for path in elsewhere.rglob("*")) == [
        "folder",
        "folder/a file",
        "named",
    ]
    (elsewhere / "deep").write_text("a file in the folder's place")
    for path, target, why in (
        ("made/deep", elsewhere, f"{elsewhere}/deep: it is not a folder, but the copy is one"),
        ("made/deep/a file", elsewhere / "none/name", f"{elsewhere}/none: no such folder"),
        ("made/deep/a file", f"{elsewhere}/none/", f"{elsewhere}/none/: no such folder"),
    ):
        code, text = clusterctl.run("cp", f"{job}:{path}", str(target), "--node", "1")
        assert (code, text.splitlines()[0]) == (2, f"error: {why}")
    assert (elsewhere / "deep").read_text() == "a file in the folder's place"


def check_port_forward(clusterctl, job, nodes, python):
    """Fetch a file from a web server on localhost of a node, with several connections at once."""
    port = 20000 + os.getpid() % 10000
    serve = ["sh", "-c", f'cd "$CLUSTER_RUN_DIR" && exec {python} -m http.server --bind 127.0.0.1 {port}']
    server = clusterctl.start("exec", job, "--node", "1", "--", *serve)
    forward = clusterctl.start("port-forward", job, f"{port + 1}:{port}", "--node", "1")
    try:
        assert (
            forward.stdout.readline()
            == f"http://localhost:{port + 1} is port {port} of {nodes[1]} (Ctrl-C to end)\n"
        )
        until = time.time() + 30
        while True:
            try:
                page = urllib.request.urlopen(f"http://127.0.0.1:{port + 1}/made/deep/", timeout=10).read()
                break
            except OSError:
                assert time.time() < until, "the forwarded port does not answer"
                time.sleep(0.3)
        assert b"a%20file" in page
        fetch = [
            sys.executable,
            "-c",
            "import sys, urllib.request as r; print(len(r.urlopen(sys.argv[1]).read()))",
        ]
        fetch.append(f"http://127.0.0.1:{port + 1}/made/deep/a%20file")
        fetches = [subprocess.Popen(fetch, stdout=subprocess.PIPE, text=True) for _ in range(4)]
        assert [process.communicate(timeout=60)[0] for process in fetches] == ["588895\n"] * 4
    finally:
        forward.send_signal(signal.SIGINT)
        rest = forward.communicate(timeout=20)[0]
        server.terminate()
        server.wait(20)
        server.stdout.close()
    assert forward.returncode == 130, rest


class Terminal:
    """A clusterctl command on a pseudo-terminal."""

    def __init__(self, clusterctl, *arguments, size=(33, 101)):
        pid, self.fd = pty.fork()
        if pid == 0:
            os.chdir(clusterctl.folder)
            os.execve(
                sys.executable,
                [sys.executable, "-m", "cluster", *arguments],
                {**clusterctl.env, "TERM": "xterm"},
            )
        self.pid = pid
        self.text = ""
        self.resize(*size)

    def resize(self, rows, columns):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text):
        os.write(self.fd, text.encode())

    def wait_for(self, pattern, timeout_s=30):
        until = time.time() + timeout_s
        while not re.search(pattern, self.text):
            assert time.time() < until, f"no {pattern}: {self.text}"
            if select.select([self.fd], [], [], 0.2)[0]:
                self.text += os.read(self.fd, 65536).decode(errors="replace")
        self.text = self.text[re.search(pattern, self.text).end() :]

    def exit_code(self, timeout_s=20):
        until = time.time() + timeout_s
        while time.time() < until:
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:  # the other side is closed
                    break
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def check_shell(clusterctl, job):
    """The window's size and its changes, Ctrl-C and the exit code are those of the shell on the node."""
    terminal = Terminal(clusterctl, "shell", job, "--node", "1")
    terminal.type("PS1='$ '; echo rank-$PET_NODE_RANK\n")
    terminal.wait_for(r"rank-1")
    # ssh can miss the signal of a new size until its next event, here a dot.
    size = "until [ $(stty size | tr ' ' x) = {} ]; do printf .; sleep 0.1; done; echo {}-$((6 * 7))\n"
    terminal.type(size.format("33x101", "first"))  # docker sets the size a moment after the start
    terminal.wait_for(r"first-42")
    terminal.resize(40, 90)
    terminal.type(size.format("40x90", "second"))
    terminal.wait_for(r"second-42")
    terminal.type("sleep 100; echo slept-$?\n")
    time.sleep(1)
    terminal.type("\x03")
    terminal.type("echo after-$((6 * 7))\n")
    terminal.wait_for(r"after-42")
    terminal.type("exit 7\n")
    assert terminal.exit_code() == 7, terminal.text


def check_refusals(clusterctl, job, nodes):
    """A job that has ended has no sessions, and its files are here."""
    for words in (
        ["exec", job, "--", "true"],
        ["exec", job, "--all", "--", "true"],
        ["shell", job],
        ["port-forward", job, "80"],
    ):
        code, text = clusterctl.run(*words)
        assert (code, text.splitlines()[0]) == (2, f"error: {job} is not running: stopped")
    clusterctl.expect(0, "cp", f"{job}:attempt-1/{nodes[0]}.log", str(clusterctl.folder / "copies"))
    assert "tick 1" in (clusterctl.folder / "copies" / f"{nodes[0]}.log").read_text()
