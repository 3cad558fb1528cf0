"""The Triton kernel that paints a batch of training images on a GPU; `Painting` describes its tables.

It does in one launch what paint.py does with OpenCV. A program paints ROWS x COLUMNS pixels of one image. It goes
through the layers from the lowest to the highest, skips those whose box is elsewhere, and keeps its pixels in registers
until mixup and the change of colours are done.

There is a single variant of the kernel: an upright layer is one whose matrix has zeros, and an image without a change
of colours has the identity. So Triton compiles once per type of GPU, and an image does not depend on the others of its
batch.

The kernel uses only what is built into Triton, not triton.language.standard, which the interpreter (TRITON_INTERPRET=1)
cannot run if triton was imported before the variable was set.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton
import triton.language as tl

from trainer.data.augment.recipe import HORIZON as _HORIZON
from trainer.data.batch import FILL

BACKGROUND = tl.constexpr(float(FILL))
HORIZON = tl.constexpr(_HORIZON)
# Floats of this size are whole numbers: adding it rounds to nearest, ties to even.
ROUNDING = tl.constexpr(1.5 * 2**23)
# Columns of the tables.
RANGES = tl.constexpr(3)
PLACES = tl.constexpr(3)
CHANGES = tl.constexpr(14)
MAPS = tl.constexpr(21)


@triton.jit
def _round(value):
    return value + ROUNDING - ROUNDING


@triton.jit
def _clamp(value, low, high):
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def _blend(old, at, below, right, down, weight):
    """Return a channel with a layer over it; `at` and `below` are the left ones of the four source bytes.

    Where the weight is 0, nothing is loaded, and any byte will do.
    """
    seen = weight > 0
    top_left = tl.load(at, mask=seen).to(tl.float32)
    top_right = tl.load(at + 3, mask=seen).to(tl.float32)
    bottom_left = tl.load(below, mask=seen).to(tl.float32)
    bottom_right = tl.load(below + 3, mask=seen).to(tl.float32)
    new = (1 - down) * (1 - right) * top_left
    new = tl.fma((1 - down) * right, top_right, new)
    new = tl.fma(down * (1 - right), bottom_left, new)
    new = tl.fma(down * right, bottom_right, new)
    return _round(tl.fma(new - old, weight, old))


@triton.jit
def _scene(
    pool,
    masks,
    places,
    maps,
    begin,
    end,
    x,
    y,
    x_low,
    y_low,
    inside,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the channels of layers `begin` to `end` at the pixels (x (1, COLUMNS), y (ROWS, 1)), in whole numbers."""
    red = tl.full((ROWS, COLUMNS), BACKGROUND, tl.float32)
    green = red
    blue = red
    layer = begin
    while layer < end:  # older interpreters have no range of tensors
        place = places + layer * PLACES
        m = maps + layer * MAPS
        x1 = tl.load(m + 9)
        x2 = tl.load(m + 10)
        y1 = tl.load(m + 11)
        y2 = tl.load(m + 12)
        if (x1 < x_low + COLUMNS) & (x2 > x_low) & (y1 < y_low + ROWS) & (y2 > y_low):
            cover = inside & (x >= x1) & (x < x2) & (y >= y1) & (y < y2)
            mask = tl.load(place + 2)
            if mask >= 0:
                pixel = (y - y1).to(tl.int32) * (x2 - x1).to(tl.int32) + (x - x1).to(tl.int32)
                cover = cover & (tl.load(masks + mask + pixel, mask=cover, other=0) > 0)
            # The point of the source, and how much of a pixel around it is within the source.
            z = tl.load(m + 6) * x + tl.load(m + 7) * y + tl.load(m + 8)
            scale = 1 / tl.where(tl.abs(z) < HORIZON, HORIZON, z)
            u = (tl.load(m) * x + tl.load(m + 1) * y + tl.load(m + 2)) * scale
            v = (tl.load(m + 3) * x + tl.load(m + 4) * y + tl.load(m + 5)) * scale
            across = 1 - tl.abs(u - _clamp(u, tl.load(m + 17), tl.load(m + 18)))
            along = 1 - tl.abs(v - _clamp(v, tl.load(m + 19), tl.load(m + 20)))
            weight = tl.where(cover, tl.maximum(across, 0.0) * tl.maximum(along, 0.0), 0.0)
            # The four pixels around the point, of those that are packed.
            u = _clamp(u, tl.load(m + 13), tl.load(m + 14))
            v = _clamp(v, tl.load(m + 15), tl.load(m + 16))
            left = u.to(tl.int32)
            top = v.to(tl.int32)
            stride = tl.load(place + 1).to(tl.int32)
            at = pool + 3 * tl.load(place) + 3 * (top * stride + left).to(tl.int64)
            below = at + 3 * stride
            right = u - left
            down = v - top
            red = _blend(red, at, below, right, down, weight)
            green = _blend(green, at + 1, below + 1, right, down, weight)
            blue = _blend(blue, at + 2, below + 2, right, down, weight)
        layer += 1
    return red, green, blue


@triton.jit(
    do_not_specialize=["images", "pool", "ranges", "places", "changes", "maps", "masks", "height", "width"],
)
def paint_batch(
    images,
    pool,
    ranges,
    places,
    changes,
    maps,
    masks,
    height,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Paint into `images` uint8 (b, height, width, 3), on a grid of (columns, rows, b) programs."""
    image = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < height) & (column < width)
    change = changes + image * CHANGES
    # The layers' coordinates are those before the flips.
    flip_x = tl.load(change + 12) > 0
    flip_y = tl.load(change + 13) > 0
    x_low = tl.program_id(0) * COLUMNS
    x_low = tl.where(flip_x, width - x_low - COLUMNS, x_low)
    y_low = tl.program_id(1) * ROWS
    y_low = tl.where(flip_y, height - y_low - ROWS, y_low)
    x = tl.where(flip_x, width - 1 - column, column).to(tl.float32)
    y = tl.where(flip_y, height - 1 - row, row).to(tl.float32)
    begin = tl.load(ranges + image * RANGES)
    middle = tl.load(ranges + image * RANGES + 1)
    end = tl.load(ranges + image * RANGES + 2)
    red, green, blue = _scene(
        pool, masks, places, maps, begin, middle, x, y, x_low, y_low, inside, ROWS, COLUMNS
    )
    share = tl.load(change)
    if share < 1:  # mixup
        red2, green2, blue2 = _scene(
            pool, masks, places, maps, middle, end, x, y, x_low, y_low, inside, ROWS, COLUMNS
        )
        red = _round(red * share + red2 * (1 - share))
        green = _round(green * share + green2 * (1 - share))
        blue = _round(blue * share + blue2 * (1 - share))
    # As paint.shift_colours, which rounds to whole numbers and clips after each step.
    own = tl.load(change + 1)
    shared = tl.load(change + 2) * tl.maximum(red, tl.maximum(green, blue))
    red = _clamp(_round(tl.fma(own, red, shared)), 0.0, 255.0)
    green = _clamp(_round(tl.fma(own, green, shared)), 0.0, 255.0)
    blue = _clamp(_round(tl.fma(own, blue, shared)), 0.0, 255.0)
    pixel = images + 3 * ((image * height + row) * width + column)
    for channel in tl.static_range(3):
        turn = change + 3 + 3 * channel
        turned = tl.fma(tl.load(turn + 2), blue, tl.fma(tl.load(turn + 1), green, tl.load(turn) * red))
        tl.store(pixel + channel, _clamp(_round(turned), 0.0, 255.0).to(tl.uint8), mask=inside)
