// Reads /metrics once a second while the page is seen, and draws the last two minutes.

import { send, storedKey } from "./api.js";
import { byId, setText } from "./dom.js";
import { histogram, parse, quantile, since, total } from "./exposition.js";
import { count, duration, plural, rate } from "./format.js";
import { Plot } from "./plot.js";

const WINDOW_MS = 120_000;
const TOKENS = "vllm:generation_tokens_total";
const TTFT = "lora_server_time_to_first_token_seconds";
const RUNNING = "vllm:num_requests_running";
const WAITING = "vllm:num_requests_waiting";
const SLOTS = "lora_server_adapter_slots";
const USED = "lora_server_adapter_slots_used";
const LEASED = "lora_server_adapter_slots_leased";
const PINNED = "lora_server_adapter_slots_pinned";
const NAMES = new Set([TOKENS, `${TTFT}_bucket`, RUNNING, WAITING, SLOTS, USED, LEASED, PINNED]);

/** The four plots. */
export class Live {
  constructor() {
    const tile = (title, series, format) => new Plot({ title, series, format, windowMs: WINDOW_MS });
    this.plots = {
      tokens: tile("Output", ["tokens/s"], (value) => [rate(value), "tokens/s"]),
      ttft: tile("Time to first token", ["p50", "p95"], duration),
      slots: tile("Adapter slots", ["used", "leased"], (value) => [count(value), ""]),
      requests: tile("Requests", ["running", "waiting"], (value) => [count(value), ""]),
    };
    byId("tiles").replaceChildren(...Object.values(this.plots).map((plot) => plot.node));
    this.history = { tokens: [], ttft: [], slots: [], requests: [] };
    this.before = null;
    this.draw(Date.now(), { slots: null, leased: null, pinned: null });
  }

  /** Read once and draw. */
  async poll(signal) {
    // A key that sees some adapters only is right for everything here but the metrics.
    const reply = await send("metrics", { signal, asksForKey: !storedKey() });
    const text = await reply.text();
    const at = Date.now();
    const samples = parse(text, NAMES);
    const scrape = { at, tokens: total(samples, TOKENS), ttft: histogram(samples, TTFT) };
    this.note("tokens", at, [this.tokenRate(scrape)]);
    this.note("ttft", at, this.firstTokenTimes(scrape));
    this.note("slots", at, [total(samples, USED), total(samples, LEASED)]);
    this.note("requests", at, [total(samples, RUNNING), total(samples, WAITING)]);
    this.before = scrape;
    this.draw(at, { slots: total(samples, SLOTS), pinned: total(samples, PINNED) });
  }

  /** Start over after a pause: a rate over minutes says nothing of now. */
  pause() {
    this.before = null;
  }

  note(name, at, values) {
    const kept = this.history[name].filter((entry) => at - entry.at <= WINDOW_MS);
    this.history[name] = [...kept, { at, values }];
  }

  tokenRate(scrape) {
    const before = this.before;
    if (before === null || scrape.tokens === null || scrape.tokens < before.tokens) return null;
    return ((scrape.tokens - before.tokens) * 1000) / Math.max(scrape.at - before.at, 1);
  }

  firstTokenTimes(scrape) {
    if (this.before === null) return [null, null];
    const counts = since(this.before.ttft, scrape.ttft);
    return [quantile(0.5, counts), quantile(0.95, counts)];
  }

  draw(now, { slots, pinned }) {
    this.drawTokens(now);
    this.drawFirstToken(now);
    this.drawSlots(now, slots, pinned);
    this.drawRequests(now);
  }

  drawTokens(now) {
    const history = this.history.tokens;
    const values = history.flatMap((entry) => entry.values).filter((value) => value !== null);
    const notes = [{ text: values.length ? `highest ${rate(Math.max(...values))}` : "nothing yet" }];
    this.plots.tokens.update({ history, now, reading: history.at(-1)?.values[0] ?? null, notes });
  }

  drawFirstToken(now) {
    const history = this.history.ttft;
    const last = history.findLast((entry) => entry.values[0] !== null);
    const notes = last
      ? [
          { text: "p50", series: 0 },
          { text: `p95 ${duration(last.values[1]).join(" ")}`, series: 1 },
          { text: ago(now - last.at) },
        ]
      : [{ text: "no request ended yet" }];
    this.plots.ttft.update({ history, now, reading: last?.values[0] ?? null, notes });
  }

  drawSlots(now, slots, pinned) {
    const history = this.history.slots;
    const [used, leased] = history.at(-1)?.values ?? [null, null];
    const notes = slots
      ? [
          { text: `of ${count(slots)} used`, series: 0 },
          { text: `${count(leased ?? 0)} leased`, series: 1 },
          { text: `${count(pinned ?? 0)} pinned` },
        ]
      : [{ text: used === null ? "nothing yet" : "adapters are switched off" }];
    this.plots.slots.update({ history, now, reading: used, notes, ceiling: slots || null });
  }

  drawRequests(now) {
    const history = this.history.requests;
    const [running, waiting] = history.at(-1)?.values ?? [null, null];
    const notes =
      running === null
        ? [{ text: "nothing yet" }]
        : [
            { text: "running", series: 0 },
            { text: `${count(waiting)} waiting`, series: 1 },
          ];
    this.plots.requests.update({ history, now, reading: running, notes });
  }
}

/** Say whether the readings are fresh, and why not. */
export function showPolling(isSeen, problem = "") {
  const text = problem || "Last two minutes, read once a second.";
  setText(byId("live-state"), isSeen ? text : "Paused while the page is hidden.");
}

function ago(ms) {
  const seconds = Math.round(ms / 1000);
  return seconds < 2 ? "just now" : `${plural(seconds, "second")} ago`;
}
