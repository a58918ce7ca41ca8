// Charts of the last minutes, by uPlot.

/* global uPlot */
import { html, short } from "./dom.js";

const POINTS = 150; // of two seconds each
const HEIGHT = 170;
const LINE = { width: 2, points: { show: false } };

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

/** Return a colour of the style sheet as a canvas takes it. */
function color(name) {
  const probe = document.body.appendChild(html("span", { class: `color${name}` }));
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** A chart of one or more lines over time. `add` takes the newest value of each; null leaves a gap. */
export class Chart {
  constructor(target, lines) {
    this.target = target;
    this.data = [[], ...lines.map(() => [])];
    const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
    this.plot = new uPlot({
      width: target.clientWidth,
      height: HEIGHT,
      legend: { live: false },
      cursor: { drag: { x: false, y: false } },
      scales: { y: { range: (_, __, most) => [0, Math.max(most * 1.1, 1)] } },
      axes: [{ ...axis, space: 70, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 46, values: (_, ticks) => ticks.map(short) }],
      series: [{}, ...lines.map(([label, stroke]) => ({ ...LINE, label, stroke: color(stroke) }))],
    }, this.data, target);
    new ResizeObserver(() => this.plot.setSize({ width: target.clientWidth, height: HEIGHT })).observe(target);
  }

  add(at, ...values) {
    [at, ...values].forEach((value, index) => {
      this.data[index].push(value);
      if (this.data[index].length > POINTS) this.data[index].shift();
    });
    this.plot.setData(this.data);
  }
}
