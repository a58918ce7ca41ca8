"""Recognises a marker in a text, however the text is split into tokens, and names the tokens that write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

# The bytes of a token, or one negative number for a token that stands for no text.
Symbols = Sequence[int]
SymbolsOf = Callable[[int], Symbols]
# What stands for a symbol that is neither a byte nor part of the marker.
OTHER = chr(0x10FFFF)


def by_id(token: int) -> Symbols:
    """Return the symbol of a token that is told from others only by its id."""
    return (~token,)


class TokenMarker:
    """Recognises one marker. It keeps no state: a place in it is how many of its first symbols a text ends with.

    A model may write a marker in other tokens than the tokenizer does: its last character may be in one token with the
    newline that follows.
    """

    def __init__(self, tokens: Sequence[int], symbols_of: SymbolsOf = by_id) -> None:
        """`tokens`: those in which the tokenizer writes it, at least one. `symbols_of` returns at least one of each."""
        self.tokens = tuple(tokens)
        self._symbols_of = symbols_of
        spelled = [symbols_of(token) for token in tokens]
        self._symbols = tuple(symbol for each in spelled for symbol in each)
        self._back = _borders(self._symbols)
        # Symbols of the marker that are not bytes -> characters that stand for them.
        self._characters = {each: chr(256 + n) for n, each in enumerate(self._symbols) if each < 0}
        self._text = self._spelled(self._symbols)
        # The number of symbols of the first n tokens -> n.
        self._tokens_of = {count: n for n, count in enumerate(accumulate(map(len, spelled), initial=0))}

    @property
    def complete(self) -> int:
        """The place after the marker."""
        return len(self._symbols)

    def after(self, place: int, symbols: Symbols) -> tuple[int, Symbols]:
        """Return the place after further symbols of the text, and those that follow the first complete marker."""
        for index, symbol in enumerate(symbols):
            while place and self._symbols[place] != symbol:
                place = self._back[place]
            place += self._symbols[place] == symbol
            if place == self.complete:
                return place, symbols[index + 1 :]
        return place, ()

    def rest(self, place: int) -> tuple[int, ...]:
        """Return the tokens that complete the marker at a place.

        Where none of its tokens ends, the text ends with part of a token: what is written then begins further back, if
        need be with the whole marker.
        """
        while place not in self._tokens_of:
            place = self._back[place]
        return self.tokens[self._tokens_of[place] :]

    def tokens_since(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens that follow the last marker in a text; None without a marker.

        A prompt may have hundreds of thousands of tokens: each distinct one is spelled once, and the search for the
        marker is one call.
        """
        if len(self._symbols) == 1 and self._symbols[0] < 0:
            # A special token, as of most models: no other one has this symbol.
            [marker] = self.tokens
            last = (count for count, token in enumerate(reversed(tokens)) if token == marker)
            return next(last) if marker in tokens else None
        spelled = {token: self._spelled(self._symbols_of(token)) for token in set(tokens)}
        parts = [spelled[token] for token in tokens]
        text = "".join(parts)
        start = text.rfind(self._text)
        if start < 0:
            return None
        following = len(text) - start - len(self._text)  # symbols
        count = 0
        for part in reversed(parts):
            if following < len(part):
                break
            following -= len(part)
            count += 1
        return count

    def _spelled(self, symbols: Symbols) -> str:
        """Return one character for each symbol."""
        if isinstance(symbols, bytes):
            return symbols.decode("latin-1")
        return "".join(chr(each) if each >= 0 else self._characters.get(each, OTHER) for each in symbols)


def _borders(symbols: Sequence[int]) -> list[int]:
    """Return for each n the longest part, shorter than n, with which the first n symbols both begin and end."""
    borders = [0, 0]
    for symbol in symbols[1:]:
        border = borders[-1]
        while border and symbols[border] != symbol:
            border = borders[border]
        borders.append(border + (symbols[border] == symbol))
    return borders
