"""The verify phase: one target forward over all trees, sampling, acceptance, and the update of the relay rows.

    fill     drafts of the host into the trees, roots from the relay
    forward  embedding, layers with the tree mask, LM head
    draw     one token after every node
    accept   find the accepted path of each tree; move its KV to the front of the window
    scatter  last token and length to the relay rows, the path to the input of draft-extend

The variants are those of `decode_graph`: `logits` ends with the forward, and the rest runs eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.engine.forward.batch import CaptureHiddenMode, ForwardMode
from common.engine.forward.draft_inputs import TreeVerifyInput
from common.engine.forward.model_runner import ModelRunner
from common.engine.graphs.outputs import OutField, OutputSpec
from common.engine.graphs.rules import Phase
from common.engine.graphs.slots import Inputs
from common.engine.graphs.spec import Axis
from common.engine.host_copies import on_host
from common.engine.layers.logit_rows import LogitRows
from common.engine.ops.step_rows import advance_rows
from common.engine.sampling.logit_masks import LogitMasks
from common.engine.sampling.sampler import SampleOutput, sample_rows
from common.engine.sampling.sampling_plan import SamplingVariant
from decode_node.graphs.decode_graph import FILTERED, GREEDY, LOGITS, VARIANTS, serving_variants
from decode_node.relay_sampling import sampling_batch
from decode_node.speculative.drafters.drafter import Drafter
from decode_node.speculative.rounds import PhaseForward, Round, RoundCall, Rounds, Variants
from decode_node.speculative.verifier import Acceptor


@dataclass(frozen=True, slots=True)
class Emitted:
    """The output of a round: the tokens drawn after the nodes of each accepted path, at most D."""

    packed: Tensor  # [R, 2 * D + 1] int64: tokens, whether each is invalid, number of emitted tokens
    # [R, D, H] the hidden states that the tokens were drawn from, if the node returns them; they stay on the device
    states: Tensor | None = None
    drawn: SampleOutput | None = None  # [R * D], with logprobs; None if none were requested

    def on_host(self) -> Emitted:
        """Start the copy to the host, as SampleOutput.on_host does."""
        drawn = None if self.drawn is None else self.drawn.on_host()
        return Emitted(on_host(self.packed), drawn=drawn)

    def read(self) -> tuple[SampleOutput, list[int]]:
        """Return (tokens [R * D], number of emitted tokens per request). Call it after the completion."""
        depth = self.packed.shape[1] // 2
        counts = self.packed[:, -1].tolist()
        if self.drawn is not None:
            return self.drawn, counts
        tokens, invalid = self.packed[:, :depth], self.packed[:, depth : 2 * depth]
        return SampleOutput(tokens.flatten(), invalid.flatten().bool()), counts


@dataclass(frozen=True, slots=True)
class VerifyOutput:
    """The result of the verify graph: emitted tokens, or logits that remain to be sampled."""

    packed: Tensor | None = None  # [R, 2 * D + 1] int64, see Emitted
    logits: Tensor | None = None  # [R * N, V] float32
    hidden: Tensor | None = None  # [R * N, H'], according to the drafter's hidden_mode
    states: Tensor | None = None  # as in Emitted; before acceptance [R, N, H], of every node


# The host reads `packed` one step later, while the next replay runs, so it is kept.
OUTPUTS = OutputSpec(
    VerifyOutput,
    {
        "packed": OutField(Axis.REQUEST, kept=True),
        "logits": OutField(Axis.TOKEN),
        "hidden": OutField(Axis.TOKEN),
        "states": OutField(Axis.REQUEST),
    },
)


class Verify:
    """Verifies a round whose drafts have been proposed."""

    def __init__(
        self,
        runner: ModelRunner,
        rounds: Rounds,
        drafter: Drafter,
        acceptor: Acceptor,
        variants: Sequence[str] = VARIANTS,
        hidden_states: bool = False,
    ) -> None:
        """`hidden_states`: a round returns the states that its tokens are drawn from."""
        self._runner = runner
        self._rounds = rounds
        self._relay = rounds.relay
        self._drafter = drafter
        self._acceptor = acceptor
        self._hidden_states = hidden_states
        hidden = CaptureHiddenMode.FULL if hidden_states else drafter.hidden_mode
        self.phase = rounds.phase(
            Phase.VERIFY,
            "target",
            self._run,
            OUTPUTS,
            PhaseForward(ForwardMode.VERIFY, drafter.nodes, hidden),
            Variants(tuple(variants), serving_variants),
            drafter.slots,
        )

    def __call__(self, call: RoundCall) -> Emitted:
        output = self.forward(call)
        return self.decide(call, output) if output.packed is None else Emitted(output.packed, output.states)

    @torch.inference_mode()
    def forward(self, call: RoundCall) -> VerifyOutput:
        """Run the verify graph. An output with logits needs `decide` before anything else runs on the device."""
        return self.phase(call)

    @torch.inference_mode()
    def decide(self, call: RoundCall, output: VerifyOutput, masks: LogitMasks | None = None) -> Emitted:
        """Sample from the logits of an output, accept drafts and update the relay rows."""
        assert output.logits is not None
        batch = self._rounds.gather(call.placed)
        return self._decide(
            batch, LogitRows(output.logits), output.hidden, call.sampling, masks, output.states
        )

    def _run(self, batch: Round, inputs: Inputs, variant: str) -> VerifyOutput:
        tree = self._tree(batch)
        self._drafter.fill(batch, inputs)
        tree.tokens[:, 0] = batch.last_token
        every = batch.index[: tree.tokens.numel()]
        forward = batch.window(tree.tokens, tree.depth, tree.mask, every, self._drafter.hidden_mode)
        if self._relay.state is not None:
            forward.state = self._relay.state.open_window(batch.rows, batch.seq_len)
        output = self._runner(forward)
        states = None
        if self._hidden_states:
            assert output.last is not None
            states = output.last.view(*tree.tokens.shape, -1)
        if variant == LOGITS:
            return VerifyOutput(logits=output.logits, hidden=output.hidden, states=states)
        facts = SamplingVariant(variant == GREEDY, variant == FILTERED, None)
        emitted = self._decide(batch, output.rows, output.hidden, facts, states=states)
        return VerifyOutput(emitted.packed, states=emitted.states)

    def _decide(
        self,
        batch: Round,
        logits: LogitRows,
        hidden: Tensor | None,
        sampling: SamplingVariant,
        masks: LogitMasks | None = None,
        states: Tensor | None = None,
    ) -> Emitted:
        """Sample, accept and scatter: logits [R * N, V], hidden [R * N, H'], states [R, N, H]."""
        tree, acceptor = self._tree(batch), self._acceptor
        count, nodes = tree.tokens.shape
        sampled = self._draw(batch, tree, logits, sampling, masks)
        drawn = sampled.token_ids.view(count, nodes)
        accepted = acceptor.accept(tree, drawn)
        acceptor.settle(accepted, batch)
        ids = acceptor.along(accepted, drawn)
        invalid = acceptor.along(accepted, sampled.invalid.view(count, nodes))
        walk = self._drafter.state.walk.first(count)
        walk.start.copy_(batch.seq_len)
        walk.ids.copy_(ids)
        walk.accepted.copy_(accepted.drafts)
        if hidden is not None:
            walk.hidden.copy_(acceptor.along(accepted, hidden.view(count, nodes, hidden.shape[1])))
        emitted = accepted.drafts + 1
        if sampling.adjust is not None and sampling.adjust.penalties:
            self._relay.adjustments.count(batch.rows, ids, batch.index[: ids.shape[1]] < emitted[:, None])
        last, lengths = (
            ids.gather(1, accepted.drafts[:, None])[:, 0],
            (batch.seq_len + emitted).to(torch.int32),
        )
        advance_rows(batch.rows, last, lengths, self._relay.last_token, self._relay.seq_len)
        packed = torch.cat((ids, invalid.to(torch.int64), emitted[:, None]), dim=1)
        if states is not None:
            states = acceptor.along(accepted, states)
        if sampling.num_logprobs is None:
            return Emitted(packed, states)

        def on_path(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            rest = values.shape[1:]
            return acceptor.along(accepted, values.view(count, nodes, *rest)).flatten(0, 1)

        return Emitted(
            packed,
            states,
            SampleOutput(
                ids.flatten(),
                invalid.flatten(),
                on_path(sampled.logprobs),
                on_path(sampled.top_ids),
                on_path(sampled.top_logprobs),
                on_path(sampled.chosen),
            ),
        )

    def _draw(
        self,
        batch: Round,
        tree: TreeVerifyInput,
        logits: LogitRows,
        sampling: SamplingVariant,
        masks: LogitMasks | None,
    ) -> SampleOutput:
        """Sample the target's token after each node, with the parameters of its request."""
        nodes = tree.tokens.shape[1]
        rows = batch.rows[:, None].expand(-1, nodes).flatten()
        position = (batch.seq_len[:, None] + tree.depth + 1).flatten()
        path = None if sampling.adjust is None else tree.paths().flatten(0, 1)
        return sample_rows(logits, sampling_batch(self._relay, rows, position, sampling, path, masks))

    def _tree(self, batch: Round) -> TreeVerifyInput:
        return self._drafter.state.tree.first(batch.count)
