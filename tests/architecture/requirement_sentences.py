"""What each row of the requirements demands, in a sentence; `requirement_rows.py` puts them into the table."""

from __future__ import annotations

WHAT = {
    "A": "breakable graphs for target and draft prefill",
    "B": "prefill graphs together with speculation",
    "C": "embeddings of images through graph replay",
    "D": "one source of hidden widths",
    "E": "draft-extend of multi-layer drafts, graph or not",
}

DEMANDS = {
    "A1": "Every forward batch says with one of three values which hidden states it returns: none, the last "
    "row of each request, or all rows.",
    "A2": "Prompt graphs have a hidden mode of their own, chosen at start-up: all rows for a target whose "
    "draft head reads them, the last row for the head itself, none without such a head.",
    "A3": "A draft head has a static buffer for the target's hidden states, as wide as the largest token "
    "bucket and of the model's dtype; nodes without a head allocate none.",
    "A4": "The width of that buffer is the width that the target gives to the draft: its hidden size, times "
    "the number of auxiliary layers for EAGLE-3.",
    "A5": "Before each replay the live hidden states are copied into the static buffer, so no draft is made "
    "from those of another prompt.",
    "A6": "Capture runs with hidden states in place, so the captured graph reads the buffer and nothing "
    "baked in.",
    "A7": "Given embeddings reach a draft that can take them; a draft that cannot refuses such a prompt "
    "with an error.",
    "A8": "Start-up logs whether and why prompt graphs are off, for target and draft each.",
    "A9": "Draft graphs are captured after the target's embedding and LM head are shared with the draft, so "
    "they refer to the final storage.",
    "A10": "A prefill node captures no decode graphs and a decode node no prompt graphs, whatever the other "
    "switches say.",
    "A11": "Plain decoding, other algorithms and nodes without graphs behave as if graphs did not exist.",
    "A12": "Hidden states can be returned to a client: graphs captured at FULL serve it, over both legs.",
    "B1": "Speculation alone never turns prompt graphs off; whether a batch may replay is decided for each "
    "batch.",
    "B2": "The testing switch that enforces prompt graphs wins over every rule that would turn them off.",
    "B3": "Each of sixteen known conditions (device, LoRA, pipeline stages, multimodal models, GGUF and "
    "others) turns prompt graphs off with a reason, or is refused by name because tandem lacks the "
    "feature.",
    "B4": "Whether a batch may replay is asked in a fixed order: given embeddings, forward mode, hidden "
    "mode, size; batches with replaced embeddings cannot occur, since requests for them are refused, "
    "and log-probabilities of prompts are computed from the hidden states that a replay returns.",
    "B5": "A draft is never captured by torch.compile; it keeps breakable graphs beside a piecewise target.",
    "B6": "A batch that needs more hidden states than a graph returns runs eagerly; it never gets a wrong "
    "answer.",
    "B7": "Prompt graphs work with every algorithm: n-gram, EAGLE, EAGLE-3, MTP and a standalone draft.",
    "B8": "The memory plan counts the graphs of target and draft, all shapes and variants included, before "
    "the KV pool is sized.",
    "B9": "Each algorithm answers a set of word problems end to end with the expected score and an accept "
    "length above a bound.",
    "B10": "`/server_info` shows the average accept length.",
    "B11": "A model with experts and gated delta layers in FP8, on two prefill and two decode ranks with graphs, "
    "drafted by its own MTP module, reaches the expected score of word problems and an accept length above 1.5 in "
    "`/server_info`.",
    "B12": "200 word problems by 200 clients at once, with default settings, lose no request and run no step of a "
    "decode node without a graph.",
    "B13": "On a GPU the first token of a prompt of 128 tokens comes at least 42 % sooner with prompt graphs than "
    "without, measured through HTTP.",
    "C1": "A replayed prompt returns its results with merged image embeddings absent unless the batch had "
    "some.",
    "C2": "With speculation the merged image embeddings keep only the rows of live tokens after a replay.",
    "C3": "Every output of a replay (logits, hidden states, embeddings) is narrowed to the live rows, and "
    "what was absent stays absent.",
    "C4": "A draft's prompt forward takes the merged embeddings and never looks up placeholder ids of "
    "images.",
    "C5": "Text prompts, eager runs and runs without speculation are not changed by images.",
    "D1": "Draft steps and draft-extend have input types of their own, each with one hidden width.",
    "D2": "Width and dtype of hidden states come from one function each; idle inputs and all graph buffers "
    "use them.",
    "D3": "A draft step takes the draft's own hidden width, draft-extend the width that the target gives.",
    "D4": "Auxiliary layers are read only for EAGLE-3, and there unless the head's config says no.",
    "D5": "Drafts of one layer stack and of several modules answer the same questions about widths.",
    "D6": "An idle batch has inputs of no rows with the right width, dtype and number of proposals, also "
    "for several modules.",
    "D7": "The draft-extend buffers of multi-layer drafts have the target's width, even if the draft's own "
    "hidden size differs.",
    "D8": "Drafts whose steps feed each other, drafts whose modules all read the target, and drafts that "
    "read no hidden states are told apart, and the last have no width at all.",
    "D9": "Published MTP modules load and draft: one module that is run for several steps, in the forms of MiMo, "
    "Qwen, GLM-4.5 and DeepSeek, and several modules, each for its step.",
    "D10": "Idle and live inputs of multi-layer drafts have the right widths where the draft's hidden size differs "
    "from the target's.",
    "E1": "After draft-extend of a multi-layer draft, the hidden states that the next round needs are "
    "stored per request.",
    "E2": "They come from what really ran: the graph's static outputs after a replay, the live batch's "
    "after an eager run.",
    "E3": "One kernel stores them for all requests of the batch.",
    "E4": "A batch larger than every captured shape works, and drafts the same tokens as a replay would.",
    "E5": "The recurrent state after each verified token is that of the accepted path, with graphs and without, after "
    "a hand-over and after a retraction.",
}
