"""Events of a training with the package, from its callbacks; and the end of the run after a stop signal."""

import time
from collections.abc import Mapping
from typing import Any

from trainer import contract
from trainer.engine.signals import Stopped
from trainer.ultralytics.session import Session

#: The package's names of a task's scores, and theirs in events. With masks and poses, the scores are theirs.
SCORES: Mapping[str, Mapping[str, str]] = {
    task: {f"metrics/mAP50({part})": "map50", f"metrics/mAP50-95({part})": "map"}
    for task, part in {"detect": "B", "segment": "M", "pose": "P", "obb": "B"}.items()
} | {"classify": {"metrics/accuracy_top1": "top1", "metrics/accuracy_top5": "top5"}}


class Reports:
    """The callbacks of one run. `trainer` is the package's object in all of them."""

    def __init__(self, session: Session, task: str) -> None:
        self.session = session
        self._names = SCORES[task]
        self.has_begun = False
        self._step = 0
        self._has_scores = False
        self.scores: dict[str, float] = {}
        self._began = self._trained_s = 0.0
        self._epoch_s = 0.0  # of the last epoch, with its validation

    def add_to(self, model: Any) -> None:
        """Add the callbacks to the package's model, which passes them to the trainer and its validator."""
        model.add_callback("on_train_epoch_start", self.on_train_epoch_start)
        model.add_callback("on_train_batch_end", self.on_train_batch_end)
        model.add_callback("on_train_epoch_end", self.on_train_epoch_end)
        model.add_callback("on_val_batch_end", self.on_val_batch_end)
        model.add_callback("on_val_end", self.on_val_end)
        model.add_callback("on_fit_epoch_end", self.on_fit_epoch_end)

    def on_train_epoch_start(self, trainer: Any) -> None:
        """Start the clock of an epoch."""
        self.has_begun = True
        self._stop_if(self.session.agree_to_stop(now=True))
        self._began = time.monotonic()
        self._step = 0
        self._has_scores = False

    def on_train_batch_end(self, trainer: Any) -> None:
        """Report the progress; stop if a rank has received a signal."""
        steps = len(trainer.train_loader)
        self._step += 1
        self.session.watchdog.step(trainer.epoch * steps + self._step)
        lost = f"; {self._step} of {steps} steps of epoch {trainer.epoch + 1} are lost"
        self._stop_if(self.session.agree_to_stop(now=False), lost)
        if not self.session.events.is_progress_due(last=self._step == steps):
            return  # reading the loss would synchronize a GPU
        seconds = max(time.monotonic() - self._began, 1e-9)
        epoch_ends_in_s = (steps - self._step) * seconds / self._step
        epoch_s = self._epoch_s or steps * seconds / self._step
        self.session.events.progress(
            epoch=trainer.epoch + 1,
            epochs=trainer.epochs,
            step=self._step,
            steps=steps,
            loss=sum(_losses(trainer).values()),
            images_per_s=self._step * trainer.batch_size / seconds,
            eta_s=epoch_ends_in_s,
            run_eta_s=epoch_ends_in_s + (trainer.epochs - trainer.epoch - 1) * epoch_s,
        )

    def on_train_epoch_end(self, trainer: Any) -> None:
        """Stop the clock of the epoch's training; its validation follows."""
        self._trained_s = time.monotonic() - self._began

    def on_val_batch_end(self, _: Any) -> None:
        """Note progress, so that a long validation is no stall."""
        self.session.note_validated()

    def on_val_end(self, _: Any) -> None:
        """Note that the epoch has scores."""
        self._has_scores = True

    def on_fit_epoch_end(self, trainer: Any) -> None:
        """Report a finished epoch and copy its checkpoint to all machines; also called after the final validation."""
        session = self.session
        if self._has_scores:
            self.scores = {short: float(trainer.metrics[name]) for name, short in self._names.items()}
        if session.is_final:
            return
        self._epoch_s = time.monotonic() - self._began
        if session.world.rank == 0:
            session.events.emit(
                contract.METRIC,
                epoch=trainer.epoch + 1,
                epochs=trainer.epochs,
                **(self.scores if self._has_scores else {}),
                **_losses(trainer),
                images_per_s=len(trainer.train_loader.dataset) / max(self._trained_s, 1e-9),
                seconds=self._epoch_s,
            )
        if session.copies and trainer.args.save:
            with session.watchdog.during("checkpoint"):
                self._copy(trainer)
        self._stop_if(session.agree_to_stop(now=True))

    def _copy(self, trainer: Any) -> None:
        assert self.session.copies
        is_best = trainer.best_fitness == trainer.fitness
        path = self.session.copies.publish(trainer.last, trainer.epoch, is_best=is_best)
        if path:
            steps = (trainer.epoch + 1) * len(trainer.train_loader)
            self.session.events.emit(contract.CHECKPOINT, path=str(path), epoch=trainer.epoch + 1, step=steps)

    def _stop_if(self, number: int, lost: str = "") -> None:
        """Raise Stopped if the ranks have agreed on the signal `number`; 0 is none. `lost` says which steps are."""
        if not number:
            return
        copies = self.session.copies
        if copies and copies.epoch >= 0:
            raise Stopped(
                number, f"after the checkpoint of epoch {copies.epoch + 1}{lost}", "run it again to resume"
            )
        where = "before the first checkpoint" if copies else "and cannot be resumed without a launcher"
        raise Stopped(number, f"{where}{lost}", "", exit_code=128 + number)


def _losses(trainer: Any) -> dict[str, float]:
    """Return the mean losses of the epoch so far: `box_loss`, `cls_loss`, ..."""
    labelled = trainer.label_loss_items(trainer.tloss)
    return {name.removeprefix("train/"): float(value) for name, value in labelled.items()}
