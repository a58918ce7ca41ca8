"""Offers the pages of arrived prompts to other requests, once they are complete and their checksums match."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.errors import RequestError
from common.kv_cache.page_space import PageSpace
from decode_node.report import Report
from decode_node.request import DecodeRequest
from kv_transfer.page_check import PageCheck


class ArrivedPages:
    """The pages of arrived prompts; owned by the main loop.

    A request may take part in steps while its pages are compared, but emits nothing before that has ended.
    """

    def __init__(self, space: PageSpace, report: Report) -> None:
        self._space = space
        self._report = report
        self._checked: list[DecodeRequest] = []  # that had checks when they arrived

    @property
    def comparing(self) -> bool:
        """True while pages are compared, whose end no message announces."""
        return bool(self._checked)

    def take(self, request: DecodeRequest, checks: Sequence[PageCheck]) -> None:
        """Take a request whose record has arrived."""
        request.checks = checks
        if checks:
            self._checked.append(request)
        else:
            self.keep(request)

    def keep(self, request: DecodeRequest) -> None:
        """Put the prompt into the prefix cache, unless some of its pages are missing or not compared yet."""
        if not request.fetching and not request.checks and request.lease is not None:
            request.lease.commit(self._space.keys(request.contents))

    def settle(self) -> list[tuple[DecodeRequest, RequestError]]:
        """Take note of what the device has compared since the last call, and return what differs."""
        unchecked = [each for each in self._checked if each.unchecked]
        ready = [each for each in unchecked if all(check.ready() for check in each.checks)]
        self._checked = [each for each in unchecked if each not in ready]
        return self.verify(ready)

    def verify(self, requests: Iterable[DecodeRequest]) -> list[tuple[DecodeRequest, RequestError]]:
        """Wait until the pages of requests are compared, and return what differs."""
        failed: list[tuple[DecodeRequest, RequestError]] = []
        for request in requests:
            failures = [failure for check in request.checks if (failure := check.failure()) is not None]
            request.checks = ()
            if failures:
                request.trusted = False
                failed.append((request, failures[0]))
            else:
                self.keep(request)
        self._report.transfer_failures += len(failed)
        return failed
