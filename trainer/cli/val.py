"""`trainer val`: scores trained weights on a dataset."""

from __future__ import annotations

from typing import Annotated

import typer

from trainer.config import TASKS
from trainer.errors import TrainerError

ImgSz = Annotated[
    int | None,
    typer.Option(
        "--imgsz",
        "--img",
        help="Longer side of the scaled images, in pixels. (default: that of the training)",
        show_default=False,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="cpu, cuda or a GPU number; under torchrun GPU numbers (0,1: one per rank). (default: the first GPU, else "
        "the CPU)"
    ),
]
Iou = Annotated[
    float, typer.Option("--iou", "--iou-thres", help="IoU threshold of the non-maximum suppression, 0 to 1.")
]
MaxDet = Annotated[int, typer.Option("--max-det", help="Most boxes per image.")]
Precision = Annotated[
    str, typer.Option(help="bf16, fp32 or auto. auto: bf16 where the CPU or GPU supports it natively.")
]
Half = Annotated[bool, typer.Option("--half", help="Compute in 16 bits: fp16 on a GPU, bf16 on a CPU.")]
SaveTxt = Annotated[bool, typer.Option("--save-txt", help="Write the boxes as labels/*.txt in YOLO's format.")]
SaveConf = Annotated[bool, typer.Option("--save-conf", help="With --save-txt: write the score as the last column.")]
Project = Annotated[str, typer.Option(help="Folder that holds the result folder.")]
Name = Annotated[str, typer.Option(help="Name of the result folder; if it exists, name2, name3, ...")]
Cfg = Annotated[
    str,
    typer.Option(
        help="package.module:function that builds the model, for weights of your own model.", show_default=False
    ),
]
ExistOk = Annotated[bool, typer.Option("--exist-ok", help="Write into the folder even if it exists.")]


# Parameters that only detectors have.
BOXES_ONLY = {"conf", "iou", "max_det", "half", "rect", "single_cls", "allow_bad_labels", "v5_map", "annotations"}
BOXES_ONLY |= {"save_json", "save_txt", "save_conf", "cfg"}


def val(
    context: typer.Context,
    weights: Annotated[
        str, typer.Option(help="Weights to score: best.pt of a run, or any weights that `train` accepts.")
    ],
    data: Annotated[
        str, typer.Option(help="`digits` or the path of a data.yaml; its classes must be those of the weights.")
    ],
    split: Annotated[str, typer.Option("--split", "--task", help="Split to score: train, val or test.")] = "val",
    imgsz: ImgSz = None,
    batch: Annotated[int, typer.Option("--batch", "--batch-size", help="Images per batch and rank, at most 32.")] = 32,
    device: Device = "",
    conf: Annotated[
        float, typer.Option("--conf", "--conf-thres", help="Lowest score of a box; higher values lower the mAP.")
    ] = 0.001,
    iou: Iou = 0.6,
    max_det: MaxDet = 300,
    precision: Precision = "auto",
    half: Half = False,
    workers: Annotated[
        int | None,
        typer.Option(help="Dataloader workers per rank. (default: 0 on a CPU, up to 8 on a GPU)", show_default=False),
    ] = None,
    rect: Annotated[
        bool,
        typer.Option("--rect/--no-rect", help="Pad batches of similar images as little as possible, or to squares."),
    ] = True,
    single_cls: Annotated[
        bool, typer.Option("--single-cls", help="Treat all classes as one, for weights trained with --single-cls.")
    ] = False,
    allow_bad_labels: Annotated[
        bool, typer.Option("--allow-bad-labels", help="Omit faulty label rows and images, in place of an error.")
    ] = False,
    v5_map: Annotated[
        bool, typer.Option("--v5-map", help="Compute mAP as YOLOv5 does; it differs from COCO's mAP.")
    ] = False,
    annotations: Annotated[
        str,
        typer.Option(
            help="COCO's instances_*.json of these images: its boxes, areas and crowds replace the labels.",
            show_default=False,
        ),
    ] = "",
    json: Annotated[
        bool, typer.Option("--json", help="Print the scores as one line of JSON in place of the table.")
    ] = False,
    save_json: Annotated[
        bool, typer.Option("--save-json", help="Write predictions.json in COCO's results format.")
    ] = False,
    save_txt: SaveTxt = False,
    save_conf: SaveConf = False,
    plots: Annotated[
        bool, typer.Option("--plots/--no-plots", help="Draw the curves, the confusion matrix and some images.")
    ] = True,
    project: Project = "runs",
    name: Name = "val",
    exist_ok: ExistOk = False,
    cfg: Cfg = "",
) -> None:
    """Print precision, recall and COCO's mAP of each class, and the time per image.

    Several processes share the images: `torchrun --nproc-per-node 2 -m trainer val ...`. P, R and F1 are at the
    confidence with the highest mean F1. The scores of a classifier are top-1 and top-5.
    """
    if split in TASKS:
        raise TrainerError(
            f"--task {split}: expected train, val or test; --task is another name of --split, as in YOLOv5",
            "omit it: the weights contain the task",
        )
    from trainer.weights import checkpoint_file

    kind = checkpoint_file.load(weights).get("task", "detect")
    if kind != "detect":
        _score(context, kind)
        return
    from trainer.inference.validate import ValSettings, as_json, validate
    from trainer.tasks.detector import Limits

    others = ("conf", "iou", "max_det", "v5_map", "json")
    options = {name: value for name, value in context.params.items() if name not in others}
    result = validate(ValSettings(limits=Limits(conf, iou, max_det), yolov5_map=v5_map, **options))
    if not result:
        return
    if json:
        typer.echo(as_json(result))
        return
    scores = result.scores
    typer.echo(scores.table())
    typer.echo(f"P, R and F1 at confidence {scores.confidence:.2f}, the highest mean F1")
    sizes = [f"{name} {value:.3f}" for name, value in (scores.by_area or {}).items() if value == value]
    if len(sizes) > 1:
        typer.echo(f"mAP50-95 by box size: {', '.join(sizes)}")
    typer.echo(
        f"per image at {result.imgsz} px: load {result.load_ms:.1f} ms, network {result.network_ms:.1f} ms, "
        f"NMS {result.nms_ms:.1f} ms"
    )
    if result.folder:
        typer.echo(f"-> {result.folder}")


def _score(context: typer.Context, kind: str) -> None:
    """Score a classifier or a segmentation model."""
    from trainer.cli.train import typed_options
    from trainer.inference.score import score, settings_for

    options = {name: value for name, value in context.params.items() if name not in BOXES_ONLY}
    wrong = sorted(typed_options(context) & BOXES_ONLY)
    if wrong:
        raise TrainerError(
            f"--{wrong[0].replace('_', '-')} is for boxes, but these are weights of --task {kind}", "omit it"
        )
    if options.pop("split") != "val":
        raise TrainerError(
            f"--split: weights of --task {kind} are scored on val (or test/ without val/)", "omit --split"
        )
    plots, as_json = options.pop("plots"), options.pop("json")
    result = score(settings_for(kind, options.pop("weights"), options.pop("data"), **options), plots=plots)
    if not result:
        return
    if as_json:
        typer.echo(result.as_json())
        return
    typer.echo(result.scores.table())
    found = result.scores.columns()
    titles = "   ".join(f"{title} {found[key]:.3f}" for key, title in result.task.headlines.items())
    typer.echo(f"{titles}   per image at {result.imgsz} px: {result.ms_per_image:.1f} ms")
    if result.folder:
        typer.echo(f"-> {result.folder}")
