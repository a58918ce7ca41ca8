"""Image files as clients send them: which kinds are taken, and decoding under limits. Pillow, no torch.

The router decodes every image once, in a process that may die of it, before any node sees its bytes; the prefill node
decodes it again, into the pixels that the model takes.
"""

from __future__ import annotations

import io
import re

from PIL import Image, ImageOps

from common.errors import InvalidRequest

MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
# Scans of a progressive JPEG: each goes over all pixels for a few bytes; encoders write up to about 20.
MAX_SCANS = 50
# MPO is several pictures in one JPEG file, as phones write them; the first one counts.
_KINDS = {**MEDIA_TYPES, "MPO": "image/jpeg"}
_JPEG_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")  # of a segment with a length, or the end of all
_SCAN, _END = b"\xff\xda", b"\xff\xd9"


def decode_image(data: bytes, max_pixels: int, media_type: str | None = None) -> Image.Image:
    """The first frame, turned as its EXIF says, in RGB: what transformers' load_image makes of it. Alpha is dropped.

    Raises InvalidRequest with what is wrong.

    Args:
        media_type: what the file was declared to be; None: not declared.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=tuple(MEDIA_TYPES))
    except Image.DecompressionBombError as error:  # Pillow's own limit, which comes before ours
        raise InvalidRequest(
            f"the image has more than the {max_pixels} pixels that are taken in all"
        ) from error
    except Exception as error:  # decoders raise anything
        kinds = ", ".join(MEDIA_TYPES)
        raise InvalidRequest(f"the image cannot be read; it has to be a {kinds} file") from error
    with image:
        found = _KINDS[str(image.format)]
        if media_type is not None and media_type != found:
            raise InvalidRequest(f"the image is declared as {media_type} and is {found}")
        if image.width * image.height > max_pixels:
            raise InvalidRequest(
                f"the image has {image.width} x {image.height} pixels, at most {max_pixels} are taken in all"
            )
        if found == "image/jpeg" and _has_many_scans(data):
            raise InvalidRequest(f"the image is a JPEG of more than the {MAX_SCANS} scans that are taken")
        try:
            image.seek(0)
            return ImageOps.exif_transpose(image).convert("RGB")
        except Exception as error:
            raise InvalidRequest("the image is broken: it cannot be decoded to its end") from error


def _has_many_scans(data: bytes) -> bool:
    """Walks the segments as the decoder does: what thumbnails and pictures behind the first one hold does not count."""
    scans, at = 0, 2
    while scans <= MAX_SCANS and (marker := _JPEG_MARKER.search(data, at)) and marker[0] != _END:
        scans += marker[0] == _SCAN
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
    return scans > MAX_SCANS
