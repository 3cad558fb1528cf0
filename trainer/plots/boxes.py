"""Pictures with boxes on them: what a model found, and what it is trained on."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from trainer.data import Batch
from trainer.data.dataset import Image

_CELL_PX = 420  # the longer side of a picture in the grid
_GAP_PX = 10
_TEXT_PX = 22  # below a picture
_MOST = 16  # pictures of a training batch that are drawn
_FONT = cv2.FONT_HERSHEY_SIMPLEX  # drawn from strokes, in OpenCV itself: nothing to download

# image uint8 (h, w, 3) RGB, boxes (n, 4) xyxy in its pixels, scores (n,) or None, classes (n,)
Predictions = tuple[Image, npt.ArrayLike, npt.ArrayLike | None, npt.ArrayLike]


def class_colour(index: int) -> tuple[int, int, int]:
    """A strong RGB colour for class `index`, dark enough for white text; hues go in steps of the golden angle."""
    hue = (0.58 + index * 0.61803398875) % 1
    red, green, blue = colorsys.hls_to_rgb(hue, (0.38, 0.45, 0.30)[index % 3], 0.85)
    return round(red * 255), round(green * 255), round(blue * 255)


def _draw_label(picture: Image, text: str, x: int, y: int, colour: tuple[int, int, int], scale: float) -> None:
    """Text on a filled tag that stands on the box's upper edge `y`, or below it at the picture's border."""
    size, weight, margin = 0.42 * scale, max(1, round(scale)), round(3 * scale)
    (width, height), below = cv2.getTextSize(text, _FONT, size, weight)
    tall = height + below + margin
    x = max(0, min(x, picture.shape[1] - width - 2 * margin))
    top = y - tall if y >= tall else y
    cv2.rectangle(picture, (x, top), (x + width + 2 * margin, top + tall), colour, cv2.FILLED)
    white = (255, 255, 255)
    cv2.putText(picture, text, (x + margin, top + height + margin // 2 + 1), _FONT, size, white, weight, cv2.LINE_AA)


def draw_boxes(
    picture: Image,
    boxes: npt.ArrayLike,
    scores: npt.ArrayLike | None,
    classes: npt.ArrayLike,
    names: Sequence[str],
    scale: float = 1.0,
) -> None:
    """Draw boxes (n, 4) xyxy px with their names and scores on `picture`, in place; the surest last, on top.

    `scale` is the size of lines and text, 1 for a picture of about 500 px.
    """
    xyxy = np.rint(np.asarray(boxes, np.float64).reshape(-1, 4)).astype(int)
    label = np.asarray(classes).astype(int).reshape(-1)
    score = np.zeros(len(label)) if scores is None else np.asarray(scores, np.float64).reshape(-1)
    order = np.argsort(score, kind="stable")
    for k in order:
        x1, y1, x2, y2 = xyxy[k].tolist()
        colour = class_colour(int(label[k]))
        cv2.rectangle(picture, (x1, y1), (x2, y2), colour, max(1, round(2 * scale)), cv2.LINE_AA)
    for k in order:  # tags over all boxes, else a box strikes its neighbour's text through
        name = names[label[k]]
        text = name if name.isascii() else f"class {label[k]}"  # the font has no other letters
        if scores is not None:
            text += f" {score[k]:.2f}"
        _draw_label(picture, text, int(xyxy[k, 0]) - 1, int(xyxy[k, 1]), class_colour(int(label[k])), scale)


def _draw_picture(prediction: Predictions, names: Sequence[str]) -> Image:
    """One picture, its longer side made `_CELL_PX`, with its boxes."""
    image, boxes, scores, classes = prediction
    scale = _CELL_PX / max(image.shape[:2])
    size = (max(1, round(image.shape[1] * scale)), max(1, round(image.shape[0] * scale)))
    how = cv2.INTER_CUBIC if scale > 1 else cv2.INTER_AREA
    picture: Any = cv2.resize(image, size, interpolation=how)
    draw_boxes(picture, np.asarray(boxes, np.float64).reshape(-1, 4) * scale, scores, classes, names)
    return np.asarray(picture)


def draw_predictions(predictions: Sequence[Predictions], names: Sequence[str], path: str | Path) -> Image:
    """Write a grid of pictures with their boxes, class names and scores to `path` (.png or .jpg), and return it.

    A prediction is (image uint8 (h, w, 3) RGB, boxes (n, 4) xyxy in its pixels, scores (n,) or None, classes (n,)).
    """
    if not predictions:
        raise ValueError("no pictures to draw")
    whole = grid([_draw_picture(prediction, names) for prediction in predictions])
    write_picture(whole, Path(path), jpeg_quality=88)
    return whole


def draw_batch(batch: Batch, names: Sequence[str], path: str | Path) -> None:
    """Write the first pictures of a training batch, as the network gets them, with their labels."""
    side = np.tile(batch.images.shape[2:0:-1], 2)  # w, h, w, h
    pictures = []
    for k, image in enumerate(batch.images[:_MOST].numpy()):
        rows = batch.targets[batch.targets[:, 0] == k].numpy()
        centre, half = rows[:, 2:4], rows[:, 4:] / 2
        pictures.append((image, np.concatenate([centre - half, centre + half], 1) * side, None, rows[:, 1]))
    draw_predictions(pictures, names, path)


def captioned(picture: Image, text: str, colour: tuple[int, int, int], least_width: int = 0) -> Image:
    """The picture with as much of the text as fits in a white line below it."""
    height, width = picture.shape[:2]
    cell = np.full((height + _TEXT_PX, max(width, least_width), 3), 255, np.uint8)
    cell[:height, :width] = picture
    while len(text) > 1 and cv2.getTextSize(text, _FONT, 0.42, 1)[0][0] > cell.shape[1] - 4:
        text = text[:-1]
    cv2.putText(cell, text, (2, height + 15), _FONT, 0.42, colour, 1, cv2.LINE_AA)
    return cell


def grid(pictures: Sequence[Image]) -> Image:
    """The pictures side by side, in as many rows as columns."""
    columns = math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    width, height = max(p.shape[1] for p in pictures), max(p.shape[0] for p in pictures)
    grid = np.full((rows * (height + _GAP_PX) + _GAP_PX, columns * (width + _GAP_PX) + _GAP_PX, 3), 255, np.uint8)
    for k, picture in enumerate(pictures):
        h, w = picture.shape[:2]
        y = _GAP_PX + k // columns * (height + _GAP_PX) + (height - h) // 2
        x = _GAP_PX + k % columns * (width + _GAP_PX) + (width - w) // 2
        grid[y : y + h, x : x + w] = picture
    return grid


def write_picture(picture: Image, path: Path, jpeg_quality: int = 95) -> None:
    """Write an RGB picture in the format of the path's suffix, whole or not at all."""
    options = [cv2.IMWRITE_JPEG_QUALITY, jpeg_quality] if path.suffix in (".jpg", ".jpeg") else []
    done, data = cv2.imencode(path.suffix, cv2.cvtColor(picture, cv2.COLOR_RGB2BGR), options)
    if not done:
        raise ValueError(f"{path}: cannot be encoded")
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data.tobytes())
    temporary.replace(path)
