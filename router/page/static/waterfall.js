// Shows where the time of recent requests went, a row for each.

import { html, milliseconds, svg } from "./dom.js";

// Where each part ends: the stages of a timeline, as /requests/ID names them.
const PARTS = [
  ["queue", "prefill.prefill_start"],
  ["compute", "prefill.prefill_end"],
  ["transfer", "decode.decode_start"],
  ["decode", "finished"],
];
const ROWS = 16;

/** Return [name, start, end] of the parts of a request, in seconds; parts that it did not reach are absent. */
export function parts(stages, end) {
  const found = [];
  let at = 0;
  for (const [name, stage] of PARTS) {
    const stop = stages[stage];
    if (stop === undefined || stop < at) continue;
    found.push([name, at, Math.min(stop, end)]);
    at = stop;
  }
  return found;
}

export function drawWaterfall(target, requests) {
  const shown = requests.slice(0, ROWS).map((request) => ({ ...request, end: lastStage(request) }));
  const longest = Math.max(...shown.map((request) => request.end), 0.001);
  target.replaceChildren(...shown.map((request) => row(request, longest)));
}

const lastStage = ({ stages }) => Math.max(...Object.values(stages));

function row(request, longest) {
  const failed = request.outcome.startsWith("error");
  const drawn = parts(request.stages, request.end);
  const name = html("span", { class: failed ? "name bad" : "name", title: request.request_id }, label(request));
  const bars = drawn.map(([kind, from, to]) =>
    svg("rect", { class: `part ${kind}`, x: (from / longest) * 100, width: ((to - from) / longest) * 100, height: 10 },
      svg("title", {}, `${kind} ${milliseconds(to - from)}`)));
  const picture = svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none" }, ...bars);
  return html("div", { class: "request", role: "listitem" }, name, picture,
    html("span", { class: "time" }, request.outcome === "running" ? "running" : milliseconds(request.end)));
}

function label({ nodes, outcome }) {
  const last = nodes.at(-1);
  const way = last ? `${last.prefill} → ${last.decode}` : "not placed";
  return outcome === "running" || outcome === "stop" || outcome === "length" ? way : `${way}: ${outcome}`;
}
