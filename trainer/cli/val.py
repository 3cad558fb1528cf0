"""`trainer val`: scores trained weights on a dataset."""

from typing import Annotated, Any

import typer

from trainer.cli.options import takes, typed_options
from trainer.config import TASKS, Settings
from trainer.config.inference import ValSettings
from trainer.config.settings import option_of
from trainer.errors import TrainerError

Json = Annotated[bool, typer.Option("--json", help="Print the scores as one line of JSON in place of the table.")]
# Parameters that only detectors have.
BOXES_ONLY = {"conf", "iou", "max_det", "half", "rect", "single_cls", "allow_bad_labels", "v5_map", "annotations"}
BOXES_ONLY |= {"save_json", "save_txt", "save_conf", "cfg"}


@takes(ValSettings, json=(Json, False))
def val(context: typer.Context, *, json: bool, **options: Any) -> None:
    """Print precision, recall and COCO's mAP of each class, and the time per image.

    Several processes share the images: `torchrun --nproc-per-node 2 -m trainer val ...`. P, R and F1 are at the
    confidence with the highest mean F1. The scores of a classifier are top-1 and top-5.
    """
    if options["split"] in TASKS:
        raise TrainerError(
            f"--task {options['split']}: expected train, val or test; --task is another name of --split, as in YOLOv5",
            "omit it: the weights contain the task",
        )
    from trainer.weights import checkpoint_file

    kind = checkpoint_file.load(options["weights"]).get("task", "detect")
    if kind != "detect":
        _score(context, kind, json, options)
        return
    from trainer.inference.validate import as_json, validate

    result = validate(ValSettings(**options))
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


def _score(context: typer.Context, kind: str, json: bool, options: dict[str, Any]) -> None:
    """Score a classifier or a segmentation model."""
    from trainer.inference.score import score
    from trainer.weights import checkpoint_file

    wrong = sorted(typed_options(context) & BOXES_ONLY)
    if wrong:
        raise TrainerError(f"{option_of(wrong[0])} is for boxes, but these are weights of --task {kind}", "omit it")
    if options.pop("split") != "val":
        raise TrainerError(f"--split: weights of --task {kind} are scored on val (or test/ without val/)", "omit it")
    plots = options.pop("plots")
    options = {name: value for name, value in options.items() if name not in BOXES_ONLY}
    imgsz = options.pop("imgsz") or int(checkpoint_file.load(options["weights"])["imgsz"])
    result = score(Settings(task=kind, imgsz=imgsz, **options), plots=plots)
    if not result:
        return
    if json:
        typer.echo(result.as_json())
        return
    typer.echo(result.scores.table())
    found = result.scores.columns()
    titles = "   ".join(f"{title} {found[key]:.3f}" for key, title in result.task.headlines.items())
    typer.echo(f"{titles}   per image at {result.imgsz} px: {result.ms_per_image:.1f} ms")
    if result.folder:
        typer.echo(f"-> {result.folder}")
