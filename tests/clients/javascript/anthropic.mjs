// @anthropic-ai/sdk: messages, streams, tools and errors on /v1/messages.

import assert from "node:assert/strict";

import Anthropic from "@anthropic-ai/sdk";

import { PARAMETERS, env, feature, isWeather, messages, runAll, solved } from "./features.mjs";

// This API has no penalties: llguidance's own keyword leaves no room for blanks.
const COMPACT = { ...PARAMETERS, "x-guidance": { whitespace_flexible: false } };
const client = new Anthropic({ baseURL: env.url, apiKey: "none", maxRetries: 0 });
const asked = { model: env.model, messages, max_tokens: 400, temperature: 0 };
const forced = {
  ...asked,
  tools: [{ name: "weather", description: "Weather of a city", input_schema: COMPACT }],
  tool_choice: { type: "tool", name: "weather" },
};

feature("message", async () => {
  const answer = await client.messages.create(asked);
  solved(answer.content[0].text);
  assert.equal(answer.stop_reason, "end_turn");
});

feature("stream helper", async () => {
  const stream = client.messages.stream(asked);
  let text = "";
  stream.on("text", (piece) => (text += piece));
  solved((await stream.finalMessage()).content[0].text);
  solved(text);
});

feature("tools forced, and their result", async () => {
  const answer = await client.messages.create(forced);
  assert.equal(answer.stop_reason, "tool_use");
  const block = answer.content.find((each) => each.type === "tool_use");
  isWeather(block.input);
  const result = { type: "tool_result", tool_use_id: block.id, content: "rain" };
  const back = [...messages, { role: "assistant", content: answer.content }, { role: "user", content: [result] }];
  assert.ok(await client.messages.create({ ...asked, messages: back, tools: forced.tools }));
});

feature("tools streamed", async () => {
  const answer = await client.messages.stream(forced).finalMessage();
  isWeather(answer.content.find((each) => each.type === "tool_use").input);
});

feature("token count", async () => {
  const counted = await client.messages.countTokens({ model: env.model, messages });
  const { usage } = await client.messages.create(asked);
  assert.equal(counted.input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
});

feature("errors", async () => {
  await assert.rejects(client.messages.create({ ...asked, model: "other" }), Anthropic.NotFoundError);
  await assert.rejects(client.messages.create({ ...asked, temperature: 9 }), Anthropic.BadRequestError);
});

await runAll();
