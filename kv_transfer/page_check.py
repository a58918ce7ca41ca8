"""The comparison of arrived pages with the checksums in their record, while a device may still compute its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from common.errors import ChecksumFailed, RecordError, RequestError


class DeviceWork(Protocol):
    """A point in the work of a device."""

    def ready(self) -> bool: ...

    def wait(self) -> None: ...


class PageCheck:
    """Pages of a room that were handed to the node before they were compared. Used from the receiver's thread."""

    def __init__(
        self,
        found: Sequence[int],
        computed: DeviceWork,
        compare: Callable[[Sequence[int]], None],
        failed: Callable[[str], object],
    ) -> None:
        """Compare `found` once it is `computed`.

        Args:
            found: checksums that the device computes.
            computed: when `found` may be read.
            compare: raises RecordError if they are not those of the record.
            failed: counts the failure by its cause.
        """
        self._found = found
        self._computed = computed
        self._compare = compare
        self._failed = failed

    def ready(self) -> bool:
        """Return whether `failure` need not wait. Raises RuntimeError if the device has failed."""
        return self._computed.ready()

    def failure(self) -> RequestError | None:
        """Return what is wrong if the pages are not those that were sent. Call it once; it waits for the device."""
        self._computed.wait()
        try:
            self._compare(self._found)
        except RecordError as error:
            self._failed(error.cause)
            return ChecksumFailed(str(error))
        return None
