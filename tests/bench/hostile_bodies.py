"""Request bodies that are expensive for a careless server: name -> (path, body)."""

from __future__ import annotations

from collections.abc import Callable

MIB = 1 << 20
BODY = 10 * MIB - 64


def _list_of(item: bytes) -> bytes:
    return b'{"prompt":[' + item * (BODY // len(item)) + item.rstrip(b",") + b"]}"


def _chat(content: bytes) -> bytes:
    return b'{"messages":[{"role":"user","content":' + content + b"}]}"


def _prompts(count: int, length: int, fields: bytes) -> bytes:
    prompt = b"[" + b",".join([b"%d" % (n % 600 + 3) for n in range(length)]) + b"]"
    return b'{"prompt":[' + b",".join([prompt] * count) + b'],"ignore_eos":true,' + fields + b"}"


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CORPUS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "empty lists": (COMPLETIONS, lambda: _list_of(b"[],")),
    "empty objects": (COMPLETIONS, lambda: _list_of(b"{},")),
    "token ids": (COMPLETIONS, lambda: _list_of(b"5,")),
    "large token ids": (COMPLETIONS, lambda: _list_of(b"699,")),
    "keys": (
        COMPLETIONS,
        lambda: (
            b'{"prompt":"x","max_tokens":2,"user":{'
            + b",".join(b'"%d":1' % n for n in range(BODY // 11))
            + b"}}"
        ),
    ),
    "biases": (
        COMPLETIONS,
        lambda: b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % n for n in range(BODY // 11)) + b"}}",
    ),
    "escapes": (COMPLETIONS, lambda: b'{"prompt":"' + b"\\n" * (BODY // 2 - 16) + b'"}'),
    "brackets in a string": (COMPLETIONS, lambda: b'{"prompt":"' + b"[" * (8 * MIB - 1) + b'"}'),
    "strings of brackets": (COMPLETIONS, lambda: _list_of(b'"[",')),
    "words": (COMPLETIONS, lambda: b'{"prompt":"' + b"hello " * (8 * MIB // 6) + b'"}'),
    "digits": (COMPLETIONS, lambda: b'{"prompt":"' + b"1" * (8 * MIB - 1) + b'"}'),
    "prompt of 256 KiB": (COMPLETIONS, lambda: b'{"prompt":"' + b"hello " * 43_000 + b'"}'),
    "64 prompts of 4,000 ids": (COMPLETIONS, lambda: _prompts(64, 4000, b'"max_tokens":2')),
    "64 prompts with 300 biases": (
        COMPLETIONS,
        lambda: _prompts(
            64,
            8,
            b'"max_tokens":2,"logit_bias":{' + b",".join(b'"%d":1' % n for n in range(300)) + b"}",
        ),
    ),
    "logprobs": (COMPLETIONS, lambda: _prompts(8, 8, b'"max_tokens":4000,"logprobs":20')),
    "logprobs in a stream": (
        COMPLETIONS,
        lambda: _prompts(8, 8, b'"max_tokens":4000,"logprobs":20,"stream":true'),
    ),
    "chat with logprobs": (
        CHAT,
        lambda: (
            _chat(b'"x"')[:-1] + b',"max_tokens":3900,"ignore_eos":true,"logprobs":true,"top_logprobs":20}'
        ),
    ),
    "parts": (CHAT, lambda: _chat(b"[" + b",".join([b'{"type":"text","text":"x"}'] * (BODY // 28)) + b"]")),
    "chat of 8 MiB": (CHAT, lambda: _chat(b'"' + b"hello " * (8 * MIB // 6) + b'"')),
    "chat of 4,096 messages": (
        CHAT,
        lambda: b'{"messages":[' + b",".join([b'{"role":"user","content":"hello hello"}'] * 4096) + b"]}",
    ),
    "tokenize 8 MiB": ("/tokenize", lambda: b'{"prompt":"' + b"hello " * (8 * MIB // 6) + b'"}'),
    "tokenize 6 MiB of punctuation": ("/tokenize", lambda: b'{"prompt":"' + b"~ ^ " * (6 * MIB // 4) + b'"}'),
    "detokenize 1 Mi": ("/detokenize", lambda: b'{"tokens":[' + b"5," * (MIB - 1) + b"5]}"),
    "detokenize 1 Mi long tokens": ("/detokenize", lambda: b'{"tokens":[' + b"600," * (MIB - 1) + b"600]}"),
}
