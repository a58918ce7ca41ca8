"""The rows that a product reads, in the forms that weight formats define."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Quantised(NamedTuple):
    """Rows in a format with fewer bits."""

    form: str  # the form's name, see `Reads`
    codes: Tensor  # [..., in]
    scales: Tensor  # [..., groups] float32; the form defines how many values share one


class Activations(NamedTuple):
    """Rows for one or several products.

    The quantised form may be missing: a product that needs it makes it from `dense`. `dense` may be missing only if
    no reader needs it.
    """

    dense: Tensor | None  # [..., in]
    quantised: Quantised | None = None

    def tensor(self) -> Tensor:
        """Return the dense rows, for a reader whose `reads.dense` is set."""
        assert self.dense is not None, "the dense rows were left out, though this reader wants them"
        return self.dense


class Reads(NamedTuple):
    """The forms of its input that a reader takes; for a norm's output, the forms that all its readers take together."""

    dense: bool = True
    form: str = ""  # form of the quantised rows; "": the reader takes none


DENSE = Reads()
