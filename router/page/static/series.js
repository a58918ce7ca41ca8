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

const labelled = (sample) => JSON.stringify(Object.entries(sample.labels).sort());

/** Return by how much each series of a counter grew: [{labels, value}, ...]. One that fell has started again from zero. */
export function growth(before, after, name) {
  const old = new Map((before.get(name) ?? []).map((sample) => [labelled(sample), sample.value]));
  return (after.get(name) ?? []).map((sample) => {
    const from = old.get(labelled(sample)) ?? 0;
    return { labels: sample.labels, value: sample.value >= from ? sample.value - from : sample.value };
  });
}

/** Return the cumulative counts of a histogram's buckets, ascending: [[bound, count], ...]. */
export function buckets(samples) {
  const counts = new Map();
  for (const { labels, value } of samples) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    counts.set(bound, (counts.get(bound) ?? 0) + value);
  }
  return [...counts].sort((one, other) => one[0] - other[0]);
}

/** Return a quantile of what the counts of buckets stand for; null if nothing was observed. */
export function quantile(counts, share) {
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

/** Samples of the last minutes: {at, metrics}. */
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

  growth(name, seconds) {
    return growth(this.since(seconds).metrics, this.newest.metrics, name);
  }

  /** Return the increase of a counter in the last `seconds`. */
  increase(name, seconds, labels = {}) {
    return total(new Map([[name, this.growth(name, seconds)]]), name, labels);
  }

  /** Return the increase per second; null with fewer than two samples. */
  rate(name, seconds, labels = {}) {
    const elapsed = this.newest.at - this.since(seconds).at;
    return elapsed > 0 ? this.increase(name, seconds, labels) / elapsed : null;
  }

  quantile(name, seconds, share) {
    return quantile(buckets(this.growth(`${name}_bucket`, seconds)), share);
  }
}
