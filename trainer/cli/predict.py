"""`trainer predict`: boxes on pictures and videos."""

from __future__ import annotations

from typing import Annotated

import typer

from trainer.cli.val import Cfg, Device, ExistOk, Half, ImgSz, Precision

Weights = Annotated[str, typer.Option(help="What to look with: best.pt of a run, or anything else that `train` takes.")]
Source = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        help="What to look at: pictures, videos, folders, patterns ('shots/*.jpg'), a .txt list of paths. "
        "More may follow without the option.",
        show_default=False,
    ),
]
More = Annotated[list[str] | None, typer.Argument(metavar="[SOURCE]...", help="As --source.", show_default=False)]
Conf = Annotated[float, typer.Option("--conf", "--conf-thres", help="Least score of a box.")]
Iou = Annotated[
    float,
    typer.Option("--iou", "--iou-thres", help="Of two boxes of a class with a larger IoU, the less sure one goes."),
]
MaxDet = Annotated[int, typer.Option("--max-det", help="Most boxes in a picture.")]
Classes = Annotated[
    str, typer.Option(help="Only these classes, by name or number, with commas: `cat,dog` or 0,2.", show_default=False)
]
NoSave = Annotated[bool, typer.Option("--nosave", help="Draw nothing.")]
SaveTxt = Annotated[bool, typer.Option("--save-txt", help="Write the boxes as labels/*.txt in YOLO's format.")]
SaveConf = Annotated[bool, typer.Option("--save-conf", help="With --save-txt: the score as a last column.")]
SaveJson = Annotated[bool, typer.Option("--save-json", help="Write all boxes into predictions.json.")]
Json = Annotated[bool, typer.Option("--json", help="Print a line of JSON for each picture or frame.")]
Project = Annotated[str, typer.Option(help="Where the folder goes.")]
Name = Annotated[str, typer.Option(help="The folder; if it exists, name2, name3, ...")]


def predict(
    weights: Weights,
    source: Source = None,
    more: More = None,
    imgsz: ImgSz = None,
    device: Device = "",
    conf: Conf = 0.25,
    iou: Iou = 0.45,
    max_det: MaxDet = 1000,
    classes: Classes = "",
    precision: Precision = "auto",
    half: Half = False,
    nosave: NoSave = False,
    save_txt: SaveTxt = False,
    save_conf: SaveConf = False,
    save_json: SaveJson = False,
    json: Json = False,
    project: Project = "runs",
    name: Name = "predict",
    exist_ok: ExistOk = False,
    cfg: Cfg = "",
) -> None:
    """Find objects in pictures and videos: drawn into runs/predict, and as text or JSON.

    Ends with 1 if a picture or video could not be read; it is named, and the others are done.
    """
    from trainer.inference.predict import PredictSettings, counted
    from trainer.inference.predict import predict as run

    # `0 2`, as in YOLOv5; a name may have a space in it.
    words = classes.split() if classes.replace(" ", "").isdecimal() else classes.split(",")
    done = run(
        PredictSettings(
            weights=weights,
            sources=(*(source or []), *(more or [])),
            imgsz=imgsz,
            device=device,
            confidence=conf,
            iou=iou,
            most=max_det,
            classes=tuple(word.strip() for word in words if word.strip()),
            precision=precision,
            half=half,
            save=not nosave,
            save_txt=save_txt,
            save_conf=save_conf,
            save_json=save_json,
            project=project,
            name=name,
            exist_ok=exist_ok,
            cfg=cfg,
        ),
        as_json=json,
    )
    if not json:
        seen = [f"{done.pictures} pictures"] if done.pictures else []
        seen += [f"{done.frames} frames of video"] if done.frames else []
        where = f" -> {done.folder}" if done.folder else ""
        typer.echo(f"{' and '.join(seen) or 'nothing'}: {counted(done.boxes, done.names) or 'no boxes'}{where}")
    if done.unreadable:
        typer.echo(f"error: {len(done.unreadable)} of the sources could not be read", err=True)
        raise typer.Exit(1)
