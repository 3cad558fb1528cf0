"""`trainer hyp`: prints the hyper-parameters of a training as a file for `--hyp`."""

from typing import Annotated

import typer

from trainer.config import TASKS, family_of, hyp_keys, preset_for
from trainer.errors import TrainerError


def hyp(
    task: Annotated[str, typer.Option(help="detect, classify or segment.")] = "detect",
    data: Annotated[
        str, typer.Option(help="As for trainer train; only the built-in datasets have their own defaults.")
    ] = "",
    cfg: Annotated[
        str, typer.Option(help="As for trainer train; detectors from other libraries have other defaults.")
    ] = "",
) -> None:
    """Print the hyper-parameters with their defaults and meanings, as a file for --hyp.

    Write it to a file, change what you like, and train with it: trainer hyp > mine.yaml; trainer train --hyp mine.yaml
    """
    if task not in TASKS:
        raise TrainerError(f"--task {task}: unknown", f"use one of {', '.join(TASKS)}")
    family, _ = family_of(cfg)
    if task == "detect" and cfg and not family:
        from trainer.models.yolo import load_cfg  # slow import

        load_cfg(cfg)
    values = preset_for(data, task, cfg).hyp
    for key, meaning in hyp_keys(task).items():
        value = getattr(values, key)
        typer.echo(f"# {key}:" if value is None else f"{key}: {value:g}", nl=False)
        typer.echo(f"  # {meaning}")
