// Reads /server_info, /metrics and /requests every two seconds while the page is visible, and shows them.

import { Refused, key, send } from "./api.js";
import { Chart } from "./charts.js";
import { Chat } from "./chat.js";
import { html, milliseconds, short } from "./dom.js";
import { drawPicture } from "./picture.js";
import { Window, parseMetrics, total } from "./series.js";
import { drawWaterfall } from "./waterfall.js";

const EVERY = 2000; // milliseconds
const [MINUTE, PACE] = [60, 10]; // seconds over which figures and charts are computed
const FIRST = "vllm:time_to_first_token_seconds";
const GAP = "vllm:inter_token_latency_seconds";

const at = (id) => document.getElementById(id);
const view = new Window(2 * MINUTE);
let model = "";

const median = [["p50", "--prefill"], ["p99", "--decode"]];
const charts = {
  first: new Chart(at("chart-first"), median),
  gap: new Chart(at("chart-gap"), median),
  tokens: new Chart(at("chart-tokens"), [["prompt", "--prefill"], ["answer", "--decode"]]),
  requests: new Chart(at("chart-requests"), [["running", "--decode"], ["waiting", "--queue"]]),
};

async function update() {
  const info = await (await send("server_info")).json();
  model = info.served_model_name;
  at("model").textContent = model;
  const { requests } = await (await send("requests?limit=100")).json();
  drawWaterfall(at("waterfall"), requests);
  if (!info.nodes) {
    state(info.ready ? "ready" : "not ready");
    notice("This key shows its own requests and the chat. The cluster's figures need a key with the scope admin.");
    return;
  }
  notice("");
  const known = new Set(info.nodes.map((node) => node.name));
  const missing = info.missing_nodes.filter((node) => !known.has(node.name));
  state(info.ready ? (info.missing_nodes.length ? "degraded" : "ready") : "not ready");
  const metrics = parseMetrics(await (await send("metrics")).text());
  view.add(Date.now() / 1000, metrics);
  drawPicture(at("picture"), [...info.nodes, ...missing], view, requests);
  drawFigures(metrics);
  drawCharts(metrics);
}

function drawCharts(metrics) {
  const now = view.newest.at;
  const thousandth = (name, share) => {
    const seconds = view.quantile(name, PACE, share);
    return seconds === null ? null : seconds * 1000;
  };
  charts.first.add(now, thousandth(FIRST, 0.5), thousandth(FIRST, 0.99));
  charts.gap.add(now, thousandth(GAP, 0.5), thousandth(GAP, 0.99));
  charts.tokens.add(now, view.rate("vllm:prompt_tokens_total", PACE), view.rate("vllm:generation_tokens_total", PACE));
  charts.requests.add(now, total(metrics, "vllm:num_requests_running"), total(metrics, "vllm:num_requests_waiting"));
}

function drawFigures(metrics) {
  const both = (name) => [0.5, 0.99].map((share) => milliseconds(view.quantile(name, MINUTE, share))).join(" / ");
  const drafts = view.increase("vllm:spec_decode_num_drafts_total", MINUTE);
  const accepted = view.increase("vllm:spec_decode_num_accepted_tokens_total", MINUTE);
  const replays = view.increase("tandem_graph_replays_total", MINUTE);
  const eager = view.increase("tandem_graph_fallbacks_total", MINUTE);
  const found = view.increase("vllm:prefix_cache_hits_total", MINUTE);
  const looked = view.increase("vllm:prefix_cache_queries_total", MINUTE);
  const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
  figures({
    "First token, p50 / p99": both(FIRST),
    "Between tokens, p50 / p99": both(GAP),
    "Answer tokens per second": short(view.rate("vllm:generation_tokens_total", PACE)),
    "Tokens per step and request": drafts ? (1 + accepted / drafts).toFixed(2) : "–",
    "Steps from graphs": share(replays, replays + eager),
    "Prompt tokens from cache": share(found, looked),
    "Failed requests": short(total(metrics, "tandem_request_errors_total")),
  });
}

function figures(values) {
  at("figures").replaceChildren(
    ...Object.entries(values).map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value))),
  );
}

function state(text) {
  at("state").textContent = text;
  at("state").className = `pill ${text.replace(" ", "-")}`;
}

function notice(text) {
  at("notice").textContent = text;
  at("notice").hidden = !text;
}

async function loop() {
  try {
    if (!document.hidden) await update();
  } catch (error) {
    const refused = error instanceof Refused;
    state(refused ? "refused" : "no answer");
    notice(refused ? error.message : "The router does not answer. This page asks again every two seconds.");
    if (error.status === 401 && !at("key-dialog").open && !key.get()) at("key-dialog").showModal();
  }
  setTimeout(loop, EVERY);
}

at("key-button").addEventListener("click", () => at("key-dialog").showModal());
at("key-dialog").addEventListener("close", () => {
  const chosen = at("key-dialog").returnValue;
  if (chosen) key.set(chosen === "use" ? at("key").value.trim() : "");
  at("key").value = "";
});

new Chat(() => model);
loop();
