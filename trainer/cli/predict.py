"""`trainer predict`: predicts on images and videos."""

from typing import Annotated, Any

import typer

from trainer.cli.options import takes, typed_options
from trainer.config.inference import PredictSettings

Source = Annotated[
    list[str] | None,
    typer.Option(
        help="Images, videos, folders, patterns ('shots/*.jpg') or a .txt list of paths; several may follow.",
        show_default=False,
    ),
]
More = Annotated[
    list[str] | None, typer.Argument(metavar="[SOURCE]...", help="Same as --source.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON per image or frame.")]


@takes(PredictSettings, source=(Source, None), more=(More, None), json=(Json, False))
def predict(
    context: typer.Context, *, source: list[str] | None, more: list[str] | None, json: bool, **options: Any
) -> None:
    """Draw what a model finds in images and videos into runs/predict.

    The weights determine the task: detection, classification or segmentation. Sources that cannot be read are printed
    on stderr; the exit code is then 1.
    """
    from trainer.inference.predict import predict as run

    sources = [*(source or []), *(more or [])]
    done = run(PredictSettings(**options), sources, typed_options(context), as_json=json)
    if not json:
        counts = [f"{done.images} image{'s' if done.images > 1 else ''}"] if done.images else []
        counts += [f"{done.frames} frame{'s' if done.frames > 1 else ''} of video"] if done.frames else []
        where = f" -> {done.folder}" if done.folder else ""
        typer.echo(f"{' and '.join(counts) or 'no images'}: {done.summary}{where}")
    if done.unreadable:
        typer.echo(f"error: {len(done.unreadable)} of the sources failed", err=True)
        raise typer.Exit(1)
