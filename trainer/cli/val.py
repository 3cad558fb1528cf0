"""`trainer val`: the scores of trained weights on a data set."""

from __future__ import annotations

from typing import Annotated

import typer

from trainer.config import TASKS
from trainer.errors import TrainerError

Weights = Annotated[str, typer.Option(help="What to validate: best.pt of a run, or anything else that `train` takes.")]
Data = Annotated[str, typer.Option(help="`digits` or the path of a data.yaml; its classes must be the weights'.")]
Split = Annotated[str, typer.Option("--split", "--task", help="Which pictures: train, val or test.")]
ImgSz = Annotated[
    int | None,
    typer.Option(
        "--imgsz",
        "--img",
        help="Longer side that the pictures are brought to, in pixels. (default: the training's)",
        show_default=False,
    ),
]
Batch = Annotated[int, typer.Option("--batch", "--batch-size", help="Pictures at a time on each rank, at most 32.")]
Device = Annotated[
    str,
    typer.Option(
        help="cpu, cuda or a GPU's number; under torchrun numbers (0,1: one per rank); '' takes a GPU where there is "
        "one."
    ),
]
Conf = Annotated[
    float, typer.Option("--conf", "--conf-thres", help="Least score of a box. Scores fall if this is raised.")
]
Iou = Annotated[
    float,
    typer.Option("--iou", "--iou-thres", help="Of two boxes of a class with a larger IoU, the less sure one goes."),
]
MaxDet = Annotated[int, typer.Option("--max-det", help="Most boxes in a picture; COCO counts 100 of each class.")]
Precision = Annotated[
    str, typer.Option(help="bf16, fp32, or auto: bf16 where the processor or GPU computes in it natively.")
]
Half = Annotated[bool, typer.Option("--half", help="16 bits: fp16 on a GPU, bf16 on a CPU.")]
Workers = Annotated[
    int | None,
    typer.Option(help="Loading processes per rank. (default: 0 on the CPU, up to 8 on a GPU)", show_default=False),
]
Rect = Annotated[
    bool, typer.Option("--rect/--no-rect", help="Pad pictures of similar shape as little as possible, or to squares.")
]
SingleCls = Annotated[bool, typer.Option("--single-cls", help="All classes as one, for weights trained so.")]
AllowBadLabels = Annotated[
    bool, typer.Option("--allow-bad-labels", help="Leave out bad rows and pictures, which are an error else.")
]
V5Map = Annotated[
    bool, typer.Option("--v5-map", help="Score as YOLOv5 does, to compare with its figures; it differs from COCO.")
]
Annotations = Annotated[
    str,
    typer.Option(
        help="COCO's instances_*.json of these pictures: its boxes, areas and crowds count instead of the labels.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the scores as one line of JSON instead of the table.")]
SaveJson = Annotated[bool, typer.Option("--save-json", help="Write predictions.json in COCO's format of results.")]
SaveTxt = Annotated[bool, typer.Option("--save-txt", help="Write the boxes as labels/*.txt in YOLO's format.")]
SaveConf = Annotated[bool, typer.Option("--save-conf", help="With --save-txt: the score as a last column.")]
Plots = Annotated[bool, typer.Option("--plots/--no-plots", help="Draw the curves, the confusions and some pictures.")]
Project = Annotated[str, typer.Option(help="Where the folder goes, if there is anything to write.")]
Name = Annotated[str, typer.Option(help="The folder; if it exists, name2, name3, ...")]
Cfg = Annotated[
    str, typer.Option(help="package.module:function, for weights of a model of your own.", show_default=False)
]
ExistOk = Annotated[bool, typer.Option("--exist-ok", help="Write into the folder even if it exists.")]


# What only boxes have, by the names of the parameters.
BOXES_ONLY: tuple[str, ...] = (
    "conf",
    "iou",
    "max_det",
    "half",
    "rect",
    "single_cls",
    "allow_bad_labels",
    "v5_map",
    "annotations",
)
BOXES_ONLY += ("save_json", "save_txt", "save_conf", "cfg")


