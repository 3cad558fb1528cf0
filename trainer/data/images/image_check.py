"""Check of many images: their headers in threads, or all their data in processes (image_worker.py)."""

import contextlib
import json
import os
import queue
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.config.faults import Fault, first_of
from trainer.data.dataset import IMAGE_HINT
from trainer.data.images import image_worker
from trainer.data.images.image_file import DAMAGED, DARK, ODDITIES, ImageState, UnreadableError, read_header
from trainer.data.progress import in_threads, track
from trainer.distributed.comm import usable_cores

_MOST_WORKERS = 16
_PER_WORKER = 32  # images that are worth the start of another process
_DARK_HINT = "multiply the values, by 16 for data of 12 bits, or save 8 bits"


def read_headers(paths: Sequence[str]) -> list[ImageState]:
    """Return the states of images by their headers; one that does not end as its format does is decoded."""

    def state(path: str) -> ImageState | None:
        try:
            header = read_header(path)
        except UnreadableError as error:
            return ImageState(problem=str(error))
        return ImageState(header.height, header.width) if header.is_whole else None

    states = list(in_threads(state, paths, "reading images"))
    in_doubt = iter(decode_images([path for path, found in zip(paths, states, strict=True) if not found]))
    return [found or next(in_doubt) for found in states]


def decode_images(paths: Sequence[str]) -> list[ImageState]:
    """Return the states of images after decoding each of them once."""
    count = min(usable_cores(), _MOST_WORKERS, -(-len(paths) // _PER_WORKER))
    if not count:
        return []
    free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    workers = [_Worker() for _ in range(count)]
    for worker in workers:
        free.put(worker)

    def ask(path: str) -> ImageState:
        worker = free.get()
        try:
            return worker.ask(path)
        finally:
            free.put(worker)

    try:
        with ThreadPoolExecutor(count) as pool:
            return list(track(pool.map(ask, paths), len(paths), "decoding images"))
    finally:
        for worker in workers:
            worker.stop()


def faults_of(path: str, state: ImageState, counts: dict[str, int]) -> list[Fault]:
    """Return the fault or the warnings of an image.

    `counts` are the images with each oddity, of which only the first is a warning that counts them; then it is removed.
    """
    if state.problem:
        return [Fault(path, 0, f"not a readable image: {state.problem}", IMAGE_HINT)]
    faults = []
    for kind, detail in state.oddities.items():
        count = 1 if kind == DAMAGED else counts.pop(kind, 0)
        if count:
            what = ODDITIES[kind].format(detail) + first_of(count)
            hint = _DARK_HINT if kind == DARK else "save the image again with a program that can show it"
            faults.append(Fault(path, 0, what, hint, warning=True))
    return faults


class _Worker:
    """A process that decodes images; it is started again after an image that ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def _start(self) -> "subprocess.Popen[str]":
        root = str(Path(__file__).parents[2])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        }
        command = [sys.executable, "-m", image_worker.__name__]
        pipe = subprocess.PIPE
        # Not in the current folder, whose files could have the names of modules.
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8", env=environment, cwd=os.sep
        )

    def ask(self, path: str) -> ImageState:
        self._process = self._process or self._start()
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(f"{json.dumps(os.path.abspath(path))}\n")  # noqa: PTH100
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return ImageState(**json.loads(answer))
        code = self._process.wait()
        self.stop()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return ImageState(
            problem=f"decoding it ended the decoder with {how}; is there enough memory?", is_final=False
        )

    def stop(self) -> None:
        if self._process:
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if pipe:
                        pipe.close()
            self._process.wait()
            self._process = None
