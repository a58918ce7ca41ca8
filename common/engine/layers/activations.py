"""The rows that a product reads, in the forms that weight formats give them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Quantised(NamedTuple):
    """Rows in a format of fewer bits."""

    form: str  # the name that readers know it by: see `Reads`
    codes: Tensor  # [..., in]
    scales: Tensor  # [..., groups] float32: how many values share one is up to the form


class Activations(NamedTuple):
    """Rows for one or several products.

    Whoever makes them may leave out the quantised form: a product that needs one makes it from `dense`. It may leave
    out `dense` only where no reader wants it.
    """

    dense: Tensor | None  # [..., in]
    quantised: Quantised | None = None

    def tensor(self) -> Tensor:
        """Return the dense rows, for a reader whose `reads.dense` is set."""
        assert self.dense is not None, "the dense rows were left out, though this reader wants them"
        return self.dense


class Reads(NamedTuple):
    """The forms of its input that a reader takes; of a norm's output, what all its readers take together."""

    dense: bool = True
    form: str = ""  # of the quantised rows; "": it takes none


DENSE = Reads()
