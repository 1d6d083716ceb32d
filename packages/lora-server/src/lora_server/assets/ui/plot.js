// A small plot of one or two series over time. Texts stand beside the drawing, not in it.

import { el, setAttribute, setText } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [240, 56];
const MAX_GAP_MS = 3500;

/** One tile: a title, the current reading, the drawing, and a line for each further series. */
export class Plot {
  /**
   * @param title what is plotted
   * @param series names; the first is drawn as a filled line, the second dashed
   * @param windowMs how far back the drawing reaches
   * @param format value -> [number, unit]
   */
  constructor({ title, series, windowMs, format }) {
    this.title = title;
    this.series = series;
    this.windowMs = windowMs;
    this.format = format;
    this.number = el("span", { class: "reading-number" }, "–");
    this.unit = el("span", { class: "reading-unit" });
    this.ceiling = el("span", { class: "plot-ceiling", "aria-hidden": "true" });
    this.notes = el("p", { class: "plot-notes" });
    this.drawing = drawing();
    this.lines = series.map((_, idx) => shape(this.drawing, `line line-${idx + 1}`));
    this.area = shape(this.drawing, "area");
    this.node = el(
      "article",
      { class: "tile" },
      el("h3", {}, title),
      el("p", { class: "reading" }, this.number, " ", this.unit),
      el("div", { class: "plot" }, this.drawing, this.ceiling),
      this.notes,
    );
  }

  /**
   * Draw.
   * @param history `[{at, values}]`, oldest first; a value is null when there was none
   * @param now right edge, in ms
   * @param reading the value to print, or null
   * @param notes texts under the plot; each may name a series, for its key
   * @param ceiling fixed upper end of the scale, or null
   */
  update({ history, now, reading, notes, ceiling = null }) {
    const [number, unit] = reading === null ? ["–", ""] : this.format(reading);
    setText(this.number, number);
    setText(this.unit, unit);
    const top = ceiling ?? niceCeiling(history.flatMap(({ values }) => values));
    const [topNumber, topUnit] = this.format(top);
    const isEmpty = history.every(({ values }) => values.every((value) => value === null));
    setText(this.ceiling, isEmpty ? "" : `${topNumber} ${topUnit}`.trim());
    this.series.forEach((_, idx) => {
      const runs = this.runs(history, idx, now, top);
      setAttribute(this.lines[idx], "d", runs.map(linePath).join(""));
      if (idx === 0) setAttribute(this.area, "d", runs.map(areaPath).join(""));
    });
    const key = (idx) => el("span", { class: `key key-${idx + 1}`, "aria-hidden": "true" });
    const shown = notes.map(({ text, series }) => {
      const keys = series === undefined ? [] : [key(series)];
      return el("span", { class: "note" }, ...keys, text);
    });
    this.notes.replaceChildren(...shown);
    const words = notes.map(({ text }) => text).join(", ");
    setAttribute(this.drawing, "aria-label", `${this.title}: ${number} ${unit}. ${words}`);
  }

  /** Runs of neighbouring points; a missing value or a pause ends a run. */
  runs(history, idx, now, top) {
    const runs = [];
    let before = null;
    for (const { at, values } of history) {
      const value = values[idx];
      if (value === null || now - at > this.windowMs) {
        before = null;
        continue;
      }
      const x = WIDTH * (1 - (now - at) / this.windowMs);
      const y = (HEIGHT - 2) * (1 - Math.min(value / top, 1)) + 1;
      if (before === null || at - before > MAX_GAP_MS) runs.push([]);
      runs.at(-1).push([x.toFixed(1), y.toFixed(1)]);
      before = at;
    }
    return runs;
  }
}

function drawing() {
  const node = document.createElementNS(SVG, "svg");
  node.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  node.setAttribute("preserveAspectRatio", "none");
  node.setAttribute("role", "img");
  return node;
}

function shape(parent, className) {
  const node = document.createElementNS(SVG, "path");
  node.setAttribute("class", className);
  parent.append(node);
  return node;
}

function linePath(points) {
  // A single point is a line of no length, which round ends make visible.
  const rest = points.length > 1 ? points.slice(1) : points;
  return `M${points[0].join(" ")}${rest.map((point) => `L${point.join(" ")}`).join("")}`;
}

function areaPath(points) {
  if (points.length < 2) return "";
  return `${linePath(points)}L${points.at(-1)[0]} ${HEIGHT}L${points[0][0]} ${HEIGHT}Z`;
}

/** 1, 2 or 5 times a power of ten, at least the largest value. */
function niceCeiling(values) {
  const largest = Math.max(0, ...values.filter((value) => value !== null));
  if (largest === 0) return 1;
  const power = 10 ** Math.floor(Math.log10(largest));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= largest * 0.999);
}
