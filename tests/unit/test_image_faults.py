"""Images that are damaged, incomplete, very large or of other formats: each is read, or named before training."""

import io
import os
import signal
import struct
import threading
import zlib
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from tests.conftest import wait_until
from tests.unit.test_absent_data import checked, trained
from tests.unit.yolo_folder import make_yolo_set, write_image
from trainer.data.formats.yolo import Yolo
from trainer.data.images.image_check import decode_images, read_headers
from trainer.data.registry import open_dataset

SIZE = (64, 96)
BACKGROUND = "has no label file, so it counts as background"


def pixels(bits: int = 8) -> npt.NDArray[np.uint16]:
    """A smooth image with values of so many bits, the highest among them."""
    coarse = np.random.default_rng(1).integers(0, 2**bits, (6, 9, 3), np.uint16)
    coarse[0, 0] = 2**bits - 1
    return cv2.resize(coarse, SIZE[::-1], interpolation=cv2.INTER_NEAREST)  # type: ignore[return-value]


def encoded(suffix: str, image: npt.NDArray[np.generic] | None = None) -> bytes:
    image = pixels().astype(np.uint8) if image is None else image
    return cv2.imencode(suffix, image)[1].tobytes()


def frames(kind: str) -> bytes:
    """Three frames; the first is red."""
    images = [Image.new("RGB", SIZE[::-1], colour) for colour in ("red", "green", "blue")]
    content = io.BytesIO()
    images[0].save(content, kind, save_all=True, append_images=images[1:])
    return content.getvalue()


def png_header(width: int, height: int) -> bytes:
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", size), (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b"")]
    packed = [
        struct.pack(">I", len(c)) + kind + c + struct.pack(">I", zlib.crc32(kind + c)) for kind, c in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def set_with(root: Path, name: str, content: bytes) -> Path:
    """A dataset in which every image has a label, with one more image."""
    path = make_yolo_set(root)
    for label in ("train/000", "train/003", "val/000"):
        (root / f"labels/{label}.txt").touch()
    (root / "labels/train" / f"{Path(name).stem}.txt").write_text("0 0.5 0.5 0.2 0.2\n")
    (root / "images/train" / name).write_bytes(content)
    return path


def spoiled(content: bytes, value: int = 0x5A, length: int = 40) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([value]) * length + content[middle + length :]


def size_of(value: object) -> str | None:
    return f"{len(value)} bytes" if isinstance(value, bytes) else None


JPEG = encoded(".jpg")
PNG = encoded(".png")


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("x.jpg", b"", "empty file"),
        ("x.png", b"", "empty file"),
        ("x.jpg", b"words", "cannot identify image file it"),
        ("x.jpg", JPEG[: len(JPEG) // 2], "truncated, its last rows are missing"),
        ("x.jpg", JPEG[:-12], "truncated, its last rows are missing"),
        ("x.png", PNG[: len(PNG) // 2], "it cannot be decoded"),
        ("x.png", PNG[:-12], "it cannot be decoded"),
        ("x.png", spoiled(PNG), "it cannot be decoded"),
        ("x.webp", frames("WEBP")[:200], None),
        ("x.tiff", encoded(".tiff", pixels().astype(np.float32)), None),
        (
            "x.png",
            png_header(40_000, 40_000),
            "40000 x 40000 px are more than the 1,073,741,824 px that can be decoded",
        ),
    ],
    ids=size_of,
)
def test_an_image_that_cannot_be_read_is_a_fault(
    tmp_path: Path, name: str, content: bytes, what: str | None
) -> None:
    set_with(tmp_path, name, content)
    faults, warnings = checked(tmp_path)
    (fault,) = faults
    assert fault.startswith(f"{tmp_path / 'images/train' / name}: not a readable image: {what or ''}")
    assert "_io." not in fault
    assert trained(tmp_path) == (faults, warnings) == (faults, [])
    data = Yolo(str(tmp_path / "data.yaml"), "train", allow_bad_labels=True)
    assert name not in [Path(data.name(k)).name for k in range(len(data))]


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("x.jpg", JPEG[:-2], "lacks the end marker of a JPEG, and is complete without it"),
        ("x.jpg", spoiled(JPEG), "is damaged, so a part of it is wrong: Corrupt JPEG data: "),
        ("x.jpg", spoiled(JPEG, 0, 200), "is damaged, so a part of it is wrong: Corrupt JPEG data: "),
        ("x.png", encoded(".png", pixels(10)), "has 16 bits per value but none above 1,023: "),
        ("x.png", encoded(".png", pixels(12)), "has 16 bits per value but none above 4,095: "),
        ("x.png", encoded(".png", pixels(14)), "has 16 bits per value but none above 16,383: "),
        ("x.png", encoded(".png", pixels(12)[..., 0]), "has 16 bits per value but none above 4,095: "),
        ("x.tif", encoded(".tif", pixels(12)), "has 16 bits per value but none above 4,095: "),
        ("x.webp", frames("WEBP"), "has 3 frames, of which the first is read"),
        ("x.png", frames("PNG"), "has 3 frames, of which the first is read"),
        ("x.tif", frames("TIFF"), "has 3 frames, of which the first is read"),
        ("x.png", frames("GIF"), "has 3 frames, of which the first is read"),
    ],
    ids=size_of,
)
def test_an_odd_image_is_read_with_a_warning(tmp_path: Path, name: str, content: bytes, what: str) -> None:
    path = set_with(tmp_path, name, content)
    faults, warnings = checked(tmp_path)
    assert faults == []
    (warning,) = warnings
    assert warning.startswith(f"{tmp_path / 'images/train' / name}: {what}")
    assert trained(tmp_path) == (faults, warnings)
    data = open_dataset(str(path), "train", imgsz=64)
    assert data.image(4).shape == (*SIZE, 3) == (*data.size(4), 3)
    if "frames" in what:
        assert data.image(4)[30, 30].tolist() == pytest.approx([255, 0, 0], abs=2)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jpg", JPEG + b"appended by a camera"),
        ("x.png", encoded(".png", pixels(16))),
        ("x.png", encoded(".png", pixels(12) << 4)),
        ("x.png", encoded(".png", np.zeros(SIZE, np.uint16))),  # nothing is lost of black
        ("x.tif", encoded(".tif")),
        ("x.bmp", encoded(".bmp")),
        ("x.webp", encoded(".webp")),
    ],
    ids=size_of,
)
def test_other_images_have_no_warning(tmp_path: Path, name: str, content: bytes) -> None:
    set_with(tmp_path, name, content)
    assert checked(tmp_path) == ([], [])


