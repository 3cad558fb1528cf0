"""Text files of other programs, some of which begin with a byte-order mark."""

import codecs
from pathlib import Path

# UTF-32 first: its mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def read_text(path: str | Path) -> str:
    """Return the text of a file in UTF-8, or in the encoding of its byte-order mark, without the mark.

    Raises OSError, and UnicodeDecodeError for another encoding.
    """
    content = Path(path).read_bytes()
    encoding = next((name for mark, name in _MARKS if content.startswith(mark)), "utf-8")
    return content.decode(encoding)
