// A chat with the served model. What it writes is shown as text.

import { Refused, events, send } from "./api.js";
import { html, milliseconds } from "./dom.js";

const MAX_SECONDS = 600;
const at = (id) => document.getElementById(id);

/** The conversation, and the form that continues it. */
export class Chat {
  constructor(model) {
    this.model = model; // () => name of the served model
    this.messages = [];
    this.running = null;
    at("chat").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    at("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      at("chat").requestSubmit();
    });
    at("stop").addEventListener("click", () => this.running?.abort());
    at("clear").addEventListener("click", () => {
      this.running?.abort();
      this.messages = [];
      at("messages").replaceChildren();
    });
  }

  async ask() {
    if (this.running) return;
    const content = await typed();
    const shown = show("user", content.text);
    content.images.forEach((url) => shown.append(html("img", { src: url, alt: "attached image" })));
    const asked = { role: "user", content: content.images.length ? content.parts : content.text };
    at("prompt").value = at("images").value = "";
    const view = new AnswerView(show("assistant", ""));
    this.running = new AbortController();
    this.busy(true);
    const history = this.messages;
    try {
      await this.stream([...history, asked], view);
    } catch (error) {
      if (error.name !== "AbortError") view.fail(error instanceof Refused ? error.message : `${error}`);
    }
    if (this.messages === history) history.push(asked, { role: "assistant", content: view.text });
    this.running = null;
    this.busy(false);
  }

  async stream(messages, view) {
    const body = {
      model: this.model(),
      messages,
      stream: true,
      stream_options: { include_usage: true },
      temperature: Number(at("temperature").value),
      max_tokens: Number(at("max-tokens").value),
    };
    const answer = await send("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: AbortSignal.any([this.running.signal, AbortSignal.timeout(MAX_SECONDS * 1000)]),
    });
    for await (const event of events(answer)) {
      if (event.error) throw new Refused(200, event.error.message);
      view.add(event);
    }
  }

  busy(running) {
    at("send").hidden = running;
    at("stop").hidden = !running;
  }
}

/** Shows one answer while it arrives: reasoning, text, tool calls, and its times. */
class AnswerView {
  constructor(target) {
    this.target = target;
    this.text = "";
    this.calls = [];
    this.started = performance.now();
    this.body = target.appendChild(document.createTextNode(""));
  }

  add({ choices, usage }) {
    const delta = choices[0]?.delta ?? {};
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (this.first === undefined && (delta.content || reasoning || delta.tool_calls)) this.first = performance.now();
    if (reasoning) this.thoughts().append(reasoning);
    if (delta.content) {
      this.text += delta.content;
      this.body.data = this.text;
    }
    for (const call of delta.tool_calls ?? []) this.call(call);
    if (usage) this.finish(usage);
  }

  thoughts() {
    if (!this.reasoning) {
      this.reasoning = html("p");
      this.target.prepend(html("details", { open: "" }, html("summary", {}, "Reasoning"), this.reasoning));
    }
    return this.reasoning;
  }

  call({ index, function: called }) {
    this.calls[index] ??= this.target.appendChild(html("div", { class: "call" }));
    this.calls[index].append(called?.name ? `${called.name} ` : "", called?.arguments ?? "");
  }

  finish(usage) {
    const seconds = (performance.now() - this.started) / 1000;
    const first = ((this.first ?? performance.now()) - this.started) / 1000;
    const pace = usage.completion_tokens > 1 ? (seconds - first) / (usage.completion_tokens - 1) : null;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    this.target.append(html("div", { class: "figures" },
      `${usage.prompt_tokens} tokens in${cached ? ` (${cached} cached)` : ""}, ${usage.completion_tokens} out, ` +
      `first after ${milliseconds(first)}, then ${milliseconds(pace)} each`));
  }

  fail(message) {
    this.target.classList.add("error");
    this.target.append(message);
  }
}

async function typed() {
  const text = at("prompt").value;
  const images = await Promise.all([...at("images").files].map(dataUrl));
  const parts = [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
  return { text, images, parts };
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function show(role, text) {
  const message = html("div", { class: `message ${role}` }, text);
  at("messages").append(message);
  return message;
}
