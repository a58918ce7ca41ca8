"""A tiny random Llama in float32, and the plainest way to generate with it: recompute everything for each token."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace as replace_fields

import numpy as np
import torch
from torch import nn

from common.checkpoint.experts_config import SIGMOID, ExpertsConfig, RouterRule
from common.checkpoint.families import LayerKind
from common.checkpoint.model_config import EXPERTS, ModelConfig
from common.checkpoint.rope_config import RopeConfig
from common.engine.attention.paged import PagedAttention
from common.engine.forward.batch import CaptureHiddenMode, ForwardBatch, ForwardMode
from common.engine.forward.model_runner import ModelRunner
from common.engine.layers.placement import Placement
from common.engine.models.causal_lm import CausalLM
from common.engine.models.model_registry import build_model
from common.engine.sampling.sampler import SamplingBatch, read_tokens, sample
from common.engine.sampling.sampling_plan import finish_reason
from common.grammar import Matcher
from common.grammar.thinking_budget import LEAD
from common.messages.generation import FINISH_STOP, SamplingParams, ThinkingLimit, TokenRules
from tests.fakes import tiny_grammar
from tests.fakes.pools import model_pool

VOCAB = tiny_grammar.VOCAB
MAX_LEN = 512
PLACEMENT = Placement(torch.float32, torch.device("cpu"))

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=VOCAB,
    max_position_embeddings=MAX_LEN,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tie_word_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    sliding_windows=(None, None),
    dtype="float32",
)


# A dense layer and one with experts, by every rule that a router has.
MIXTURE = replace_fields(
    CONFIG,
    layer_kinds=(LayerKind(), LayerKind(feed_forward=EXPERTS)),
    experts=ExpertsConfig(
        6,
        20,
        RouterRule(3, SIGMOID, True, groups=3, kept_groups=2, epsilon=1e-20, scaling=2.5),
        shared=1,
        shared_gate=True,
    ),
)
# rotary positions on three axes
AXES = replace_fields(CONFIG, rope=RopeConfig(theta=50.0, sections=(1, 2, 1)))


def drawn(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters in a fixed order of random initialization, LM head first: fixed drafts depend on it."""
    return sorted(model.named_parameters(), key=lambda named: not named[0].startswith("lm_head"))


@functools.cache
def tiny_model(seed: int = 0, aux: tuple[int, ...] = (), config: ModelConfig = CONFIG) -> CausalLM:
    """Return a model with random weights, so that texts vary; all tests of a process share one instance."""
    model = build_model(config, PLACEMENT, aux).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drawn(model):
            parameter.normal_(std=0.3, generator=generator)
            if "norm" in name:
                parameter.add_(1.0)
    return model


@functools.lru_cache(maxsize=4096)
def reference(prompt: tuple[int, ...], sampling: SamplingParams, emitted: int = 0) -> tuple[list[int], str]:
    """Return (output token ids, finish reason) of one request by itself, without cache, chunks or growing pages."""
    matcher = tiny_grammar.matcher(sampling.grammar) if sampling.grammar else None
    if matcher is not None:
        assert matcher.accept(prompt[len(prompt) - emitted :])
    ids = list(prompt)
    output: list[int] = []
    while True:
        batch = SamplingBatch(
            temperature=torch.tensor([sampling.temperature]),
            top_p=torch.tensor([sampling.top_p]),
            top_k=torch.tensor([sampling.top_k], dtype=torch.int32),
            min_p=torch.tensor([sampling.min_p]),
            seed=torch.tensor([sampling.seed]),
            position=torch.tensor([len(ids)]),
            all_greedy=sampling.greedy,
            any_filter=sampling.filtered,
            num_logprobs=None,
        )
        logits = adjusted(
            next_logits(tuple(ids)), prompt[: len(prompt) - emitted], ids[len(prompt) - emitted :], sampling
        )
        if sampling.token_rules is not None:
            logits = ruled(logits, ids[len(prompt) - emitted :], sampling.token_rules)
        if matcher is not None:
            logits = allowed_only(logits, matcher)
        token = read_tokens(sample(logits, batch), [None])[0]
        assert token is not None
        ids.append(token.id)
        output.append(token.id)
        reason = finish_reason(token.id, emitted + len(output), sampling)
        if reason is None and matcher is not None:
            assert matcher.accept([token.id])
            reason = FINISH_STOP if matcher.stopped else None
        if reason is not None:
            return output, reason


