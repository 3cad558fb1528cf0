"""Entry point: runs the command line and reports errors."""

import atexit
import contextlib
import errno
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from trainer import cache_folders, contract, streams
from trainer.distributed.spawn import end_with_parent
from trainer.engine.events import Events
from trainer.engine.signals import Stopped
from trainer.errors import TrainerError

EXIT_HANGUP = 129
EXIT_INTERRUPTED = 130
EXIT_LIMIT_S = 10.0  # for the exit functions of all libraries
# Errors of gloo and NCCL after another rank has exited or does not answer.
_GLOO = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
PEER_ERRORS = (*_GLOO, "remote process exited", "NCCL communicator was aborted", "ncclRemoteError")
# System errors that are not defects of the trainer; the code is 2 where another path avoids the error.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EACCES, errno.ENAMETOOLONG, errno.EROFS)
SYSTEM_ERRORS = {
    **dict.fromkeys(_NO_SPACE, ("free space there, then resume from the last checkpoint: --resume", 1)),
    **dict.fromkeys(_REFUSED, ("use another path, or let this user write there", contract.EXIT_BAD_INPUT)),
    errno.EISDIR: ("a file is expected there: move that folder", 1),
}
PEER_HINT = "its own log has the cause; resume from the last checkpoint: --resume"


def run() -> NoReturn:
    """Run the command line and end the process without the interpreter's shutdown.

    torch's part of the shutdown takes 0.9 s, and destructors of a process group can abort or hang while other ranks
    exit.
    """
    streams.take()
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # until training handles it
        signal.signal(signal.SIGHUP, lambda *_: sys.exit(EXIT_HANGUP))
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if code == 0 or not _has_joined():
        _limit_exit(code)
        atexit._run_exitfuncs()  # ends dataloader workers, removes temporary folders
    streams.flush()
    os._exit(EXIT_HANGUP if streams.is_closed() and code == 0 else code)


def _limit_exit(code: int) -> None:
    """End the process with `code` after EXIT_LIMIT_S, and say which exit function it was in."""

    def end() -> None:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        place = f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        text = f"{rank}ended after {EXIT_LIMIT_S:.0f} s in an exit function of a library: {place}"
        with contextlib.suppress(OSError):  # a closed pipe
            print(text, file=sys.stderr, flush=True)
        os._exit(code)

    timer = threading.Timer(EXIT_LIMIT_S, end)
    timer.daemon = True
    timer.start()


def _choose_caches() -> None:
    """Choose where libraries keep compiled code and downloads, before they are imported and read the variables.

    Where no cache folder can be written, the libraries choose.
    """
    of_user = cache_folders.of_user()
    of_node = cache_folders.of_node()
    if of_node:
        # An image may bring downloads in its user's cache folder.
        if "HF_HOME" not in os.environ and not (of_user / "huggingface").exists():
            os.environ.setdefault("HF_HUB_CACHE", str(of_node / "huggingface"))
        if not (of_user / "torch").exists():
            os.environ.setdefault("TORCH_HOME", str(of_node / "torch"))
    compiled = of_node / "compiled" if of_node else of_user / "trainer" / "compiled"
    if cache_folders.can_be_made(compiled):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
        os.environ.setdefault("TRITON_CACHE_DIR", str(compiled / "triton"))


def _check_folder() -> None:
    """Raise TrainerError if the current folder has been removed. oneMKL would end the process while torch loads it."""
    try:
        os.getcwd()  # noqa: PTH109 (Path.cwd does the same)
    except FileNotFoundError:
        raise TrainerError("the current folder has been removed", "cd to a folder that exists") from None


def main() -> None:
    """Run the command line; an error of the user is two lines on stderr, exit 2 and a `failed` event."""
    end_with_parent()
    if "OMP_WAIT_POLICY" not in os.environ:
        # OpenMP's threads spin while they wait. By default they spin so long that any other load on a core slows a
        # process with two threads tenfold. OpenMP reads the variable once, when torch is loaded.
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    _choose_caches()
    try:
        _check_folder()
        from trainer.cli import app  # slow import: Ctrl-C is handled from here on

        try:
            app(prog_name="trainer")
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would interrupt the exit functions
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except TrainerError as error:
        _fail(error.message, error.hint, contract.EXIT_BAD_INPUT)
    except Stopped as stop:
        by_hand = stop.signal == signal.SIGINT
        print(f"stopped by {stop} {stop.when}" + (f"; {stop.hint}" if stop.hint else ""), file=sys.stderr)
        _emit_failure(f"stopped by {stop} {stop.when}", "", stop.exit_code)
        sys.exit(EXIT_INTERRUPTED if by_hand else stop.exit_code)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        if _is_peer_error(error):
            _fail(f"another rank ended or cannot be reached: {first}", PEER_HINT, 1, echo=True)
        if isinstance(error, OSError) and error.errno in SYSTEM_ERRORS:
            where = f"{error.filename}: " if error.filename else ""
            _fail(f"{where}{error.strerror}", *SYSTEM_ERRORS[error.errno])
        if isinstance(error, (RuntimeError, MemoryError)) and "torch" in sys.modules:
            from trainer.engine.memory import HINT, is_out_of_memory

            if is_out_of_memory(error):
                _fail(f"out of memory: {first}", HINT, contract.EXIT_BAD_INPUT)
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            hint = "in a clone of the repository: pip install '.[trainer]'"
            _fail(f"{sys.executable} has no torch", hint, contract.EXIT_BAD_INPUT)
        _emit_failure(f"{type(error).__name__}: {first}", "", 1)  # a defect
        traceback.print_exc()
        sys.exit(1)


def _is_peer_error(error: Exception) -> bool:
    """Whether `error` is the consequence of another rank that ended or cannot be reached."""
    if isinstance(error, OSError):  # a file, or a pipe to a process of this rank
        return False
    # Errors of the rendezvous store. Without a process group, torch.distributed may not be loaded.
    distributed = sys.modules.get("torch.distributed")
    network, store = (getattr(distributed, f"Dist{kind}Error", ()) for kind in ("Network", "Store"))
    if isinstance(error, network) and os.environ.get("RANK") == "0" and not _has_joined():
        return False  # rank 0 hosts the store: its own port or address is wrong
    first = (str(error).splitlines() or [""])[0]
    return isinstance(error, (network, store)) or any(sign in first for sign in PEER_ERRORS)


def _has_joined() -> bool:
    dist = sys.modules.get("trainer.distributed.comm")
    return dist is not None and bool(dist.has_joined())


def _fail(message: str, hint: str, code: int, *, echo: bool = False) -> NoReturn:
    """Print an error in one or two lines, emit it, and exit."""
    print(f"error: {message}", *([f"hint: {hint}"] if hint else []), sep="\n", file=sys.stderr)
    _emit_failure(message, hint, code, echo=echo)
    sys.exit(code)


def _emit_failure(error: str, hint: str, exit_code: int, *, echo: bool = False) -> None:
    rank = os.environ.get("RANK", "0")
    number = int(rank) if rank.isdigit() else 0
    Events(os.environ).emit(
        contract.FAILED, rank=number, error=error, hint=hint, exit_code=exit_code, echo=echo
    )


if __name__ == "__main__":
    run()
