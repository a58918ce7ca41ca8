"""Handwritten digits of 8 by 8 pixels: scikit-learn's bundled set, stored next to this file, so nothing is downloaded.

    python3 -m deploy.tiny_models.vision.digits      rebuilds digits.png (needs pip install -e '.[models]' in the
    checkout)

Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, CC BY 4.0.
"""

from __future__ import annotations

import functools
import zlib
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

FILE = Path(__file__).parent / "digits.png"  # one row per digit: 64 pixels, then its label
LEVELS = 16  # the darkest ink: pixels are 0 .. 16
HELD_OUT = 5  # one digit in this many is never trained on

Split = Literal["train", "heldout"]


class Digits(NamedTuple):
    """A subset of the digits."""

    ink: NDArray[np.uint8]  # [count, 8, 8], 0 .. LEVELS
    labels: NDArray[np.uint8]  # [count]


@functools.cache
def digits(split: Split) -> Digits:
    """Return the digits of one split; the split of a digit depends only on its pixels."""
    with Image.open(FILE) as image:
        table = np.asarray(image)
    ink, labels = table[:, :-1].reshape(-1, 8, 8), table[:, -1]
    held_out = np.array([zlib.crc32(one.tobytes()) % HELD_OUT == 0 for one in ink])
    chosen = held_out if split == "heldout" else ~held_out
    return Digits(ink[chosen], labels[chosen])


def main() -> None:
    """Build digits.png from scikit-learn."""
    from sklearn.datasets import load_digits

    found = load_digits()
    table = np.concatenate((found.data, found.target[:, None]), axis=1).astype(np.uint8)
    Image.fromarray(table).save(FILE, optimize=True)


if __name__ == "__main__":
    main()