def test_warnings_of_one_kind_are_counted_and_damage_is_named(tmp_path: Path) -> None:
    path = set_with(tmp_path, "x.jpg", JPEG[:-2])
    for k in (0, 1):
        (tmp_path / f"images/train/00{k}.jpg").write_bytes(encoded(".jpg")[:-2])
    for k in (2, 3):
        (tmp_path / f"images/train/00{k}.jpg").write_bytes(spoiled(JPEG))
    _, warnings = checked(tmp_path)
    folder = path.parent / "images/train"
    assert [text.partition(": ")[0] for text in warnings] == [f"{folder}/00{k}.jpg" for k in (0, 2, 3)]
    assert warnings[0].endswith("complete without it (the first of 3)")


def test_a_jpeg_without_its_end_has_all_its_rows(tmp_path: Path) -> None:
    path = set_with(tmp_path, "x.jpg", JPEG[:-2])
    whole = cv2.cvtColor(cv2.imdecode(np.frombuffer(JPEG, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
    np.testing.assert_array_equal(open_dataset(str(path), "train", imgsz=64).image(4), whole)


def test_an_image_of_182_megapixels_is_read(tmp_path: Path) -> None:
    large = np.full((13_500, 13_500), 200, np.uint8)
    path = set_with(tmp_path, "x.jpg", encoded(".jpg", large))
    del large
    assert checked(tmp_path) == ([], [])
    data = open_dataset(str(path), "train", imgsz=64)
    assert data.size(4) == (13_500, 13_500)
    assert data.image(4, 64).shape == (1688, 1688, 3)


def test_only_changed_images_are_decoded_again(tmp_path: Path) -> None:
    path = set_with(tmp_path, "x.jpg", JPEG)
    assert checked(tmp_path) == ([], [])
    label = tmp_path / "labels/train/001.txt"
    label.write_text("0 0.5 0.5 0.1 0.3\n")
    image = tmp_path / "images/train/x.jpg"
    before = image.stat()
    image.write_bytes(spoiled(JPEG))
    os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if it were the same file
    assert len(open_dataset(str(path), "train", imgsz=64)) == 5
    assert checked(tmp_path) == ([], [])
    image.touch()
    _, warnings = checked(tmp_path)
    assert [text.partition(": ")[0] for text in warnings] == [str(image)]


def test_a_damaged_file_of_states_is_replaced(tmp_path: Path) -> None:
    set_with(tmp_path, "x.jpg", JPEG[:-2])
    _, warnings = checked(tmp_path)
    (states,) = (tmp_path / ".trainer-cache").glob("images-*.json")
    for text in ("", "[]", '{"images/train/x.jpg": 3}', states.read_text()[:100]):
        states.write_text(text)
        (tmp_path / "labels/train/001.txt").touch()
        assert checked(tmp_path) == ([], warnings)


def test_modules_in_the_current_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_image(tmp_path / "a.jpg")
    (tmp_path / "json.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    (state,) = decode_images(["a.jpg"])
    assert (state.height, state.width, state.problem) == (48, 64, "")


def test_a_decoder_that_ends_is_a_fault_and_the_next_image_is_read(tmp_path: Path) -> None:
    write_image(tmp_path / "good.jpg")
    os.mkfifo(tmp_path / "endless.jpg")  # its decoder waits for the first byte
    states = []
    asking = threading.Thread(
        target=lambda: states.extend(
            decode_images([str(tmp_path / name) for name in ("endless.jpg", "good.jpg")])
        )
    )
    asking.start()
    (worker,) = wait_until(lambda: children_with("image_worker"), timeout_s=60)
    os.kill(worker, signal.SIGKILL)
    asking.join()
    ended, good = states
    assert ended.problem == "decoding it ended the decoder with signal 9; is there enough memory?"
    assert not ended.is_final
    assert (good.height, good.width, good.problem) == (48, 64, "")
    assert not children_with("image_worker")


def children_with(word: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and word in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_headers_find_a_jpeg_that_is_cut_off(tmp_path: Path) -> None:
    for name, content in (("whole", JPEG), ("no_end", JPEG[:-2]), ("half", JPEG[: len(JPEG) // 2])):
        (tmp_path / f"{name}.jpg").write_bytes(content)
    whole, no_end, half = read_headers(
        [str(tmp_path / f"{name}.jpg") for name in ("whole", "no_end", "half")]
    )
    assert (whole.height, whole.width) == (no_end.height, no_end.width) == SIZE
    assert half.problem
