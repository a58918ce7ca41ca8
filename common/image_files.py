"""Image files as clients send them: the supported kinds, and decoding under limits. Uses Pillow, no torch.

The router decodes every image once, in a process that may crash on it, before any node receives its bytes; the
prefill node decodes it again, into the pixels that the model takes.
"""

from __future__ import annotations

import io
import re

from PIL import Image, ImageOps

from common.errors import InvalidRequest

MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
# Maximum scans of a progressive JPEG. Each one processes all pixels for a few bytes; encoders write up to about 20.
MAX_SCANS = 50
# MPO is several pictures in one JPEG file, as phones write them; only the first one is used.
_KINDS = {**MEDIA_TYPES, "MPO": "image/jpeg"}
_JPEG_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")  # marker of a segment with a length, or of the end
_SCAN, _END = b"\xff\xda", b"\xff\xd9"


def decode_image(data: bytes, max_pixels: int, media_type: str | None = None) -> Image.Image:
    """Return the first frame in RGB, rotated by its EXIF data, as transformers' load_image does. Alpha is dropped.

    Raises InvalidRequest with what is wrong.

    Args:
        media_type: the declared type of the file; None if it was not declared.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=tuple(MEDIA_TYPES))
    # Pillow's own limit applies before the configured one.
    except Image.DecompressionBombError as error:
        raise InvalidRequest(f"the image has more than the {max_pixels} pixels that are supported") from error
    # Decoders raise any kind of exception.
    except Exception as error:
        kinds = ", ".join(MEDIA_TYPES)
        raise InvalidRequest(f"the image cannot be read; it must be a {kinds} file") from error
    with image:
        found = _KINDS[str(image.format)]
        if media_type is not None and media_type != found:
            raise InvalidRequest(f"the image is declared as {media_type} but is {found}")
        if image.width * image.height > max_pixels:
            raise InvalidRequest(
                f"the image has {image.width} x {image.height} pixels, at most {max_pixels} are supported"
            )
        if found == "image/jpeg" and _has_many_scans(data):
            raise InvalidRequest(
                f"the image is a JPEG with more than the {MAX_SCANS} scans that are supported"
            )
        try:
            image.seek(0)
            return ImageOps.exif_transpose(image).convert("RGB")
        except Exception as error:
            raise InvalidRequest("the image is damaged: it cannot be decoded completely") from error


def _has_many_scans(data: bytes) -> bool:
    """Count scans by walking the segments as the decoder does; thumbnails and further pictures do not count."""
    scans, at = 0, 2
    while scans <= MAX_SCANS and (marker := _JPEG_MARKER.search(data, at)) and marker[0] != _END:
        scans += marker[0] == _SCAN
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
    return scans > MAX_SCANS
