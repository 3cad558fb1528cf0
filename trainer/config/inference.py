"""Settings of `trainer val` and `trainer predict`: one table of their options each."""

from dataclasses import dataclass

from trainer.config.settings import REQUIRED, check_declared, option
from trainer.errors import TrainerError


@dataclass(frozen=True, kw_only=True)
class InferenceSettings:
    """Settings of an inference. The constructor checks all that needs no file and no device."""

    weights: str = option(
        REQUIRED,
        "Weights: best.pt of a run, or any weights that trainer train accepts.",
    )
    imgsz: int | None = option(
        None, "Longer side of the scaled images, in pixels. [default: as in training]", *("--imgsz", "--img")
    )
    device: str = option(
        "",
        "cpu, cuda or a GPU number; under torchrun GPU numbers (0,1: one per rank). [default: the first GPU, or the "
        "CPU]",
    )
    precision: str = option(
        "auto", "bf16, fp32 or auto. auto: bf16 where the CPU or GPU supports it natively."
    )
    half: bool = option(False, "Compute in 16 bits: fp16 on a GPU, bf16 on a CPU.")
    save_txt: bool = option(False, "Write the boxes as labels/*.txt in YOLO's format.")
    save_conf: bool = option(False, "With --save-txt: write the score as the last column.")
    project: str = option("runs", "Folder that holds the result folder.")
    exist_ok: bool = option(False, "Write into the folder even if it exists.")
    cfg: str = option("", "package.module:function that builds the model, for weights of your own model.")

    def __post_init__(self) -> None:
        check_declared(self)
        if self.save_conf and not self.save_txt:
            raise TrainerError("--save-conf: no labels are written", "add --save-txt")


@dataclass(frozen=True, kw_only=True)
class ValSettings(InferenceSettings):
    """Settings of `trainer val` for a detector."""

    data: str = option(
        REQUIRED,
        "digits, a data.yaml or, for a classifier or segmenter, a folder. Its classes must match the weights.",
    )
    split: str = option(
        "val", "Split: train, val or test.", "--split", "--task", known=("train", "val", "test")
    )
    batch: int = option(32, "Images per batch and rank, at most 32.", "--batch", "--batch-size", least=1)
    conf: float = option(
        0.001, "Minimum score of a box; higher values lower the mAP.", "--conf", "--conf-thres"
    )
    iou: float = option(0.6, "IoU threshold of the non-maximum suppression, 0 to 1.", "--iou", "--iou-thres")
    max_det: int = option(300, "Maximum number of boxes per image.")
    workers: int | None = option(
        None, "Dataloader workers per rank. [default: 0 on a CPU, up to 8 on a GPU]", least=0
    )
    rect: bool = option(
        True,
        "Pad batches of similar images as little as possible, or to squares. SSDlite and the DETRs always get squares.",
        "--rect/--no-rect",
    )
    single_cls: bool = option(False, "Treat all classes as one, for weights trained with --single-cls.")
    allow_bad_labels: bool = option(
        False, "Skip invalid label rows and images instead of stopping with an error."
    )
    v5_map: bool = option(False, "Compute mAP as YOLOv5 does; it differs from COCO's mAP.")
    annotations: str = option(
        "", "COCO's instances_*.json of the images: its boxes, areas and crowds replace labels."
    )
    save_json: bool = option(False, "Write predictions.json in COCO's results format.")
    plots: bool = option(True, "Draw the curves, the confusion matrix and some images.", "--plots/--no-plots")
    name: str = option(
        "val", "Name of the result folder. If it exists, a number is appended: NAME2, NAME3, ..."
    )


@dataclass(frozen=True, kw_only=True)
class PredictSettings(InferenceSettings):
    """Settings of `trainer predict`."""

    conf: float = option(0.25, "Minimum score of a box.", "--conf", "--conf-thres")
    iou: float = option(0.45, "IoU threshold of the non-maximum suppression, 0 to 1.", "--iou", "--iou-thres")
    max_det: int = option(1000, "Maximum number of boxes per image.")
    classes: str = option(
        "", "Detect only these classes: cat,dog or 0,2 (or 0 2, as in YOLOv5). [default: all]"
    )
    nosave: bool = option(False, "Draw nothing.")
    save_json: bool = option(False, "Write all predictions to predictions.json.")
    save_masks: bool = option(False, "Write masks/*.png of a segmentation model: the class of each pixel.")
    name: str = option(
        "predict", "Name of the result folder. If it exists, a number is appended: NAME2, NAME3, ..."
    )
