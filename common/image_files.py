"""Image files as clients send them: which kinds are taken, and decoding under limits. Pillow, no torch.

The router decodes every image once, in a process that may die of it, before any node sees its bytes; the prefill node
decodes it again, into the pixels that the model takes.
"""

from __future__ import annotations

import io

from PIL import Image, ImageOps

from common.errors import InvalidRequest

MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


def decode_image(data: bytes, max_pixels: int, media_type: str | None = None) -> Image.Image:
    """The first frame in RGB, turned as its EXIF says. Raises InvalidRequest with what is wrong.

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
        found = MEDIA_TYPES[str(image.format)]
        if media_type is not None and media_type != found:
            raise InvalidRequest(f"the image is declared as {media_type} and is {found}")
        if image.width * image.height > max_pixels:
            raise InvalidRequest(
                f"the image has {image.width} x {image.height} pixels, at most {max_pixels} are taken in all"
            )
        try:
            image.seek(0)
            return ImageOps.exif_transpose(image).convert("RGB")
        except Exception as error:
            raise InvalidRequest("the image is broken: it cannot be decoded to its end") from error
