"""Data sets in other formats, rewritten as folders in YOLO format."""

from trainer.data.convert.coco import from_coco
from trainer.data.convert.voc import from_voc
from trainer.data.convert.writer import Conversion

__all__ = ["Conversion", "from_coco", "from_voc"]
