// Prometheus' text format, as far as this page reads it, and quantiles of histograms.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:\\.|[^"\\])*)"/g;
const ESCAPES = { "\\\\": "\\", '\\"': '"', "\\n": "\n" };

/** Return the samples by metric name: `[{labels, value}]`. Without `names`, of every metric. */
export function parse(text, names = null) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    if (line === "" || line.startsWith("#")) continue;
    const found = SAMPLE.exec(line);
    if (found === null || (names !== null && !names.has(found[1]))) continue;
    if (!samples.has(found[1])) samples.set(found[1], []);
    samples.get(found[1]).push({ labels: labelsOf(found[2] ?? ""), value: numberOf(found[3]) });
  }
  return samples;
}

function labelsOf(text) {
  const labels = {};
  for (const [, name, value] of text.matchAll(LABEL)) {
    labels[name] = value.replace(/\\[\\"n]/g, (escape) => ESCAPES[escape]);
  }
  return labels;
}

function numberOf(text) {
  if (text === "+Inf") return Infinity;
  return text === "-Inf" ? -Infinity : Number(text);
}

/** Sum all series of a metric; null when the server has no such metric. */
export function total(samples, name) {
  const series = samples.get(name);
  return series ? series.reduce((sum, sample) => sum + sample.value, 0) : null;
}

/** Sum a histogram's series: cumulative counts by upper bound. */
export function histogram(samples, name) {
  const counts = new Map();
  for (const { labels, value } of samples.get(`${name}_bucket`) ?? []) {
    const bound = numberOf(labels.le);
    counts.set(bound, (counts.get(bound) ?? 0) + value);
  }
  return counts;
}

/** What a histogram counted between two scrapes; everything when there was a restart. */
export function since(before, after) {
  const last = after.get(Infinity) ?? 0;
  if (last < (before.get(Infinity) ?? 0)) return after;
  return new Map([...after].map(([bound, value]) => [bound, value - (before.get(bound) ?? 0)]));
}

/**
 * The value below which a share of the observations lies, as Prometheus' histogram_quantile:
 * linear inside a bucket, the last finite bound above it. Null when nothing was observed.
 */
export function quantile(share, counts) {
  const bounds = [...counts.keys()].sort((a, b) => a - b);
  const all = counts.get(Infinity) ?? 0;
  if (!(all > 0)) return null;
  const rank = share * all;
  const idx = bounds.findIndex((bound) => counts.get(bound) >= rank);
  if (bounds[idx] === Infinity) return bounds.length > 1 ? bounds[idx - 1] : null;
  const lower = idx === 0 ? 0 : bounds[idx - 1];
  const below = idx === 0 ? 0 : counts.get(lower);
  const inside = counts.get(bounds[idx]) - below;
  return inside === 0 ? bounds[idx] : lower + ((bounds[idx] - lower) * (rank - below)) / inside;
}
