"""`trainer verify`: compares losses and gradients of several ranks with one rank's."""

import dataclasses
import json as json_format
from dataclasses import replace
from typing import Annotated

import typer

from trainer.cli.bench import numbers, settings_of
from trainer.config import traits_of
from trainer.errors import TrainerError

DEFAULTS = ["--batch", "8", "--imgsz", "128", "--epochs", "100"]  # later words have precedence
# Adam would amplify rounding: its first steps divide small gradients by their own magnitude.
FIXED = ["--precision", "fp32", "--optimizer", "SGD", "--workers", "0", "--noval"]


def verify(
    context: typer.Context,
    ranks: Annotated[
        str, typer.Option(help="Comma-separated numbers of ranks; the first is the reference.")
    ] = "1,2,4",
    steps: Annotated[int, typer.Option(help="Training steps; each updates the weights.")] = 3,
    device: Annotated[
        str, typer.Option(help="cpu, or as many GPUs as the largest number of ranks, for example 0,1.")
    ] = "cpu",
    no_sync_bn: Annotated[
        bool,
        typer.Option(
            "--no-sync-bn", help="Compute batch norm per rank, to show the difference from --sync-bn."
        ),
    ] = False,
    precision: Annotated[
        str,
        typer.Option(help="float64 or fp32. With fp32, use --steps 1: rounding makes later steps differ."),
    ] = "float64",
    tolerance: Annotated[
        float | None,
        typer.Option(help="Maximum relative difference. [default: 1e-4, with fp32 1e-2]", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON.")] = False,
) -> None:
    """Compare losses and gradients of 1, 2 and 4 ranks, step by step.

    It starts the ranks on this machine and runs the first training steps on the same images with each number of
    ranks. The exit code is 0 if all differences are within the tolerance, otherwise 1. It also takes the options of
    trainer train: --data, --cfg, --parallel, --seed, ..., with --batch 8 and --imgsz 128 unless you give others.
    """
    from trainer.bench import verify as verification

    words = [*DEFAULTS, *context.args, *FIXED]
    settings = settings_of(words if no_sync_bn else [*words, "--sync-bn"], device)
    # Each step updates the weights at the full rate, so that differences add up.
    settings = replace(settings, hyp=replace(settings.hyp, nbs=float(settings.batch), warmup_epochs=0.0))
    counts = numbers("--ranks", ranks)
    if precision not in verification.TOLERANCES:
        raise TrainerError(f"--precision {precision}: unknown", f"use {' or '.join(verification.TOLERANCES)}")
    limit = verification.TOLERANCES[precision] if tolerance is None else tolerance
    differences = verification.verify(settings, counts, steps, wide=precision == "float64")
    same = verification.agree(differences, limit)
    if json:
        rows = [dataclasses.asdict(d) for d in differences]
        typer.echo(json_format.dumps({"agree": same, "tolerance": limit, "differences": rows}))
    else:
        typer.echo(
            "ranks  step         loss  gradient norm  loss off by  gradient off by  greatest difference"
        )
        for d in differences:
            typer.echo(
                f"{d.ranks:>5}  {d.step:>4}  {d.loss:>11.7f}  {d.gradient_norm:>13.7f}  {d.loss_off:>11.1e}"
                f"  {d.gradient_off:>15.1e}  {d.greatest:>19.1e}"
            )
        norm = "batch norm of each rank" if no_sync_bn else "batch norm over all ranks"
        if normalized := traits_of(settings.parallel).batch_norm_over:
            norm = f"batch norm of {normalized}"
        verdict = "differ by rounding alone" if same else f"DIFFER by more than {limit:g}"
        typer.echo(
            f"{settings.data}, {settings.batch} images a step, {precision}, {norm}: {ranks} ranks {verdict}"
        )
    raise typer.Exit(0 if same else 1)
