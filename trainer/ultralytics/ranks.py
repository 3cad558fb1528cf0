"""The package's trainers on the ranks of a job.

The package takes the number of entries of `device` for the world size, and the global rank for the number of a GPU. So
its trainers are subclassed: methods are overridden where that suffices, and what remains is replaced for the duration
of a call.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from trainer.distributed import comm
from trainer.errors import TrainerError
from trainer.ultralytics import data, package
from trainer.ultralytics.session import Session

_Base: Any = object  # a trainer of the package, see `on_all_ranks`


class _AllEpochsDone(Exception):
    """The checkpoint to resume from has all epochs, so that only the final validation remains."""


def on_all_ranks(trainer: Any, session: Session) -> Any:
    """Return a subclass of the package's trainer class `trainer` for this rank of the job."""
    return type(trainer.__name__, (_OnAllRanks, trainer), {"session": session})


class _OnAllRanks(_Base):  # type: ignore[misc]
    session: Session

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        session = self.session
        self.device = session.device
        alone = 0 if self.device.type == "cpu" else 1  # the package's number for a process without ranks
        self.world_size = session.world.size if session.world.size > 1 else alone
        self.ddp = False  # start no processes: the ranks run already
        # After NaN losses all ranks load the last checkpoint, also on machines without rank 0's weights.
        if session.copies and session.world.rank:
            self.last = session.copies.last
            self.best = session.copies.best

    def check_resume(self, overrides: dict[str, Any]) -> None:
        """Read the arguments of the run to resume. The folder and the paths are those of this machine."""
        super().check_resume(overrides)
        self.args.data = self.session.data or self.args.data
        folder = self.session.folder
        if folder is None and self.session.world.size > 1:
            # Ranks other than 0 would take an existing folder, and remove the table of that older run.
            find = importlib.import_module("ultralytics.cfg").get_save_dir
            folder = comm.broadcast(find(self.args) if self.session.world.rank == 0 else None)
        if folder:
            self.args.save_dir = str(folder)

    def get_dataset(self) -> Any:
        """Read the description of the dataset. Raise TrainerError if it cannot be used."""
        try:
            with data.beside(self.session.data):
                return super().get_dataset()
        except RuntimeError as error:  # the package's, for anything that is wrong with a dataset
            hint = "correct it; the format of a task's dataset: https://docs.ultralytics.com/datasets"
            raise TrainerError(f"data={self.session.data}: {package.first_line(error)}", hint) from None

    def build_dataset(self, *arguments: Any, **options: Any) -> Any:
        """Build a dataset; on a shared disk, rank 0's machine alone writes the cache of its labels."""
        if self.session.world.local_rank:
            return super().build_dataset(*arguments, **options)
        with self.session.first_machine_first():
            return super().build_dataset(*arguments, **options)

    def _setup_ddp(self) -> None:
        """Do nothing: this rank has joined the process group. The package's needs CUDA and the ranks of one machine."""

    def _setup_train(self, *arguments: Any, **options: Any) -> None:
        with _wrapping_on(self.session.device):
            super()._setup_train(*arguments, **options)

    def resume_training(self, ckpt: Any) -> None:
        """Load the state of a checkpoint."""
        if ckpt is not None and self.resume and ckpt["epoch"] + 1 >= self.epochs:
            raise _AllEpochsDone
        super().resume_training(ckpt)

    def _do_train(self, *arguments: Any, **options: Any) -> None:
        try:
            super()._do_train(*arguments, **options)
        except _AllEpochsDone:
            self.epoch = self.epochs - 1
            self.final_eval()
            if self.session.world.rank == 0:
                if self.args.plots:
                    self.plot_metrics()
                self.run_callbacks("on_train_end")

    def final_eval(self) -> None:
        """Validate best.pt on rank 0, whose machine alone has it.

        On several ranks the package would let each rank look for the file, and wait for hours for those without.
        """
        with self.session.final_validation() as is_mine:
            if is_mine:
                self._validate_best()

    def _validate_best(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(data.beside(self.session.data))
            if self.session.world.size > 1:
                stack.enter_context(_as_only_process())
                loader = self.test_loader  # it has this rank's share of the images
                build = importlib.import_module("ultralytics.data").build_dataloader
                options = {
                    "batch": loader.batch_size,
                    "workers": loader.num_workers,
                    "shuffle": False,
                    "rank": -1,
                }
                self.validator.dataloader = build(loader.dataset, **options)
            super().final_eval()


@contextlib.contextmanager
def _wrapping_on(device: torch.device) -> Iterator[None]:
    """Inside, let DistributedDataParallel use `device`.

    The package passes it the global rank as the number of the GPU (8.3), or the index None of a CPU (8.4).
    """
    # A class, because the package also compares types with it.
    parallel: Any = torch.nn.parallel
    original: Any = parallel.DistributedDataParallel

    class OnDevice(original):  # type: ignore[misc]
        def __init__(self, module: Any, device_ids: Any = None, **options: Any) -> None:
            super().__init__(module, device_ids=None if device.type == "cpu" else [device.index], **options)

    parallel.DistributedDataParallel = OnDevice
    try:
        yield
    finally:
        parallel.DistributedDataParallel = original


@contextlib.contextmanager
def _as_only_process() -> Iterator[None]:
    """Inside, let the package behave as in a process without ranks.

    It reads RANK and LOCAL_RANK once, when it is imported, and its modules have copies of them.
    """
    changed = []
    for name, module in list(sys.modules.items()):
        for constant in ("RANK", "LOCAL_RANK") if name.partition(".")[0] == "ultralytics" else ():
            if constant in vars(module):
                changed.append((module, constant, getattr(module, constant)))
                setattr(module, constant, -1)
    try:
        yield
    finally:
        for module, constant, value in changed:
            setattr(module, constant, value)


def hide_single_rank() -> None:
    """Remove the rank from the environment of a job of one rank, before the package is imported.

    Version 8.3 would wait for a process group, which a single process does not have.
    """
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