def val(
    context: typer.Context,
    weights: Weights,
    data: Data,
    split: Split = "val",
    imgsz: ImgSz = None,
    batch: Batch = 32,
    device: Device = "",
    conf: Conf = 0.001,
    iou: Iou = 0.6,
    max_det: MaxDet = 300,
    precision: Precision = "auto",
    half: Half = False,
    workers: Workers = None,
    rect: Rect = True,
    single_cls: SingleCls = False,
    allow_bad_labels: AllowBadLabels = False,
    v5_map: V5Map = False,
    annotations: Annotations = "",
    json: Json = False,
    save_json: SaveJson = False,
    save_txt: SaveTxt = False,
    save_conf: SaveConf = False,
    plots: Plots = True,
    project: Project = "runs",
    name: Name = "val",
    exist_ok: ExistOk = False,
    cfg: Cfg = "",
) -> None:
    """Score trained weights by COCO's rules: precision, recall, mAP of every class, and the time per picture.

    Several processes share the pictures and get the same scores: `torchrun --nproc-per-node 2 -m trainer val ...`.
    P, R and F1 are at the confidence that gives the best mean F1. A classifier is scored by top-1, top-5.
    """
    if split in TASKS:
        raise TrainerError(
            f"--task {split}: here --task is YOLOv5's name of --split, train, val or test",
            "leave it out: the weights tell what they were trained for",
        )
    from trainer.weights import checkpoint

    kind = checkpoint.load(weights).get("task", "detect")
    if kind != "detect":
        _score(context, kind)
        return
    from trainer.inference.validate import ValSettings, as_json, validate
    from trainer.tasks.inference import Limits

    result = validate(
        ValSettings(
            weights=weights,
            data=data,
            split=split,
            imgsz=imgsz,
            batch=batch,
            device=device,
            limits=Limits(conf, iou, max_det),
            precision=precision,
            half=half,
            workers=workers,
            rect=rect,
            single_cls=single_cls,
            allow_bad_labels=allow_bad_labels,
            yolov5_map=v5_map,
            annotations=annotations,
            save_json=save_json,
            save_txt=save_txt,
            save_conf=save_conf,
            plots=plots,
            project=project,
            name=name,
            exist_ok=exist_ok,
            cfg=cfg,
        )
    )
    if not result:
        return
    if json:
        typer.echo(as_json(result))
        return
    from trainer.metrics.table import scores_text

    scores = result.scores
    typer.echo(scores_text(scores))
    typer.echo(f"P, R and F1 at confidence {scores.confidence:.2f}, where the mean F1 is highest")
    sizes = [f"{name} {value:.3f}" for name, value in (scores.by_area or {}).items() if value == value]
    if len(sizes) > 1:
        typer.echo(f"mAP50-95 by size of the boxes: {', '.join(sizes)}")
    typer.echo(
        f"per picture at {result.imgsz} px: load {result.load_ms:.1f} ms, network {result.network_ms:.1f} ms, "
        f"NMS {result.nms_ms:.1f} ms"
    )
    if result.folder:
        typer.echo(f"-> {result.folder}")


def _score(context: typer.Context, kind: str) -> None:
    """Score a model of another task than boxes."""
    from trainer.cli.train import typed_options
    from trainer.inference.score import score, settings_for

    options = {name: value for name, value in context.params.items() if name not in BOXES_ONLY}
    wrong = sorted(typed_options(context) & set(BOXES_ONLY))
    if wrong:
        raise TrainerError(
            f"--{wrong[0].replace('_', '-')} is for boxes; these are weights of --task {kind}", "leave it out"
        )
    if options.pop("split") != "val":
        raise TrainerError(f"--split: weights of --task {kind} are scored on val (or test/, where there is no val/)")
    plots, as_json = options.pop("plots"), options.pop("json")
    result = score(settings_for(kind, options.pop("weights"), options.pop("data"), **options), plots=plots)
    if not result:
        return
    if as_json:
        typer.echo(result.as_json())
        return
    typer.echo(result.task.table(result.scores))
    found = result.scores.columns()
    titles = "   ".join(f"{title} {found[key]:.3f}" for key, title in result.task.headlines.items())
    typer.echo(f"{titles}   per picture at {result.imgsz} px: {result.ms_per_picture:.1f} ms")
    if result.folder:
        typer.echo(f"-> {result.folder}")
