"""`trainer verify`: proof that several ranks train as one does."""

from __future__ import annotations

import dataclasses
import json as json_format
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from trainer.config import DIGITS, Settings, load_hyp, preset_for
from trainer.errors import TrainerError


def verify(
    task: Annotated[str, typer.Option(help="As for `train`.")] = "detect",
    data: Annotated[str, typer.Option(help="As for `train`.")] = DIGITS,
    cfg: Annotated[str, typer.Option(help="As for `train`. (default: yolov5n.yaml)")] = "",
    weights: Annotated[str, typer.Option(help="As for `train`.")] = "",
    hyp: Annotated[str, typer.Option(help="As for `train`.", show_default=False)] = "",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks; the others are compared with the first.")] = "1,2,4",
    steps: Annotated[int, typer.Option(help="Steps of the training, the weights moving in each.")] = 3,
    batch: Annotated[int, typer.Option("--batch", "--batch-size", help="Pictures per step on all ranks together.")] = 8,
    imgsz: Annotated[int, typer.Option("--imgsz", "--img", help="Side of the pictures in pixels.")] = 128,
    device: Annotated[str, typer.Option(help="cpu, or GPUs: as many as the greatest number of ranks.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of weights, order and augmentation.")] = 0,
    no_sync_bn: Annotated[
        bool, typer.Option("--no-sync-bn", help="Batch norm of each rank by itself: shows what --sync-bn is good for.")
    ] = False,
    precision: Annotated[
        str, typer.Option(help="float64, which leaves little rounding, or fp32 (of which --steps 1 tells most).")
    ] = "float64",
    tolerance: Annotated[
        float | None,
        typer.Option(help="Greatest relative difference. (default: 1e-4, with fp32 1e-2)", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
    parallel: Annotated[str, typer.Option(help="As for `train`; a single rank is always one plain process.")] = "ddp",
    stages: Annotated[int, typer.Option(help="As for `train`; a single rank is one stage.", show_default=False)] = 0,
    micro_batches: Annotated[int, typer.Option(help="As for `train`.", show_default=False)] = 0,
    recorded: Annotated[str, typer.Option("--record", hidden=True)] = "",
) -> None:
    """Compare losses and gradients of 1, 2 and 4 ranks, step by step.

    Starts its own ranks and takes the first steps of a real training with the same pictures on each number of ranks.
    Exit 0 if they differ by rounding alone, 1 if not.
    """
    from trainer import verify as verification

    if recorded:  # a rank of another `trainer verify`
        verification.record(*map(Path, recorded.split(",")))
        return
    preset = preset_for(data, task)
    # Every step moves the weights, at full rate: differences would add up. Not by Adam, whose first steps divide
    # small gradients by themselves, rounding included.
    hypers = replace(load_hyp(hyp, preset.hyp) if hyp else preset.hyp, nbs=float(batch), warmup_epochs=0.0)
    settings = Settings(
        task=task,
        data=str(Path(data).resolve()) if Path(data).exists() else data,
        cfg=cfg,
        weights=weights,
        hyp=hypers,
        epochs=100,
        batch=batch,
        imgsz=imgsz,
        device=device,
        optimizer="SGD",
        workers=0,
        seed=seed,
        project="runs",
        name="verify",
        exist_ok=True,
        schedule=preset.schedule,
        precision="fp32",
        val=False,
        sync_bn=not no_sync_bn,
        parallel=parallel,
        stages=stages,
        micro_batches=micro_batches,
    )
    try:
        counts = [int(count) for count in ranks.split(",")]
    except ValueError:
        raise TrainerError(
            f"--ranks {ranks}: not numbers with commas between them", "for example --ranks 1,2"
        ) from None
    if precision not in verification.TOLERANCES:
        raise TrainerError(f"--precision {precision}: unknown", f"use {' or '.join(verification.TOLERANCES)}")
    limit = verification.TOLERANCES[precision] if tolerance is None else tolerance
    differences = verification.verify(settings, counts, steps, wide=precision == "float64")
    same = verification.agree(differences, limit)
    if json:
        rows = [dataclasses.asdict(d) for d in differences]
        typer.echo(json_format.dumps({"agree": same, "tolerance": limit, "differences": rows}))
    else:
        typer.echo("ranks  step         loss  gradient norm  loss off by  gradient off by  greatest difference")
        for d in differences:
            typer.echo(
                f"{d.ranks:>5}  {d.step:>4}  {d.loss:>11.7f}  {d.gradient_norm:>13.7f}  {d.loss_off:>11.1e}"
                f"  {d.gradient_off:>15.1e}  {d.greatest:>19.1e}"
            )
        norm = "batch norm of each rank by itself" if no_sync_bn else "batch norm over all ranks"
        norm = "batch norm of each micro-batch by itself" if parallel == "pipeline" else norm
        verdict = "differ by rounding alone" if same else f"DIFFER by more than {limit:g}"
        typer.echo(f"{data}, {batch} pictures a step, {precision}, {norm}: {ranks} ranks {verdict}")
    raise typer.Exit(0 if same else 1)
