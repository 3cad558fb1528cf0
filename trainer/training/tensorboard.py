"""Event files as TensorBoard reads them, written here: the trainer needs no package for that, the viewer does.

A file is a row of TFRecords, each one `Event` message of TensorFlow's event.proto. Only what is needed is known here:
numbers and encoded pictures, each with its step.
"""

from __future__ import annotations

import struct
import time
from pathlib import Path
from types import TracebackType

_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # protobuf's wire types
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, bits reversed


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _crc_table()


def _masked_crc(data: bytes) -> int:
    """CRC-32C, rotated and shifted as TFRecords want it."""
    crc, table = 0xFFFFFFFF, _TABLE
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _field(number: int, value: int | float | bytes, kind: int) -> bytes:
    """One field of a message: its number and wire type, then the value."""
    key = _varint(number << 3 | kind)
    if isinstance(value, bytes):
        return key + _varint(len(value)) + value
    if kind == _VARINT:
        return key + _varint(int(value))
    return key + struct.pack("<d" if kind == _DOUBLE else "<f", value)


class EventFile:
    """A new event file in a folder; what is added is on the disk at once, so that a viewer can follow a run."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        """`first_step` is where this part of a run begins: what an interrupted one wrote from there on is void."""
        now = time.time()
        path = folder / f"events.out.tfevents.{time.time_ns() // 1000:016d}.trainer"
        self._file = path.open("xb")
        self._write(_field(1, now, _DOUBLE) + _field(3, b"brain.Event:2", _BYTES))
        start = _field(1, 1, _VARINT)  # SessionLog.START
        self._write(_field(1, now, _DOUBLE) + _field(2, first_step, _VARINT) + _field(7, start, _BYTES))

    def numbers(self, step: int, values: dict[str, float]) -> None:
        """Add numbers under their names."""
        tagged = [(name, _field(2, value, _FLOAT)) for name, value in values.items()]
        self._summary(step, tagged)

    def picture(self, step: int, name: str, encoded: bytes, height: int, width: int) -> None:
        """Add a picture that is already PNG or JPEG; sides in pixels."""
        image = _field(1, height, _VARINT) + _field(2, width, _VARINT) + _field(3, 3, _VARINT)
        self._summary(step, [(name, _field(4, image + _field(4, encoded, _BYTES), _BYTES))])

    def _summary(self, step: int, tagged: list[tuple[str, bytes]]) -> None:
        values = [_field(1, _field(1, tag.encode(), _BYTES) + value, _BYTES) for tag, value in tagged]
        self._write(_field(1, time.time(), _DOUBLE) + _field(2, step, _VARINT) + _field(5, b"".join(values), _BYTES))

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        record = length + struct.pack("<I", _masked_crc(length)) + event + struct.pack("<I", _masked_crc(event))
        self._file.write(record)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> EventFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
