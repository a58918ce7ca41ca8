// Vercel's AI SDK: text, streams, tools, objects and agents, through the openai-compatible and the openai provider.

import assert from "node:assert/strict";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

import {
  ABOUT,
  PENALTY,
  PRODUCT,
  RESULT,
  env,
  feature,
  isWeather,
  runAll,
  saysProduct,
  solved,
} from "./features.mjs";

const compatible = createOpenAICompatible({
  name: "tandem",
  baseURL: env.v1,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: env.v1, apiKey: "none" });
const Forecast = z.object({ city: z.enum(["Paris", "Oslo"]), days: z.number().int().min(1).max(7) });

for (const [name, model] of [
  ["compatible", compatible(env.model)],
  ["openai chat", openai.chat(env.model)],
]) {
  const asked = { model, prompt: env.question, temperature: 0, maxRetries: 0 };
  const typed = { ...asked, frequencyPenalty: PENALTY };
  const weather = tool({ description: "Weather", inputSchema: Forecast, execute: async () => "rain" });

  feature(`${name}: text`, async () => {
    const answer = await generateText(asked);
    solved(answer.text);
    assert.equal(answer.finishReason, "stop");
    assert.ok(answer.usage.outputTokens > 0);
  });

  feature(`${name}: stream`, async () => {
    const answer = streamText(asked);
    let text = "";
    for await (const piece of answer.textStream) text += piece;
    solved(text);
    assert.ok((await answer.usage).outputTokens > 0);
  });

  feature(`${name}: tools auto, and their result`, async () => {
    const called = [];
    const calculator = tool({
      description: ABOUT,
      inputSchema: z.object({ expression: z.string().describe("the arithmetic expression") }),
      execute: async ({ expression }) => (called.push(expression), RESULT),
    });
    const answer = await generateText({
      ...asked,
      prompt: PRODUCT,
      tools: { calculator },
      stopWhen: stepCountIs(3),
    });
    assert.deepEqual(called, ["12*7"]);
    assert.equal(answer.steps.length, 2);
    saysProduct(answer.text);
  });

  feature(`${name}: tool required`, async () => {
    const answer = await generateText({ ...typed, tools: { weather }, toolChoice: "required" });
    isWeather(answer.toolCalls[0].input);
    assert.equal(answer.toolResults[0].output, "rain");
  });

  feature(`${name}: tool named, streamed`, async () => {
    const answer = streamText({
      ...typed,
      tools: { weather },
      toolChoice: { type: "tool", toolName: "weather" },
    });
    const calls = [];
    for await (const part of answer.fullStream) if (part.type === "tool-call") calls.push(part.input);
    assert.equal(calls.length, 1);
    isWeather(calls[0]);
  });

  feature(`${name}: steps: a call, then an answer`, async () => {
    const answer = await generateText({
      ...typed,
      maxOutputTokens: 400,
      tools: { weather },
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    });
    assert.equal(answer.steps.length, 2);
    isWeather(answer.steps[0].toolCalls[0].input);
  });

  feature(`${name}: object`, async () => {
    const answer = await generateText({ ...typed, output: Output.object({ schema: Forecast }) });
    isWeather(answer.output);
  });

  feature(`${name}: object streamed`, async () => {
    const answer = streamText({ ...typed, output: Output.object({ schema: Forecast }) });
    let last;
    for await (const partial of answer.partialOutputStream) last = partial;
    isWeather(last);
  });
}

feature("compatible: completion", async () => {
  const model = compatible.completionModel(env.model);
  const prompt = env.question.slice(0, env.question.length / 2);
  assert.ok((await generateText({ model, prompt, maxOutputTokens: 8, maxRetries: 0 })).text);
});

feature("openai responses: text and stream", async () => {
  const model = openai.responses(env.model);
  const asked = { model, prompt: env.question, temperature: 0, maxRetries: 0 };
  solved((await generateText(asked)).text);
  let text = "";
  for await (const piece of streamText(asked).textStream) text += piece;
  solved(text);
});

await runAll();
