"""`trainer predict`: detects objects in images and videos."""

from __future__ import annotations

from typing import Annotated

import typer

from trainer.cli.val import Cfg, Device, ExistOk, Half, ImgSz, Iou, MaxDet, Name, Precision, Project, SaveConf, SaveTxt


def predict(
    context: typer.Context,
    weights: Annotated[
        str, typer.Option(help="Weights of a detector: best.pt of a run, or any weights that `train` accepts.")
    ],
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source",
            help="Images, videos, folders, patterns ('shots/*.jpg') or a .txt list of paths; several may follow.",
            show_default=False,
        ),
    ] = None,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[SOURCE]...", help="Same as --source.", show_default=False)
    ] = None,
    imgsz: ImgSz = None,
    device: Device = "",
    conf: Annotated[float, typer.Option("--conf", "--conf-thres", help="Lowest score of a box.")] = 0.25,
    iou: Iou = 0.45,
    max_det: MaxDet = 1000,
    classes: Annotated[
        str,
        typer.Option(
            help="Detect only these classes: comma-separated names or numbers. (default: all)", show_default=False
        ),
    ] = "",
    precision: Precision = "auto",
    half: Half = False,
    nosave: Annotated[bool, typer.Option("--nosave", help="Draw nothing.")] = False,
    save_txt: SaveTxt = False,
    save_conf: SaveConf = False,
    save_json: Annotated[bool, typer.Option("--save-json", help="Write all boxes to predictions.json.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per image or frame.")] = False,
    project: Project = "runs",
    name: Name = "predict",
    exist_ok: ExistOk = False,
    cfg: Cfg = "",
) -> None:
    """Detect objects in images and videos, and draw them into runs/predict.

    Sources that cannot be read are printed on stderr; the exit code is then 1.
    """
    from trainer.inference.predict import PredictSettings, counts_text
    from trainer.inference.predict import predict as run

    # Numbers may be separated by spaces, as in YOLOv5; names may contain spaces.
    words = classes.split() if classes.replace(" ", "").isdecimal() else classes.split(",")
    others = ("source", "more", "conf", "classes", "nosave", "json")
    options = {name: value for name, value in context.params.items() if name not in others}
    settings = PredictSettings(
        sources=(*(source or []), *(more or [])),
        confidence=conf,
        classes=tuple(word.strip() for word in words if word.strip()),
        save=not nosave,
        **options,
    )
    done = run(settings, as_json=json)
    if not json:
        counts = [f"{done.images} images"] if done.images else []
        counts += [f"{done.frames} frames of video"] if done.frames else []
        where = f" -> {done.folder}" if done.folder else ""
        typer.echo(f"{' and '.join(counts) or 'no images'}: {counts_text(done.boxes, done.names) or 'no boxes'}{where}")
    if done.unreadable:
        typer.echo(f"error: {len(done.unreadable)} of the sources could not be read", err=True)
        raise typer.Exit(1)
