// openai for JavaScript: chats, completions, responses, tools, typed output, helpers, and 50 streams at once.

import assert from "node:assert/strict";

import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

import {
  ABOUT,
  EXPRESSION,
  PARAMETERS,
  PENALTY,
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

const STREAMS = 50;
const client = new OpenAI({ baseURL: env.v1, apiKey: "none", maxRetries: 0 });
const asked = { model: env.model, messages, temperature: 0 };
const typed = { ...asked, frequency_penalty: PENALTY };
const tools = [{ type: "function", function: { name: "weather", parameters: PARAMETERS } }];
const named = { type: "function", function: { name: "weather" } };
const Forecast = z.object({ city: z.enum(["Paris", "Oslo"]), days: z.number().int().min(1).max(7) });

feature("models", async () => {
  const found = [];
  for await (const model of client.models.list()) found.push(model.id);
  assert.deepEqual(found, [env.model]);
});

feature("chat", async () => {
  const answer = await client.chat.completions.create(asked);
  solved(answer.choices[0].message.content);
  assert.equal(answer.choices[0].finish_reason, "stop");
});

feature("chat stream", async () => {
  let text = "";
  let usage;
  const stream = await client.chat.completions.create({
    ...asked,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  solved(text);
  assert.ok(usage.completion_tokens > 0);
});

feature("stream helper", async () => {
  const stream = client.chat.completions.stream(asked);
  let text = "";
  stream.on("content", (delta) => (text += delta));
  solved(await stream.finalContent());
  solved(text);
});

feature("tools auto, and their result", async () => {
  const question = [{ role: "user", content: PRODUCT }];
  const product = {
    ...asked,
    tools: [{ type: "function", function: { name: "calculator", description: ABOUT, parameters: EXPRESSION } }],
  };
  const [{ message, finish_reason }] = (await client.chat.completions.create({ ...product, messages: question }))
    .choices;
  assert.equal(finish_reason, "tool_calls");
  assert.equal(message.tool_calls.length, 1);
  isProduct(message.tool_calls[0].function.name, message.tool_calls[0].function.arguments);
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: RESULT };
  const answer = await client.chat.completions.create({ ...product, messages: [...question, message, result] });
  saysProduct(answer.choices[0].message.content);
});

feature("tools required", async () => {
  const answer = await client.chat.completions.create({
    ...typed,
    tools,
    tool_choice: "required",
    parallel_tool_calls: false,
  });
  assert.equal(answer.choices[0].finish_reason, "tool_calls");
  isWeather(answer.choices[0].message.tool_calls[0].function.arguments);
});

feature("tools named", async () => {
  const answer = await client.chat.completions.create({ ...typed, tools, tool_choice: named });
  isWeather(answer.choices[0].message.tool_calls[0].function.arguments);
});

feature("tools streamed", async () => {
  const stream = client.chat.completions.stream({ ...typed, tools, tool_choice: named });
  const done = [];
  stream.on("tool_calls.function.arguments.done", (event) => done.push(event.arguments));
  const answer = await stream.finalChatCompletion();
  isWeather(answer.choices[0].message.tool_calls[0].function.arguments);
  assert.equal(done.length, 1);
});

feature("tool runner", async () => {
  const seen = [];
  const runner = client.chat.completions.runTools({
    ...typed,
    max_tokens: 300,
    tool_choice: named,
    tools: [
      {
        type: "function",
        function: {
          name: "weather",
          parameters: PARAMETERS,
          parse: JSON.parse,
          function: (given) => (seen.push(given), "rain"),
        },
      },
    ],
  });
  await runner.done();
  isWeather(seen[0]);
});

feature("typed output", async () => {
  const answer = await client.chat.completions.parse({
    ...typed,
    response_format: zodResponseFormat(Forecast, "forecast"),
  });
  isWeather(answer.choices[0].message.parsed);
});

feature("typed tools", async () => {
  const answer = await client.chat.completions.parse({
    ...typed,
    tools: [zodFunction({ name: "weather", parameters: Forecast })],
    tool_choice: "required",
  });
  isWeather(answer.choices[0].message.tool_calls[0].function.parsed_arguments);
});

feature("completions", async () => {
  const asked = { model: env.model, prompt: env.question, max_tokens: 8, temperature: 0 };
  const whole = await client.completions.create({ ...asked, echo: true });
  assert.ok(whole.choices[0].text.startsWith(env.question));
  let text = env.question;
  for await (const chunk of await client.completions.create({ ...asked, stream: true }))
    text += chunk.choices[0].text;
  assert.equal(text, whole.choices[0].text);
});

feature("responses", async () => {
  const answer = await client.responses.create({ model: env.model, input: env.question, temperature: 0 });
  solved(answer.output_text);
});

feature("responses stream", async () => {
  const stream = client.responses.stream({ model: env.model, input: env.question, temperature: 0 });
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  solved((await stream.finalResponse()).output_text);
  solved(text);
});

feature("responses typed output", async () => {
  const answer = await client.responses.parse({
    model: env.model,
    input: env.question,
    temperature: 0,
    text: { format: zodTextFormat(Forecast, "forecast") },
    frequency_penalty: PENALTY,
  });
  isWeather(answer.output_parsed);
});

feature("errors", async () => {
  await assert.rejects(client.chat.completions.create({ ...asked, model: "other" }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...asked, temperature: -1 }), OpenAI.BadRequestError);
});

feature(`${STREAMS} parallel streams equal to sequential`, async () => {
  const one = async (number) => {
    const content = env.question.replace(" ", ` ${number} `);
    let text = "";
    for await (const chunk of await client.chat.completions.create({
      model: env.model,
      messages: [{ role: "user", content }],
      temperature: number % 2,
      seed: number,
      max_tokens: 24,
      stream: true,
    }))
      text += chunk.choices[0].delta.reasoning_content ?? chunk.choices[0].delta.content ?? "";
    return text;
  };
  const numbers = [...Array(STREAMS).keys()];
  const sequential = [];
  for (const number of numbers) sequential.push(await one(number));
  assert.deepEqual(await Promise.all(numbers.map(one)), sequential);
  assert.ok(sequential.every((each) => each.length > 20), "the streams have too little text to tell");
});

await runAll();
