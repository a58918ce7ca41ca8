"""Follows an answer while it is generated: splits it into reasoning, content and tool calls.

Text may arrive in any pieces: the events only differ in how they are divided. Blanks beside markers are dropped; other
text is passed on unchanged, also tool calls that cannot be read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from common.errors import InternalError
from router.chat.answer_events import CallArguments, CallOpened, Content, Event, Reasoning, Span
from router.chat.call_readers import CallReader, reader_of
from router.chat.response_template import (
    CALLS,
    MAX_HELD,
    REASONING,
    AnswerRegion,
    Marker,
    ResponseTemplate,
    end_of,
)

PIECE = 4096  # characters read at once


class TextSink:
    """Passes text on, but holds whitespace back until the text after it is known."""

    def __init__(self, emit: Callable[[str, tuple[Span, ...]], None]) -> None:
        self._emit = emit
        self._held: list[tuple[int, str]] = []  # blanks, each with its position
        self._any = False  # text has been passed on
        self._at_marker = False  # the held blanks are beside a marker

    def add(self, text: str, start: int) -> None:
        """Take text. `start`: its position in the answer."""
        kept = text.rstrip()
        if kept:
            if self._at_marker and not self._any:
                shown = kept.lstrip()
                self._held = [(start + len(kept) - len(shown), shown)]
            else:
                self._held.append((start, kept))
            self._pass_on()
            self._any, self._at_marker = True, False
        if len(kept) < len(text):
            self._held.append((start + len(kept), text[len(kept) :]))

    def marker(self) -> None:
        """Note a marker here: blanks before it, and first blanks after it, are dropped unless more text follows."""
        self._at_marker = True

    def end(self) -> None:
        """Note the end of the answer."""
        if self._held and not self._at_marker:
            self._pass_on()

    def forget(self) -> None:
        """Drop held blanks: they are part of the prompt."""
        self._held = []

    def _pass_on(self) -> None:
        held, self._held = self._held, []
        spans = tuple([(start, start + len(text)) for start, text in held])
        self._emit("".join([text for _, text in held]), spans)


class AnswerParser:
    """Parses one answer: `feed` its text, then `finish`."""

    def __init__(
        self,
        template: ResponseTemplate,
        prefix: str,
        tools: list[dict[str, Any]],
        reasoning: bool,
        new_id: Callable[[], str],
    ) -> None:
        """
        Args:
            prefix: what the prompt already holds of the message, such as an opened reasoning section.
            tools: what the model may call; without tools, calls are text.
            reasoning: False leaves the reasoning section as text.
            new_id: makes the id of a call.
        """
        self._template = template
        self._tools = tools
        self._new_id = new_id
        names = ([CALLS] if tools else []) + (list(REASONING) if reasoning else [])
        skipped = {CALLS, *REASONING} - set(names)
        regions = [region for region in template.regions if region.name not in skipped]
        self._openers = [(region.open, region) for region in regions if region.open is not None]
        self._outside = next((region for region in regions if region.open is None), None)
        self._watched = self._watch(None)
        self._region: AnswerRegion | None = None  # None outside of all regions with a marker
        self._reader: CallReader | None = None
        self._events: list[Event] = []
        self._content = TextSink(lambda text, spans: self._events.append(Content(text, spans)))
        self._reasoning = TextSink(lambda text, spans: self._events.append(Reasoning(text)))
        # Text whose meaning is open, after one character (if any precedes it) that is no longer open.
        self._buffer, self._at = "", 0
        self._base = 0  # position of the buffer in the answer: negative in what the prompt holds of it
        # Where reasoning begins, after the marker, and ends, before it. The last one may be open.
        self._begins = [-len(prefix)] if self._reasons else []
        self._ends = list[int]()
        self.calls = 0  # calls opened so far
        self.cut_off = False  # the answer has ended inside the last of them
        if prefix:
            self._skip(prefix)

    def feed(self, text: str) -> list[Event]:
        """Return what `text` adds to the answer. Raises InternalError if the template's patterns take too long."""
        if self._at == len(self._buffer) and self._reader is None and not self._may_begin(text):
            if text:
                start = self.position
                self._base = start + len(text) - 1
                self._buffer, self._at = text[-1], 1
                self._text(text, start)
        else:
            # Every marker in a piece costs a search of the whole piece.
            for start in range(0, len(text), PIECE):
                self._buffer += text[start : start + PIECE]
                self._follow(final=False)
        return self._taken()

    def finish(self) -> list[Event]:
        """Return what is still open at the end of the answer."""
        self._follow(final=True)
        if self._reader is not None:
            self.cut_off = self._reader.in_call
            self._end_reader(None)
        self._content.end()
        return self._taken()

    @property
    def reasoning_is_open(self) -> bool:
        """True if the text so far ends inside a reasoning section."""
        return self._region is not None and self._region.name in REASONING

    @property
    def position(self) -> int:
        """Number of characters of the answer whose meaning is decided."""
        return self._base + self._at

    def reasons_at(self, place: int) -> bool:
        """Return whether a character of the answer is between the markers of reasoning. Its meaning must be decided."""
        last = bisect_right(self._begins, place) - 1
        return last >= 0 and (last == len(self._ends) or place < self._ends[last])

    @property
    def _reasons(self) -> bool:
        """True if text that follows here is reasoning."""
        region = self._outside if self._region is None else self._region
        return region is not None and region.name in REASONING

    # the receiver of calls, for the readers

    def open(self, name: str) -> None:
        self._events.append(CallOpened(self.calls, self._new_id(), name))
        self.calls += 1

    def add(self, arguments: str) -> None:
        if arguments:
            self._events.append(CallArguments(self.calls - 1, arguments))

    def _skip(self, prefix: str) -> None:
        self._buffer, self._base = prefix, -len(prefix)
        self._follow(final=False)
        self._cut(len(self._buffer))
        self._content.forget()
        self._reasoning.forget()
        self._events = []
        self.calls = 0

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _watch(self, region: AnswerRegion | None) -> list[tuple[Marker, AnswerRegion | None]]:
        """Return the markers that count now, each with the region that it opens; None for one that closes."""
        if region is not None:
            return [(region.close, None)] if region.close is not None else []
        found: list[tuple[Marker, AnswerRegion | None]] = [*self._openers]
        if self._outside is not None and self._outside.close is not None:
            found.append((self._outside.close, None))
        return found

    def _may_begin(self, text: str) -> bool:
        return any(marker.first is None or not marker.first.isdisjoint(text) for marker, _ in self._watched)

    def _follow(self, final: bool) -> None:
        try:
            while self._step(final):
                pass
        except TimeoutError as error:
            raise InternalError(
                "a pattern of the model's response template takes too long; set model.response_template"
            ) from error

    def _step(self, final: bool) -> bool:
        """Pass on the text up to the next marker and the marker. Return False if there is no further one."""
        match, opened, end = self._search(final)
        text = self._buffer[self._at : end]
        if self._reader is None:
            self._text(text, self.position)
        else:
            used = self._reader.take(text)
            if self._reader.over:
                self._cut(self._at + used)
                self._end_reader(None)
                return True
        if match is None:
            self._cut(end)
            return False
        if self._reader is not None and self._reader.in_string:
            self._reader.take(match[0])
            self._cut(match.end())
        else:
            marker = self._buffer[match.start() : end_of(match)]
            self._cut(end_of(match))
            self._pass_marker(match, opened, marker)
        return True

    def _search(self, final: bool) -> tuple[Any, AnswerRegion | None, int]:
        """Return (the first marker, the region that it opens, the end of the text that precedes it).

        Without a complete marker, the last value is where a marker may begin that is not complete.
        """
        best: tuple[Any, AnswerRegion | None] | None = None
        hold = len(self._buffer)
        for marker, region in self._watched:
            match = marker.search(self._buffer, self._at, final)
            if match is None or match.end() == match.start():
                continue
            grows = match.partial or (match.end() == len(self._buffer) and not marker.literal)
            if grows and not final:
                hold = min(hold, match.start())
            elif best is None or (match.start(), -match.end()) < (best[0].start(), -best[0].end()):
                best = match, region
        if best is not None and (best[0].start() < hold or final):
            return best[0], best[1], best[0].start()
        if len(self._buffer) - hold > MAX_HELD:
            hold = len(self._buffer)
        return None, None, hold

    def _pass_marker(self, match: Any, opened: AnswerRegion | None, marker: str) -> None:
        if self._reader is not None:
            self._end_reader(marker)
            return
        self._content.marker()
        self._reasoning.marker()
        if self._reasons:
            self._ends.append(self.position - len(marker))
        self._region = opened
        if self._reasons:
            self._begins.append(self.position)
        self._watched = self._watch(opened)
        if opened is not None and opened.name == CALLS:
            self._reader = reader_of(opened, match, marker, self, self._tools, self._template.whole)

    def _end_reader(self, marker: str | None) -> None:
        """Leave a region of calls at its marker, at the end of the answer, or where its reader says that it ends."""
        reader, self._reader = self._reader, None
        assert reader is not None
        if not reader.over:
            reader.close(marker)
        self._region = None
        if self._reasons:
            self._begins.append(self.position)
        self._watched = self._watch(None)
        if reader.unparsed is not None:
            self._content.add(reader.unparsed, self.position - len(reader.unparsed))

    def _text(self, text: str, start: int) -> None:
        if not text:
            return
        name = self._region.name if self._region is not None else self._outside and self._outside.name
        if name in REASONING:
            self._reasoning.add(text, start)
        elif name is not None:
            self._content.add(text, start)

    def _cut(self, end: int) -> None:
        """Drop what is decided, up to `end`; one character stays, so that it is not the beginning of the message."""
        if end > self._at:
            self._base += end - 1
            self._buffer, self._at = self._buffer[end - 1 :], 1
