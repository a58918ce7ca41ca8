"""The fields `allowed_token_ids` and `bad_words` (vLLM): which tokens a request allows or forbids."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import InvalidRequest
from common.messages.generation import MAX_ALLOWED, MAX_BAD_WORD, MAX_BAD_WORDS, TokenRules
from router.requests.checks import ServedModel, check_tokens_in_vocabulary
from router.requests.openai_schema import SharedFields
from router.requests.prompt_length import PromptLength
from router.text.service import TextService

ALLOWED, BAD_WORDS = "allowed_token_ids", "bad_words"


async def token_rules(body: SharedFields, model: ServedModel, texts: TextService) -> TokenRules | None:
    """Return the rules of a request; None without any. Raises InvalidRequest.

    As in vLLM, a word is forbidden without and with a space before it; the latter only if it begins with another token
    and has as many.
    """
    allowed, words = body.allowed_token_ids, body.bad_words
    if allowed is None and not words:
        return None
    if allowed is not None:
        _check_allowed(allowed, model)
    plain = [word.lstrip() for word in words or ()]
    if len(plain) > MAX_BAD_WORDS // 2 or not all(plain):
        raise InvalidRequest(
            f"bad_words takes at most {MAX_BAD_WORDS // 2} words, none of them empty", param=BAD_WORDS
        )
    written = [*plain, *(f" {word}" for word in plain)]
    encoded = await texts.encode(
        written, False, PromptLength(model.max_model_len), [BAD_WORDS] * len(written)
    )
    found = [tuple(ids) for ids in encoded]
    if not all(found):
        raise InvalidRequest("a word of bad_words has no tokens: leave it out", param=BAD_WORDS)
    begins = zip(found[: len(plain)], found[len(plain) :], strict=True)
    other = [late for early, late in begins if late[0] != early[0] and len(late) == len(early)]
    forbidden = tuple(dict.fromkeys([*found[: len(plain)], *other]))
    if any(len(word) > MAX_BAD_WORD for word in forbidden):
        raise InvalidRequest(f"a bad word may have at most {MAX_BAD_WORD} tokens", param=BAD_WORDS)
    rules = TokenRules(tuple(sorted(set(allowed or ()))), forbidden)
    _check_some_left(rules, body, model)
    return rules


def _check_allowed(allowed: Sequence[int], model: ServedModel) -> None:
    if not 1 <= len(allowed) <= MAX_ALLOWED:
        raise InvalidRequest(f"allowed_token_ids takes 1 to {MAX_ALLOWED} token ids", param=ALLOWED)
    check_tokens_in_vocabulary(list(allowed), model.vocab_size, ALLOWED)


def _check_some_left(rules: TokenRules, body: SharedFields, model: ServedModel) -> None:
    """Require a token that may come first."""
    left = set(rules.allowed or range(model.vocab_size))
    left -= {word[0] for word in rules.bad_words if len(word) == 1}
    if body.min_tokens:
        left -= set(body.stop_token_ids or ())
        left -= set() if body.ignore_eos else set(model.eos_token_ids)
    if not left:
        raise InvalidRequest(
            "allowed_token_ids, bad_words and min_tokens together leave no token that could come first",
            param=ALLOWED if rules.allowed else BAD_WORDS,
        )
