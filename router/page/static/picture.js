// Draws the cluster: prefill nodes, decode nodes, their pages, and the transfers of the last minute.

import { short, svg } from "./dom.js";

const [BOX_WIDTH, BOX_HEIGHT, GAP] = [230, 92, 16];
const WIDE = 860;
const MINUTE = 60;

/**
 * Draw into `target`.
 * nodes: of /server_info, with those that are missing. view: the Window of metrics. requests: of /requests.
 */
export function drawPicture(target, nodes, view, requests) {
  const sorted = [...nodes].sort((one, other) => one.name.localeCompare(other.name, undefined, { numeric: true }));
  const columns = Object.groupBy(sorted, (node) => node.role);
  columns.prefill ??= [];
  columns.decode ??= [];
  const rows = Math.max(columns.prefill.length, columns.decode.length, 1);
  const narrow = target.clientWidth < 560;
  const [width, boxWidth] = narrow ? [380, 165] : [WIDE, BOX_WIDTH];
  const height = rows * (BOX_HEIGHT + GAP) + 8;
  const left = narrow ? 4 : 60;
  const places = new Map();
  for (const [role, x] of [["prefill", left], ["decode", width - left - boxWidth]]) {
    const space = (height - columns[role].length * BOX_HEIGHT) / (columns[role].length + 1);
    columns[role].forEach((node, index) => places.set(node.name, { x, y: space + index * (BOX_HEIGHT + space) }));
  }
  const absent = new Set(nodes.filter((node) => !node.load).map((node) => node.name));
  target.setAttribute("viewBox", `0 0 ${width} ${height}`);
  target.replaceChildren(
    ...links(new Map([...places].filter(([name]) => !absent.has(name))), boxWidth, requests, view),
    ...nodes.filter((node) => places.has(node.name)).map((node) => box(node, places.get(node.name), boxWidth, view)),
  );
}

/** Draw a line for each pair of nodes; its width grows with the requests that took it in the last minute. */
function links(places, boxWidth, requests, view) {
  const used = new Map();
  for (const request of requests.filter((each) => each.age < MINUTE)) {
    for (const { prefill, decode } of request.nodes) {
      const pair = `${prefill}\n${decode}`;
      used.set(pair, (used.get(pair) ?? 0) + 1);
    }
  }
  const lines = [];
  for (const [prefill, from] of places) {
    for (const [decode, to] of places) {
      if (from.x >= to.x) continue;
      const count = used.get(`${prefill}\n${decode}`) ?? 0;
      const [x1, y1, x2, y2] = [from.x + boxWidth, from.y + BOX_HEIGHT / 2, to.x, to.y + BOX_HEIGHT / 2];
      const middle = (x1 + x2) / 2;
      const moving = count && view.increase("tandem_kv_transferred_pages_total", 10, { engine: prefill });
      lines.push(svg("path", {
        class: moving ? "link moving" : "link",
        "stroke-width": Math.min(1 + count / 8, 4),
        d: `M${x1} ${y1} C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`,
      }, svg("title", {}, `${prefill} to ${decode}: ${count} of the recent requests in the last minute`)));
    }
  }
  return lines;
}

function box(node, { x, y }, width, view) {
  const { load, role, state } = node;
  if (!load) return missing(node, x, y, width);
  const labels = { engine: node.name };
  const down = state !== "up" || node.reachable === false;
  const rate = role === "prefill"
    ? `${short(view.rate("tandem_kv_transferred_pages_total", 10, labels))} pages/s out`
    : `${short(view.rate("vllm:generation_tokens_total", 10, labels))} tokens/s`;
  const first = `${load.running} running, ${load.queued} waiting`;
  const lines = [[node.name, 20, "name"], [down ? state : first, 38, "soft"], [rate, 55, "soft"]];
  return svg(
    "g",
    { transform: `translate(${x} ${y})`, "data-node": node.name, class: down ? "down" : "" },
    svg("rect", { class: `box ${role}`, width, height: BOX_HEIGHT, rx: 8 }),
    ...lines.map(([text, at, style]) => svg("text", { x: 12, y: at, class: style }, text)),
    ...pages(load, width - 24, view, labels),
  );
}

/** Draw a node of the cluster file that is not there. */
function missing({ name, role }, x, y, width) {
  return svg(
    "g",
    { transform: `translate(${x} ${y})`, "data-node": name, class: "down" },
    svg("rect", { class: `box ${role}`, width, height: BOX_HEIGHT, rx: 8 }),
    svg("text", { x: 12, y: 20 }, name),
    svg("text", { x: 12, y: 38, class: "soft" }, "down"),
  );
}

/** Draw the pages of a node as a bar, and those in host memory as a thin one below it. */
function pages(load, width, view, labels) {
  const all = Math.max(load.total_pages, 1);
  const used = Math.max(all - load.free_pages - load.cached_pages - load.quarantined_pages, 0);
  const shares = { used, cached: load.cached_pages, quarantined: load.quarantined_pages, free: load.free_pages };
  let at = 0;
  const bars = Object.entries(shares).map(([name, count]) => {
    const bar = svg("rect", { class: `bar ${name}`, x: 12 + at, y: 66, width: (count / all) * width, height: 9 },
      svg("title", {}, `${count} of ${load.total_pages} pages ${name}`));
    at += (count / all) * width;
    return bar;
  });
  const held = hostShare(view.newest.metrics, labels);
  if (held !== null) bars.push(svg("rect", { class: "bar host", x: 12, y: 79, width: held * width, height: 4 }));
  return bars;
}

/** Return the used share of a node's host memory for pages; null if it has none. */
function hostShare(metrics, { engine }) {
  const of = (name) => (metrics.get(name) ?? []).find((sample) => sample.labels.engine === engine)?.value ?? 0;
  const size = of("tandem_host_tier_total_tokens");
  return size > 0 ? of("tandem_host_tier_tokens") / size : null;
}
