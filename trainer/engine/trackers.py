"""Experiment trackers: log each epoch to MLflow, Weights & Biases or Trackio, through their own clients.

The run's ID is in the checkpoints, so a resumed training continues the run. The clients read the address and the
account of the tracker from their own environment variables.
"""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import contract
from trainer.config import Settings
from trainer.errors import TrainerError

_PROJECT = "trainer"
_HINT = (
    "in the project folder: pip install '.[track]' (or '.[trackio]'); the tracker's address and account are "
    "environment variables"
)
Row = Mapping[str, float]


# A client starts a run, or continues `run_id`. `id` continues the run later; `logged` is the last epoch that it has,
# None if it is unknown.
class _MLflow:
    """A run of the server in MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, run_id: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        # By default the client repeats a request for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        import mlflow

        self._client = mlflow.MlflowClient()
        self._api = mlflow.entities
        if run_id:
            self._client.update_run(run_id, status="RUNNING")
            self.logged = max(
                (metric.step for metric in self._client.get_metric_history(run_id, "lr")), default=0
            )
        else:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT
            found = self._client.get_experiment_by_name(experiment)
            experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)
            run_id = self._client.create_run(experiment_id, run_name=name).info.run_id
            parameters = [self._api.Param(key, str(value)[:500]) for key, value in config.items()]
            self._client.log_batch(run_id, params=parameters)
            self.logged = 0
        self.id = run_id

    def log(self, epoch: int, values: Row) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(self.id, [self._api.Metric(k, v, now_ms, epoch) for k, v in values.items()])

    def finish(self) -> None:
        self._client.set_terminated(self.id)


class _Wandb:
    """A run of Weights & Biases. With WANDB_MODE=offline, `wandb sync` uploads the parts of a resumed run as one."""

    def __init__(self, run_id: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self.id = run_id or secrets.token_hex(4)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            id=self.id,
            name=name,
            dir=folder,
            config=dict(config),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        self.logged = max(0, self._run.step - 1) if self._run.resumed else None

    def log(self, epoch: int, values: Row) -> None:
        self._run.log(dict(values), step=epoch, commit=True)  # not together with the next epoch

    def finish(self) -> None:
        self._run.finish()  # waits until the run is uploaded


class _Trackio:
    """A run of Trackio: in the folder TRACKIO_DIR, or on TRACKIO_SERVER_URL or TRACKIO_SPACE_ID."""

    def __init__(self, run_id: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        # By default the client writes to the home folder, which a container loses at its end.
        os.environ.setdefault("TRACKIO_DIR", str(folder.absolute() / "trackio"))
        import trackio
        from trackio import fragments
        from trackio.sqlite_storage import SQLiteStorage

        self._api = trackio
        self._run = trackio.init(
            project=_PROJECT,
            name=name,
            config=dict(config),
            resume="allow" if run_id else "never",
            auto_log_gpu=False,  # its threads could log before the next line
            auto_log_cpu=False,
        )
        self.id = self._run.id = run_id or self._run.id  # the client finds a run by its name only
        self.logged = None
        if not self._run.url:
            # On a network file system, epochs are in fragments until the dashboard copies them to the database.
            texts = [path.read_bytes() for path in fragments.local_inbox_dir().rglob("*.jsonl")]
            records = [record for text in texts for record in fragments.parse_fragment_bytes(text)]
            steps = [record["step"] for record in records if record["run_id"] == self.id]
            self.logged = max([*steps, SQLiteStorage.get_max_step_for_run(_PROJECT, run_id=self.id) or 0])

    def log(self, epoch: int, values: Row) -> None:
        self._run.log(dict(values), step=epoch)

    def finish(self) -> None:
        self._api.finish()  # writes the last epochs; a run has no state


_CLIENTS: dict[str, type[Any]] = {"mlflow": _MLflow, "wandb": _Wandb, "trackio": _Trackio}


class Tracker:
    """Logs the rows of results.csv. An epoch that could not be logged is logged with the next one."""

    def __init__(self, settings: Settings, folder: Path, run_id: str, epochs: int) -> None:
        """Start a run, or continue `run_id`, which has `epochs` epochs if the tracker itself cannot say.

        Raises TrainerError if the tracker's package is missing, or its server refuses.
        """
        self.kind = settings.track
        name = os.environ.get(contract.JOB_ID) or folder.name
        config = {k: v for k, v in dataclasses.asdict(settings).items() if k not in ("resume", "track")}
        try:
            self._client = _CLIENTS[self.kind](run_id, name, folder, config)
        except Exception as error:  # each client has its own exceptions
            lines = str(error).splitlines() or [type(error).__name__]
            raise TrainerError(f"--track {self.kind}: {lines[0]}", _HINT) from error
        self.id = self._client.id
        logged = self._client.logged
        self._logged = (epochs if run_id else 0) if logged is None else logged

    def log(self, rows: Sequence[Row]) -> str:
        """Log the epochs that are not logged yet. Return why that failed, or ""."""
        try:
            for row in rows:
                epoch = int(row["epoch"])
                if epoch > self._logged:
                    self._client.log(
                        epoch, {k: v for k, v in row.items() if k != "epoch" and math.isfinite(v)}
                    )
                    self._logged = epoch
        except Exception as error:  # a training must not end because of its tracker
            return (
                f"--track {self.kind}: epoch {epoch} not logged, next attempt after the next epoch: {error}"
            )
        return ""

    def finish(self, rows: Sequence[Row]) -> str:
        """Log the remaining epochs and mark the run as finished. Return why that failed, or ""."""
        problem = self.log(rows)
        try:
            self._client.finish()
        except Exception as error:
            return problem or f"--track {self.kind}: not marked as finished: {error}"
        return problem