def adjusted(
    logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams
) -> torch.Tensor:
    """Apply SamplingParams to the logits [1, V] after prompt and output, token by token."""
    out, times = logits[0].clone(), Counter(output)
    for token in {*prompt, *output} if sampling.repetition_penalty != 1.0 else ():
        value = out[token] / sampling.repetition_penalty
        out[token] = value if out[token] > 0 else out[token] * sampling.repetition_penalty
    for token, count in times.items():
        out[token] -= torch.tensor(sampling.frequency_penalty) * count
        out[token] -= sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        out[token] += bias
    if len(output) < sampling.min_tokens:
        out[list(sampling.stop_token_ids)] = -torch.inf
    return out[None]


def ruled(logits: torch.Tensor, output: list[int], rules: TokenRules) -> torch.Tensor:
    """Return logits [1, V] in which every token that the rules forbid is -inf, word by word."""
    out = logits[0].clone()
    if rules.allowed:
        out[[token for token in range(VOCAB) if token not in rules.allowed]] = -torch.inf
    for *begin, last in rules.bad_words:
        if not begin or output[-len(begin) :] == begin:
            out[last] = -torch.inf
    forced = None if rules.thinking is None else forced_end(output, rules.thinking)
    if forced is not None:
        out[[token for token in range(VOCAB) if token != forced]] = -torch.inf
    return out[None]


def forced_end(output: Sequence[int], limit: ThinkingLimit) -> int | None:
    """Return the token that must follow an answer, because its reasoning is open and as long as it may be."""
    thought, rest, end = limit.spent or 0, tuple(output), limit.end
    if limit.spent is None:
        width = len(limit.begin)
        opened = [at for at in range(LEAD + 1) if rest[at : at + width] == limit.begin]
        if not opened:
            return None
        rest = rest[opened[0] + width :]
    ended = any(rest[at : at + len(end)] == end for at in range(len(rest)))
    if ended or thought + len(rest) < limit.tokens:
        return None
    return end[max(written for written in range(len(end)) if rest[len(rest) - written :] == end[:written])]


def allowed_only(logits: torch.Tensor, matcher: Matcher) -> torch.Tensor:
    """Return logits [1, V] in which every token outside the grammar is -inf, token by token."""
    words = np.zeros((1, -(-VOCAB // 32)), dtype=np.int32)
    matcher.fill(words, 0)
    out = logits[0].clone()
    for token in range(VOCAB):
        if not int(words[0, token // 32]) >> (token % 32) & 1:
            out[token] = -torch.inf
    return out[None]


@functools.lru_cache(maxsize=1 << 15)  # different parameters share prefixes
def next_logits(ids: tuple[int, ...]) -> torch.Tensor:
    """Return the logits [1, V] after the last of `ids`."""
    return _runner()(one_page(list(ids))).logits


def hidden_states(ids: list[int]) -> torch.Tensor:
    """Return the hidden states [n, H] after the final norm."""
    hidden = _runner()(one_page(ids)).hidden
    assert hidden is not None
    return hidden


def one_page(ids: list[int]) -> ForwardBatch:
    """Return the batch of a forward over a whole text in page 1."""
    count = len(ids)
    arange = torch.arange(count)
    return ForwardBatch(
        mode=ForwardMode.EXTEND,
        input_ids=torch.tensor(ids),
        positions=arange,
        kv_slots=arange + MAX_LEN,
        page_table=torch.ones(1, 1, dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        query_start=torch.tensor([0, count], dtype=torch.int32),
        logits_rows=torch.tensor([count - 1]),
        max_seq_len=count,
        hidden_mode=CaptureHiddenMode.FULL,
        query_lens_host=(count,),
        seq_lens_host=(count,),
    )


@functools.cache
def _runner() -> ModelRunner:
    pool = model_pool(CONFIG, MAX_LEN, 2, PLACEMENT)
    return ModelRunner(tiny_model(), pool, PagedAttention(pool, CONFIG.sliding_windows))
