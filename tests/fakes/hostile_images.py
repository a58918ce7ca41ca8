"""Image files that a client should not send, and data URLs of them."""

from __future__ import annotations

import base64
import io
import os
import zlib
from typing import Any

from PIL import Image as Pil


def file(kind: str = "PNG", size: tuple[int, int] = (8, 6), **options: object) -> bytes:
    """Return an image of one colour."""
    out = io.BytesIO()
    Pil.new("RGB", size, (200, 30, 30)).save(out, kind, **options)
    return out.getvalue()


def huge() -> bytes:
    """Return a few bytes that claim to be 900 million pixels."""
    head = bytearray(file())
    head[16:24] = (30_000).to_bytes(4, "big") * 2
    head[29:33] = zlib.crc32(head[12:29]).to_bytes(4, "big")
    return bytes(head)


def progressive(more: int, **options: Any) -> bytes:
    """Return a JPEG whose last scan is repeated `more` times."""
    data = file("JPEG", progressive=True, **options)
    last, end = data.rindex(b"\xff\xda"), len(data) - 2
    return data[:end] + data[last:end] * more + data[end:]


def noise() -> bytes:
    """Return a PNG that cannot be compressed."""
    out = io.BytesIO()
    Pil.frombytes("RGB", (30, 30), os.urandom(2_700)).save(out, "PNG")
    return out.getvalue()


def swollen_text() -> bytes:
    """Return a small PNG with a compressed comment of 200 MiB."""
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(bytes(1 << 20)) for _ in range(200)) + packer.flush()
    body = b"zTXt" + b"Comment\0\0" + packed
    chunk = (len(body) - 4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    plain = file()
    return plain[:33] + chunk + plain[33:]


def url(data: bytes, media_type: str = "image/png") -> str:
    """Return the data URL of a file."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
