// The JavaScript twin of tests/clients/features.py: runs features one after another, each with a deadline.

import assert from "node:assert/strict";
import { appendFileSync } from "node:fs";

const DEADLINE = 240_000; // milliseconds for one feature, on a busy machine

export const env = {
  url: process.env.CLIENTS_URL,
  v1: `${process.env.CLIENTS_URL}/v1`,
  model: process.env.CLIENTS_MODEL,
  question: process.env.CLIENTS_QUESTION,
  value: process.env.CLIENTS_VALUE,
};
export const messages = [{ role: "user", content: env.question }];
// The model was trained to write calls and no other JSON: it would fill a constrained answer with the blanks that JSON
// allows.
export const PENALTY = 0.2;
export const PARAMETERS = {
  type: "object",
  properties: {
    city: { type: "string", enum: ["Paris", "Oslo"] },
    days: { type: "integer", minimum: 1, maximum: 7 },
  },
  required: ["city", "days"],
  additionalProperties: false,
};

// The model was trained to call this tool and to say what it returns.
export const PRODUCT = "What is 12 * 7?";
export const RESULT = "84";
export const ABOUT = "Evaluates an arithmetic expression.";
export const EXPRESSION = {
  type: "object",
  properties: { expression: { type: "string", description: "the arithmetic expression" } },
  required: ["expression"],
};

export function isProduct(name, given) {
  assert.equal(name, "calculator");
  assert.deepEqual(typeof given === "string" ? JSON.parse(given) : given, { expression: "12*7" });
}

export function saysProduct(text) {
  assert.ok(text.includes(RESULT), `wrong answer: ${JSON.stringify(text)}`);
}

export function solved(text) {
  assert.ok(text.trimEnd().endsWith(`#### ${env.value}`), `wrong answer: ${JSON.stringify(text)}`);
}

export function isWeather(given) {
  const found = typeof given === "string" ? JSON.parse(given) : given;
  assert.deepEqual(Object.keys(found).sort(), ["city", "days"]);
  assert.ok(["Paris", "Oslo"].includes(found.city) && found.days >= 1 && found.days <= 7, JSON.stringify(found));
}

const cases = [];

export function feature(name, run) {
  cases.push([name, run]);
}

export async function runAll() {
  for (const [feature, run] of cases) {
    let why = "";
    let timer;
    const late = new Promise((_, reject) => {
      timer = setTimeout(() => reject(new Error(`not done after ${DEADLINE / 1000} s`)), DEADLINE);
    });
    try {
      await Promise.race([run(), late]);
    } catch (error) {
      why = `${error?.name}: ${error?.message}`;
      console.error(feature, error);
    }
    clearTimeout(timer);
    appendFileSync(process.env.CLIENTS_REPORT, JSON.stringify({ feature, passed: !why, why }) + "\n");
  }
  process.exit(0);
}
