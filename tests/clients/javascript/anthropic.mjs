// @anthropic-ai/sdk: messages, streams, tools and errors on /v1/messages.

import assert from "node:assert/strict";

import Anthropic from "@anthropic-ai/sdk";

import {
  ABOUT,
  EXPRESSION,
  PARAMETERS,
  PRODUCT,
  RESULT,
  env,
  feature,
  isProduct,
  isWeather,
  messages,
  runAll,
  saysProduct,
  solved,
} from "./features.mjs";

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
  solved(answer.content.at(-1).text);
  assert.equal(answer.stop_reason, "end_turn");
});

feature("stream helper", async () => {
  const stream = client.messages.stream(asked);
  let text = "";
  stream.on("text", (piece) => (text += piece));
  solved((await stream.finalMessage()).content.at(-1).text);
  solved(text);
});

feature("tools auto, and their result", async () => {
  const question = [{ role: "user", content: PRODUCT }];
  const product = {
    ...asked,
    tools: [{ name: "calculator", description: ABOUT, input_schema: EXPRESSION }],
  };
  const first = await client.messages.create({ ...product, messages: question });
  assert.equal(first.stop_reason, "tool_use");
  const block = first.content.find((each) => each.type === "tool_use");
  isProduct(block.name, block.input);
  const result = { type: "tool_result", tool_use_id: block.id, content: RESULT };
  const back = [...question, { role: "assistant", content: first.content }, { role: "user", content: [result] }];
  const answer = await client.messages.create({ ...product, messages: back });
  assert.equal(answer.stop_reason, "end_turn");
  saysProduct(answer.content.at(-1).text);
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
  await assert.rejects(client.messages.create({ ...asked, temperature: -1 }), Anthropic.BadRequestError);
});

await runAll();
