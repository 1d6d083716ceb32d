// Starts the page: the key, the clocks that read the server, and what is shown of it as a whole.

import { Adapters } from "./adapters.js";
import { sendForJson, storeKey, storedKey } from "./api.js";
import { byId, notify, notifyError, setAttribute, setText } from "./dom.js";
import { Live, showPolling } from "./live.js";
import { connectLoadForm } from "./load.js";
import { Playground } from "./playground.js";

const METRICS_MS = 1000;
const CARDS_MS = 2000;
const TIMEOUT_MS = 10_000;
const MAX_WAIT_MS = 30_000;
const UNAUTHORIZED = 401;
const PHASES = { 0: "unreachable", [UNAUTHORIZED]: "locked", 503: "not ready" };

const playground = new Playground();
const live = new Live();
const adapters = new Adapters({
  onCards: (cards) => playground.offer(cards.map((card) => card.id)),
});

/** Calls `work` again and again while the page is seen and the server lets it in. */
class Clock {
  constructor(periodMs, work, onError) {
    this.periodMs = periodMs;
    this.work = work;
    this.onError = onError;
    this.timer = null;
    this.numFailures = 0;
  }

  async tick() {
    this.stop();
    if (document.hidden) return;
    // A tick that was overtaken by another one must not start a second chain.
    const mark = (this.mark = Symbol("tick"));
    let isRefused = false;
    try {
      await this.work(AbortSignal.timeout(TIMEOUT_MS));
      this.numFailures = 0;
    } catch (error) {
      this.numFailures += 1;
      isRefused = error.status === UNAUTHORIZED;
      this.onError(error);
    }
    if (this.mark === mark && !isRefused && !document.hidden) {
      // After failures less and less often: the server may be gone, or have refused the pace.
      const waitMs = Math.min(this.periodMs * 2 ** this.numFailures, MAX_WAIT_MS);
      this.timer = setTimeout(() => this.tick(), waitMs);
    }
  }

  stop() {
    clearTimeout(this.timer);
    this.mark = null;
  }
}

const clocks = [
  new Clock(
    METRICS_MS,
    async (signal) => {
      await live.poll(signal);
      showPolling(true);
      if (byId("phase").dataset.phase === "unreachable") readNames();
      showPhase("ready");
    },
    (error) => {
      live.pause();
      const isKeyMissing = error.status === UNAUTHORIZED && !storedKey();
      showPolling(true, isKeyMissing ? "Waiting for a key." : error.message);
      if (error.status !== UNAUTHORIZED) showPhase(PHASES[error.status] ?? "ready");
    },
  ),
  new Clock(
    CARDS_MS,
    async (signal) => {
      await adapters.poll(signal);
      showCardsError(null);
      showPhase("ready");
    },
    showCardsError,
  ),
];

/** Say why the table is not read, until it is read again. A missing key is told once, above. */
function showCardsError(error) {
  const notice = byId("adapters-notice");
  if (error?.status === UNAUTHORIZED) showPhase("locked");
  if (error !== null && error.status !== UNAUTHORIZED) {
    notifyError(notice, error);
    notice.dataset.isOfReading = "true";
  } else if (notice.dataset.isOfReading) {
    notify(notice);
    delete notice.dataset.isOfReading;
  }
}

function showPhase(phase) {
  const words = { locked: "key needed", ready: "serving" };
  const pill = byId("phase");
  setText(pill, words[phase] ?? phase);
  setAttribute(pill, "data-phase", phase);
}

async function readNames() {
  try {
    const [{ version }, { data }] = await Promise.all([
      sendForJson("version"),
      sendForJson("v1/models"),
    ]);
    const bases = data.filter((card) => !card.lora).map((card) => card.id);
    playground.base = bases[0] ?? null;
    setText(byId("served"), [...bases, version].join(" · "));
    document.title = [...bases.slice(0, 1), "lora-server"].join(" · ");
  } catch (error) {
    showPhase(PHASES[error.status] ?? "ready");
  }
}

function showKeyPanel(isShown, why = "") {
  byId("key-panel").hidden = !isShown;
  setAttribute(byId("key-toggle"), "aria-expanded", String(isShown));
  setText(byId("key-why"), why);
}

function start() {
  readNames();
  for (const clock of clocks) clock.tick();
}

function connectKey() {
  const use = (key) => {
    storeKey(key);
    byId("key").value = "";
    showKeyPanel(false);
    start();
  };
  byId("key-toggle").addEventListener("click", () => {
    showKeyPanel(byId("key-panel").hidden, storedKey() ? "A key is set in this tab." : "");
    if (!byId("key-panel").hidden) byId("key").focus();
  });
  byId("key-panel").addEventListener("submit", (event) => {
    event.preventDefault();
    use(byId("key").value.trim());
    byId("key-toggle").focus();
  });
  byId("key-forget").addEventListener("click", () => {
    use("");
    byId("key-toggle").focus();
  });
  document.addEventListener("key-needed", (event) => {
    showKeyPanel(true, storedKey() ? (event.detail ?? "") : "This server asks for an API key.");
  });
}

connectKey();
connectLoadForm({ onLoaded: () => adapters.poll().catch(() => {}) });
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    live.pause();
    showPolling(false);
    for (const clock of clocks) clock.stop();
  } else start();
});
start();
