"""Runs the command line and says what went wrong: two lines for an error of the user, a traceback for a defect."""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
import traceback

from trainer import contract
from trainer.errors import TrainerError
from trainer.events import Events
from trainer.ranks import end_with_parent
from trainer.training.signals import Stopped

EXIT_INTERRUPTED = 130
# What gloo and NCCL raise when the process at the other end is gone, or does not answer.
LOST: tuple[str, ...] = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
LOST += ("remote process exited", "NCCL communicator was aborted", "ncclRemoteError")
# What the system may refuse, and what to do; no defect of ours.
_ROOM = "make room there; --resume goes on from the last checkpoint"
_RIGHTS = "give this user the right to it, or run as its owner"
REFUSED = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or write to another disk: --project",
    errno.EACCES: _RIGHTS,
    errno.EROFS: "a folder that can be written to: --project, or a mount that ends in :rw",
    errno.ENAMETOOLONG: "use a shorter path",
    errno.EISDIR: "a file is to be there: move that folder away, or write elsewhere",
}
LOST_HINT = "what it died of stands in its own log; --resume goes on from the last checkpoint"


def main() -> None:
    """Run the command line; an error of the user is two lines on stderr, exit 2 and a `failed` event."""
    end_with_parent()
    if "OMP_WAIT_POLICY" not in os.environ:
        # OpenMP's threads wait for each other by spinning, by default for so long that a process with two threads
        # runs ten times slower as soon as anything else wants a core. Read once, when torch is loaded.
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    try:
        from trainer.cli import app  # takes a moment, in which Ctrl-C may come

        app()
    except SystemExit as end:  # how typer ends, also when all is well
        if not _has_met():
            raise
        atexit._run_exitfuncs()  # the loader's workers end, the temporary folders go
        _exit(end.code if isinstance(end.code, int) else int(end.code is not None))
    except KeyboardInterrupt:
        _exit(EXIT_INTERRUPTED)
    except TrainerError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        _tell_failure(error.message, error.hint, contract.EXIT_BAD_INPUT)
        _exit(contract.EXIT_BAD_INPUT)
    except Stopped as stop:
        by_hand = stop.signal == signal.SIGINT
        print(f"stopped by {stop}; a checkpoint is written, --resume goes on from it", file=sys.stderr)
        _tell_failure(f"stopped by {stop} after a checkpoint", "", contract.EXIT_RUN_ME_AGAIN)
        _exit(EXIT_INTERRUPTED if by_hand else contract.EXIT_RUN_ME_AGAIN)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        if _is_echo(error):
            is_timeout = any(word in first.lower() for word in ("timed out", "timeout"))
            what = f"another rank ended{' or cannot be reached' if is_timeout else ''}: {first}"
            print(f"error: {what}\nhint: {LOST_HINT}", file=sys.stderr)
            _tell_failure(what, LOST_HINT, 1, echo=True)
        elif isinstance(error, OSError) and error.errno in REFUSED:
            what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
            print(f"error: {what}\nhint: {REFUSED[error.errno]}", file=sys.stderr)
            code = contract.EXIT_BAD_INPUT if error.errno in (errno.EACCES, errno.ENAMETOOLONG) else 1
            _tell_failure(what, REFUSED[error.errno], code)
            _exit(code)
        else:  # a defect: the traceback stays, the launcher gets its last line
            _tell_failure(f"{type(error).__name__}: {first}", "", 1)
            traceback.print_exc()
        _exit(1)


def _is_echo(error: Exception) -> bool:
    """Whether another rank ended or cannot be reached, and `error` is only the consequence."""
    if isinstance(error, OSError):  # of a file, or of a pipe to a process of this rank
        return False
    # Clients of the ranks' store raise these. Without a process group torch.distributed may not be loaded.
    network, store = (
        getattr(sys.modules.get("torch.distributed"), f"Dist{kind}Error", ()) for kind in ("Network", "Store")
    )
    if isinstance(error, network) and os.environ.get("RANK") == "0" and not _has_met():
        return False  # rank 0 hosts the store: its own port or address is at fault
    first = (str(error).splitlines() or [""])[0]
    return isinstance(error, (network, store)) or any(sign in first for sign in LOST)


def _has_met() -> bool:
    dist = sys.modules.get("trainer.dist")
    return dist is not None and bool(dist.has_met())


def _exit(code: int) -> None:
    """End now, where there is or was a process group: taking it down while other ranks end too can abort or hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    if _has_met():
        os._exit(code)
    sys.exit(code)


def _tell_failure(error: str, hint: str, exit_code: int, *, echo: bool = False) -> None:
    rank = os.environ.get("RANK", "0")
    number = int(rank) if rank.isdigit() else 0
    Events(os.environ).emit(contract.FAILED, rank=number, error=error, hint=hint, exit_code=exit_code, echo=echo)


if __name__ == "__main__":
    main()
