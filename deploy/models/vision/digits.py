"""Handwritten digits of 8 by 8 pixels: scikit-learn's bundled set, kept beside this file: no download, no package.

    python3 -m deploy.models.vision.digits      makes digits.npz again (pip install tandem[models])

Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, CC BY 4.0.
"""

from __future__ import annotations

import functools
import zlib
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

FILE = Path(__file__).parent / "digits.npz"
LEVELS = 16  # of ink: pixels are 0 .. 16
HELD_OUT = 5  # one digit of so many is never trained on

Split = Literal["train", "heldout"]


class Digits(NamedTuple):
    """Some of the set."""

    ink: NDArray[np.uint8]  # [count, 8, 8], 0 .. LEVELS
    labels: NDArray[np.uint8]  # [count]


@functools.cache
def digits(split: Split) -> Digits:
    """The digits of one split; which one a digit is in depends on its pixels alone."""
    with np.load(FILE, allow_pickle=False) as file:
        ink, labels = file["images"], file["labels"]
    held_out = np.array([zlib.crc32(one.tobytes()) % HELD_OUT == 0 for one in ink])
    chosen = held_out if split == "heldout" else ~held_out
    return Digits(ink[chosen], labels[chosen])


def main() -> None:
    """Make digits.npz from scikit-learn."""
    from sklearn.datasets import load_digits

    found = load_digits()
    np.savez_compressed(FILE, images=found.images.astype(np.uint8), labels=found.target.astype(np.uint8))


if __name__ == "__main__":
    main()
