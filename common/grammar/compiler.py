"""Compiles grammars once per text, under limits, and hands out a matcher of its own to each request."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from common.errors import InvalidGrammar, ModelError, Overloaded
from common.grammar.grammar_text import check_text
from common.grammar.hidden_markers import hide_markers
from common.grammar.limits import GrammarLimits
from common.grammar.matcher import Matcher, mask_width
from common.grammar.token_marker import Symbols, by_id
from common.rust_panics import is_panic

MAX_CACHED = 256  # compiled grammars, and refusals
# limit for the texts of cached grammars, which their memory is in proportion to
MAX_CACHED_CHARACTERS = 4 << 20
MAX_WAITING = 256  # compilations that wait for the thread
MAX_MESSAGE = 500  # characters of an error of llguidance
BUSY = "compiling grammars keeps this node busy; try again later"


class GrammarCompilation:
    """A grammar that is being compiled in the compiler's thread."""

    def __init__(self, future: Future[Matcher], deadline: float) -> None:
        self._future = future
        self._deadline = deadline

    def ready(self, now: float) -> bool:
        """Return whether `matcher` returns or raises without waiting; `now` is time.monotonic()."""
        return self._future.done() or now >= self._deadline

    def matcher(self) -> Matcher:
        """Return a matcher of the request's own. Raises InvalidGrammar, or Overloaded after the deadline."""
        if not self._future.done():
            self._future.cancel()
            raise Overloaded(BUSY)
        return self._future.result()


class GrammarCompiler:
    """Compiles grammars for one tokenizer; one per process.

    `matcher` compiles in the calling thread, for processes that do nothing else. `start` compiles in a thread, without
    holding the interpreter's lock, for loops that must go on.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_ids: Sequence[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        """Read the tokenizer. Raises ModelError if llguidance cannot.

        Args:
            vocab_size: width of the model's logits.
            eos_ids: tokens that end a text, the most likely one first.
        """
        self.vocab_size = vocab_size
        self.compiled = 0
        self._limits = GrammarLimits() if limits is None else limits
        self._parser_limits = self._limits.parser()
        try:
            self._tokenizer = LLTokenizer(
                hide_markers(tokenizer_json, vocab_size), n_vocab=vocab_size, eos_token=list(eos_ids)
            )
        except BaseException as error:  # the library raises plain exceptions of several types, or panics
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise ModelError(f"tokenizer.json cannot constrain answers: {error}") from error
        self._eos = dict.fromkeys(eos_ids)
        self._symbols: dict[int, Symbols] = {}  # at most one entry per token of the vocabulary
        self._cache: OrderedDict[bytes, Matcher | InvalidGrammar] = OrderedDict()
        self._sizes: dict[bytes, int] = {}
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._waiting = 0

    def begin(self) -> None:
        """Start the thread now, so that `start` never has to. Raises RuntimeError if there are too many threads."""
        self._thread.submit(self.tokenize, "").result()

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text in the middle of an answer, without special tokens."""
        tokens: list[int] = self._tokenizer.tokenize_str(text)
        return tokens

    def symbols_of(self, token: int, /) -> Symbols:
        """Return the bytes of a token, or its id if it has none or grammars match it by its id only."""
        found = self._symbols.get(token)
        if found is None:
            if not 0 <= token < self.vocab_size:
                return by_id(token)
            text = b"" if self._tokenizer.is_special_token(token) else self._tokenizer.decode_bytes([token])
            found = self._symbols[token] = text or by_id(token)
        return found

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the start of the grammar. Raises InvalidGrammar with the reason."""
        key = hashlib.blake2b(grammar.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        found = self._find(key)
        if found is None:
            try:
                found = self._compile(grammar)
            except InvalidGrammar as error:
                found = error
            self._store(key, len(grammar), found)
        if isinstance(found, InvalidGrammar):
            raise InvalidGrammar(str(found), param=found.param)
        return found.fork()

    def start(self, grammar: str, now: Callable[[], float] = time.monotonic) -> GrammarCompilation:
        """Compile in the thread, within the deadline of the limits. Raises Overloaded if too many wait already."""
        with self._lock:
            if self._waiting >= MAX_WAITING:
                raise Overloaded(BUSY)
            self._waiting += 1
        future = self._thread.submit(self.matcher, grammar)
        future.add_done_callback(self._done)
        return GrammarCompilation(future, now() + self._limits.deadline_s)

    def close(self) -> None:
        """Stop the thread; what it compiles at present runs to its end."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _done(self, _: Future[Matcher]) -> None:
        with self._lock:
            self._waiting -= 1

    def _compile(self, grammar: str) -> Matcher:
        self.compiled += 1
        check_text(grammar, self._limits)
        try:
            compiled, error = self._checked(grammar)
        except BaseException as panic:
            if not is_panic(panic):
                raise
            raise InvalidGrammar(f"the grammar cannot be compiled: {str(panic)[:MAX_MESSAGE]}") from panic
        if error:
            raise InvalidGrammar(f"the grammar cannot be compiled: {error[:MAX_MESSAGE]}")
        return Matcher(compiled, self._eos, self.vocab_size)

    def _checked(self, grammar: str) -> tuple[LLMatcher, str]:
        """Return llguidance's matcher, and what is wrong with the grammar; "" if nothing is."""
        compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._parser_limits)
        checked = compiled
        if not compiled.is_error():
            # Some grammars fail only in their first mask; the copy that computes it has the error.
            first = np.zeros((1, mask_width(self.vocab_size)), dtype=np.int32)
            checked = compiled.deep_copy()
            fill_next_token_bitmask(checked, first, 0)
        return compiled, checked.get_error() if checked.is_error() else ""

    def _find(self, key: bytes) -> Matcher | InvalidGrammar | None:
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
            return found

    def _store(self, key: bytes, size: int, found: Matcher | InvalidGrammar) -> None:
        with self._lock:
            self._cache[key] = found
            self._sizes[key] = size
            while len(self._cache) > MAX_CACHED or sum(self._sizes.values()) > MAX_CACHED_CHARACTERS:
                oldest, _ = self._cache.popitem(last=False)
                del self._sizes[oldest]
