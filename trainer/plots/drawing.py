"""Drawing with OpenCV: boxes, captions, grids of images."""

import colorsys
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from trainer.data.dataset import Image
from trainer.weights.checkpoint_file import write_bytes

_GAP_PX = 10
_TEXT_PX = 22  # below an image
_FONT = cv2.FONT_HERSHEY_SIMPLEX  # part of OpenCV; ASCII only


def class_colour(index: int) -> tuple[int, int, int]:
    """Return the RGB colour of a class, dark enough for white text; hues advance by the golden angle."""
    hue = (0.58 + index * 0.61803398875) % 1
    red, green, blue = colorsys.hls_to_rgb(hue, (0.38, 0.45, 0.30)[index % 3], 0.85)
    return round(red * 255), round(green * 255), round(blue * 255)


def class_text(names: Sequence[str], index: int) -> str:
    """Return the name of a class; the font has only ASCII."""
    return names[index] if names[index].isascii() else f"class {index}"


def _draw_label(image: Image, text: str, x: int, y: int, colour: tuple[int, int, int], scale: float) -> None:
    """Draw text on a filled tag above the box's upper edge `y`, or below it at the image's border."""
    size = 0.42 * scale
    weight = max(1, round(scale))
    margin = round(3 * scale)
    (width, height), below = cv2.getTextSize(text, _FONT, size, weight)
    tall = height + below + margin
    x = max(0, min(x, image.shape[1] - width - 2 * margin))
    top = y - tall if y >= tall else y
    cv2.rectangle(image, (x, top), (x + width + 2 * margin, top + tall), colour, cv2.FILLED)
    white = (255, 255, 255)
    cv2.putText(
        image, text, (x + margin, top + height + margin // 2 + 1), _FONT, size, white, weight, cv2.LINE_AA
    )


def draw_boxes(
    image: Image, boxes: Any, scores: Any, classes: Any, names: Sequence[str], scale: float = 1.0
) -> None:
    """Draw boxes (n, 4) xyxy px with class names and scores on `image`, in place, in ascending order of score.

    `scale` is the size of lines and text: 1 for an image of about 500 px.
    """
    xyxy = np.rint(np.asarray(boxes, np.float64).reshape(-1, 4)).astype(int)
    label = np.asarray(classes).astype(int).reshape(-1)
    score = np.zeros(len(label)) if scores is None else np.asarray(scores, np.float64).reshape(-1)
    order = np.argsort(score, kind="stable")
    for k in order:
        x1, y1, x2, y2 = xyxy[k].tolist()
        colour = class_colour(int(label[k]))
        cv2.rectangle(image, (x1, y1), (x2, y2), colour, max(1, round(2 * scale)), cv2.LINE_AA)
    for k in order:  # after all boxes, so that no box crosses a tag
        text = class_text(names, label[k]) + ("" if scores is None else f" {score[k]:.2f}")
        _draw_label(image, text, int(xyxy[k, 0]) - 1, int(xyxy[k, 1]), class_colour(int(label[k])), scale)


def draw_class(image: Image, names: Sequence[str], index: int, score: float, scale: float = 1.0) -> None:
    """Draw a class with its score into the upper left corner of `image`, in place; `scale` as for `draw_boxes`."""
    _draw_label(image, f"{class_text(names, index)} {score:.2f}", 0, 0, class_colour(index), scale)


def scaled(image: Image, side: int) -> Image:
    """Return the image with a longer side of `side` px."""
    scale = side / max(image.shape[:2])
    size = (max(1, round(image.shape[1] * scale)), max(1, round(image.shape[0] * scale)))
    interpolation = cv2.INTER_NEAREST if scale > 1 else cv2.INTER_AREA
    return np.asarray(cv2.resize(np.ascontiguousarray(image), size, interpolation=interpolation))


def captioned(image: Image, text: str, colour: tuple[int, int, int]) -> Image:
    """Return the image with the text, truncated to its width, in a white line below it."""
    height, width = image.shape[:2]
    cell = np.concatenate((image, np.full((_TEXT_PX, width, 3), 255, np.uint8)))
    while len(text) > 1 and cv2.getTextSize(text, _FONT, 0.42, 1)[0][0] > width - 4:
        text = text[:-1]
    cv2.putText(cell, text, (2, height + 15), _FONT, 0.42, colour, 1, cv2.LINE_AA)
    return cell


def write_grid(images: Sequence[Image], path: Path) -> Image:
    """Write the images in a square grid, and return it."""
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    width = max(p.shape[1] for p in images)
    height = max(p.shape[0] for p in images)
    grid = np.full(
        (rows * (height + _GAP_PX) + _GAP_PX, columns * (width + _GAP_PX) + _GAP_PX, 3), 255, np.uint8
    )
    for k, image in enumerate(images):
        h, w = image.shape[:2]
        y = _GAP_PX + k // columns * (height + _GAP_PX) + (height - h) // 2
        x = _GAP_PX + k % columns * (width + _GAP_PX) + (width - w) // 2
        grid[y : y + h, x : x + w] = image
    write_image(grid, path, jpeg_quality=88)
    return grid


def write_image(image: Image, path: Path, jpeg_quality: int = 95) -> None:
    """Write an RGB image atomically, in the format of the path's suffix."""
    options = [cv2.IMWRITE_JPEG_QUALITY, jpeg_quality] if path.suffix in (".jpg", ".jpeg") else []
    done, data = cv2.imencode(path.suffix, cv2.cvtColor(image, cv2.COLOR_RGB2BGR), options)
    if not done:
        raise ValueError(f"{path}: cannot be encoded")
    write_bytes(path, data.tobytes())
