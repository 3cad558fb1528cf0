"""`trainer val`: scores trained weights on a dataset."""

from typing import Annotated, Any

import typer

from trainer.cli.options import takes, typed_options
from trainer.config import TASKS, Settings
from trainer.config.inference import ValSettings
from trainer.config.settings import option_of
from trainer.errors import TrainerError

Json = Annotated[
    bool, typer.Option("--json", help="Print the scores as one line of JSON instead of the table.")
]
# Parameters that only detectors have.
BOXES_ONLY = {
    "conf",
    "iou",
    "max_det",
    "half",
    "rect",
    "single_cls",
    "allow_bad_labels",
    "v5_map",
    "annotations",
}
BOXES_ONLY |= {"save_json", "save_txt", "save_conf", "cfg"}


@takes(ValSettings, json=(Json, False))
def val(context: typer.Context, *, json: bool, **options: Any) -> None:
    """Print precision, recall and COCO's mAP of each class, and the time per image.

    Several processes share the images: torchrun --nproc-per-node 2 -m trainer val ... P, R and F1 are at the
    confidence with the highest mean F1. A classifier's scores are top-1 and top-5.
    """
    if options["split"] in TASKS:
        raise TrainerError(
            f"--task {options['split']}: expected train, val or test; --task is another name of --split, as in YOLOv5",
            "omit it: the weights contain the task",
        )
    from trainer.detectors import load_weights
    from trainer.inference.score import Scored, score
    from trainer.inference.validate import Validation, validate

    content = load_weights(options["weights"])
    kind = content.get("task", "detect")
    result: Validation | Scored | None
    if kind == "detect":
        result = validate(ValSettings(**options))
    else:
        settings = _settings_of(kind, int(content["imgsz"]), options, typed_options(context))
        result = score(settings, plots=options["plots"])
    if result:
        typer.echo(result.as_json() if json else result.text())
        if result.folder and not json:
            typer.echo(f"-> {result.folder}")


def _settings_of(kind: str, imgsz: int, options: dict[str, Any], typed: frozenset[str]) -> Settings:
    """Return the settings to score a classifier or a segmentation model that was trained at `imgsz`."""
    if wrong := sorted(typed & BOXES_ONLY):
        raise TrainerError(
            f"{option_of(wrong[0])} is for boxes, but these are weights of --task {kind}", "omit it"
        )
    if options["split"] != "val":
        raise TrainerError(
            f"--split: weights of --task {kind} are scored on val (or test/ without val/)", "omit it"
        )
    common = {
        name: value for name, value in options.items() if name not in BOXES_ONLY | {"split", "plots", "imgsz"}
    }
    return Settings(task=kind, imgsz=imgsz if options["imgsz"] is None else options["imgsz"], **common)
