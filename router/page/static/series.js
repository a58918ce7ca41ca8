// Reads the text format of Prometheus, and computes rates and percentiles over a window of samples.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Return name -> list of {labels, value}. */
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) labels[name] = value.replace(/\\(.)/g, "$1");
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return found;
}

/** Return the sum of a series over the samples whose labels contain `labels`; 0 if there is none. */
export function total(metrics, name, labels = {}) {
  const wanted = Object.entries(labels);
  return (metrics.get(name) ?? [])
    .filter((sample) => wanted.every(([label, value]) => sample.labels[label] === value))
    .reduce((sum, sample) => sum + sample.value, 0);
}

/** Return the counts of a histogram by upper bound, ascending: [[bound, cumulative count], ...]. */
export function buckets(metrics, name) {
  const counts = new Map();
  for (const { labels, value } of metrics.get(`${name}_bucket`) ?? []) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    counts.set(bound, (counts.get(bound) ?? 0) + value);
  }
  return [...counts].sort((one, other) => one[0] - other[0]);
}

/** Return the quantile of what was observed between two readings of a histogram; null if nothing was. */
export function quantile(before, after, share) {
  const old = new Map(before);
  const counts = after.map(([bound, count]) => [bound, Math.max(count - (old.get(bound) ?? 0), 0)]);
  const all = counts.length ? counts.at(-1)[1] : 0;
  if (!all) return null;
  const rank = share * all;
  let lower = 0;
  let below = 0;
  for (const [bound, count] of counts) {
    if (count >= rank) {
      if (bound === Infinity) return lower;
      return lower + ((bound - lower) * (rank - below)) / Math.max(count - below, 1);
    }
    lower = bound;
    below = count;
  }
  return lower;
}

/** Samples of the last minutes: {at, metrics}. A counter that fell, because a node restarted, counts from zero. */
export class Window {
  constructor(seconds) {
    this.seconds = seconds;
    this.samples = [];
  }

  add(at, metrics) {
    this.samples.push({ at, metrics });
    while (this.samples.length > 2 && this.samples[0].at < at - this.seconds) this.samples.shift();
  }

  get newest() {
    return this.samples.at(-1);
  }

  /** Return the sample of `seconds` ago, or the oldest one. */
  since(seconds) {
    const from = this.newest.at - seconds;
    return this.samples.findLast((sample) => sample.at <= from) ?? this.samples[0];
  }

  /** Return the increase of a counter in the last `seconds`. */
  increase(name, seconds, labels = {}) {
    const now = total(this.newest.metrics, name, labels);
    const before = total(this.since(seconds).metrics, name, labels);
    return now >= before ? now - before : now;
  }

  /** Return the increase per second; null with fewer than two samples. */
  rate(name, seconds, labels = {}) {
    const elapsed = this.newest.at - this.since(seconds).at;
    return elapsed > 0 ? this.increase(name, seconds, labels) / elapsed : null;
  }

  quantile(name, seconds, share) {
    return quantile(buckets(this.since(seconds).metrics, name), buckets(this.newest.metrics, name), share);
  }
}
