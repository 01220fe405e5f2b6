"""Bytes of a record as JSON can carry them: text where it is text, cut where it is long. Pure."""

from __future__ import annotations

import base64
from typing import Final

TEXT_BYTES_MAX: Final = 4096


def text_fields(data: bytes, most: int = TEXT_BYTES_MAX) -> dict[str, object]:
    """`text`, or None where the bytes are none, and whether it was cut."""
    cut = len(data) > most
    shown = data[:most]
    try:
        text: str | None = shown.decode()
    except UnicodeDecodeError as error:
        # A cut may go through a character; anything else is no text.
        text = shown[: error.start].decode() if cut and error.start > len(shown) - 4 else None
    return {"text": text, "cut": cut}


def payload_fields(data: bytes | None, most: int = TEXT_BYTES_MAX) -> dict[str, object]:
    """The bytes in base64 as well, for what is no text."""
    if data is None:
        return {"text": None, "cut": False, "bytes_b64": None, "size": None}
    packed = base64.b64encode(data[:most]).decode()
    return {**text_fields(data, most), "bytes_b64": packed, "size": len(data)}
