// The table of adapters: what is where, who uses it, and the buttons of each row.

import { send, sendForJson } from "./api.js";
import { byId, el, notify, notifyError, setAttribute, setText } from "./dom.js";
import { bytes, count, plural } from "./format.js";

const FIRST_ROWS = 100;
const DIGEST_CHARS = 12;

const ORDERS = {
  served: () => 0,
  name: (a, b) => a.id.localeCompare(b.id, "en"),
  hits: (a, b) => (b.lora.hits ?? 0) - (a.lora.hits ?? 0),
  busy: (a, b) => requests(b) - requests(a),
  bytes: (a, b) => b.lora.bytes - a.lora.bytes,
};

/** The table. `onCards` is called with the cards whenever they were read. */
export class Adapters {
  constructor({ onCards }) {
    this.onCards = onCards;
    this.cards = null;
    this.rows = new Map();
    this.isWhole = false;
    byId("filter").addEventListener("input", () => this.draw());
    byId("order").addEventListener("change", () => this.draw());
    byId("show-all").addEventListener("click", () => {
      this.isWhole = true;
      this.draw();
    });
  }

  /** Read the cards and draw them. */
  async poll(signal) {
    this.cards = (await sendForJson("v1/adapters", { signal })).data;
    this.draw();
    this.onCards(this.cards);
  }

  draw() {
    if (this.cards === null) return;
    const filter = byId("filter").value.trim().toLowerCase();
    const matching = this.cards
      .filter((card) => `${card.id}\n${card.root}`.toLowerCase().includes(filter))
      .sort(ORDERS[byId("order").value]);
    const shown = this.isWhole ? matching : matching.slice(0, FIRST_ROWS);
    this.drawRows(shown);
    byId("adapters-frame").hidden = shown.length === 0;
    byId("adapters-more").hidden = shown.length === matching.length;
    setText(byId("show-all"), `Show all ${count(matching.length)}`);
    this.drawWords(filter, matching.length);
  }

  drawRows(shown) {
    const names = new Set(shown.map((card) => card.id));
    for (const [name, row] of this.rows) {
      if (!names.has(name)) {
        row.node.remove();
        this.rows.delete(name);
      }
    }
    const focused = document.activeElement;
    let before = null;
    for (const card of shown) {
      if (!this.rows.has(card.id)) this.rows.set(card.id, new Row(this, card));
      const row = this.rows.get(card.id);
      row.update(card);
      const place = before === null ? byId("adapter-rows").firstChild : before.nextSibling;
      if (place !== row.node) byId("adapter-rows").insertBefore(row.node, place);
      before = row.node;
    }
    // A row that was moved has lost the focus inside it.
    if (focused !== document.activeElement && focused.isConnected) {
      focused.focus({ preventScroll: true });
    }
  }

  drawWords(filter, numMatching) {
    const total = this.cards.length;
    const all = plural(total, "adapter");
    setText(byId("adapters-count"), filter ? `${count(numMatching)} of ${all}` : all);
    const empty = byId("adapters-empty");
    empty.hidden = numMatching > 0;
    setText(
      empty,
      total === 0
        ? "No adapter is served yet. Load one here, or name it at the start: --lora-modules NAME=PATH."
        : `No name or path contains “${filter}”.`,
    );
  }

  /** Do something to an adapter, say what came of it, and read the cards again. */
  async act(work, message) {
    const notice = byId("adapters-notice");
    notify(notice);
    try {
      await work();
      notify(notice, { message });
    } catch (error) {
      notifyError(notice, error);
    }
    await this.poll().catch((error) => notifyError(notice, error));
  }

  /** Put the focus on a row's first button, or on the filter when there is no row. */
  focusNear(idx) {
    const rows = [...byId("adapter-rows").children];
    const row = rows[Math.min(idx, rows.length - 1)];
    (row?.querySelector(".actions button") ?? byId("filter")).focus();
  }
}

class Row {
  constructor(table, card) {
    this.table = table;
    this.name = card.id;
    this.isBusy = false;
    this.path = el("span", { class: "path" });
    this.residency = el("span", { class: "residency" });
    this.flags = el("span", { class: "flags" });
    this.rank = el("span", {});
    this.size = el("span", {});
    this.digest = el("button", { type: "button", class: "digest", onclick: () => this.copy() });
    [this.hits, this.running, this.waiting] = [el("span", {}), el("span", {}), el("span", {})];
    const button = (onclick) => el("button", { type: "button", onclick });
    this.pin = button(() => this.togglePin());
    this.unload = button(() => this.askUnload());
    setText(this.unload, "Unload");
    setAttribute(this.unload, "aria-label", `Unload ${this.name}`);
    this.node = this.build();
  }

  build() {
    const cell = (label, className, ...parts) =>
      el("td", { role: "cell", class: className, "data-label": label }, ...parts);
    return el(
      "tr",
      { role: "row", "data-adapter": this.name },
      el(
        "th",
        { role: "rowheader", scope: "row", class: "name" },
        el("span", { class: "name-text" }, this.name),
        this.path,
      ),
      cell("Residency", "", this.residency),
      cell("Flags", "flags-cell", this.flags),
      cell("Rank", "number", this.rank),
      cell("Size", "number", this.size),
      cell("Digest", "digest-cell", this.digest),
      cell("Hits", "number", this.hits),
      cell("Running", "number", this.running),
      cell("Waiting", "number", this.waiting),
      cell("", "actions", this.pin, this.unload),
    );
  }

  update(card) {
    const { lora } = card;
    this.card = card;
    setText(this.path, card.root);
    setAttribute(this.path, "title", card.root);
    setText(this.residency, lora.residency);
    setAttribute(this.residency, "data-tier", lora.residency);
    setText(this.rank, count(lora.rank));
    setText(this.size, bytes(lora.bytes).join(" "));
    setAttribute(this.size, "title", `${count(lora.bytes)} bytes`);
    setText(this.digest, lora.digest.slice(0, DIGEST_CHARS));
    setAttribute(this.digest, "title", `Copy ${lora.digest}`);
    setAttribute(this.digest, "aria-label", `Copy digest ${lora.digest.slice(0, DIGEST_CHARS)}`);
    this.drawCount(this.hits, lora.hits);
    this.drawCount(this.running, lora.running);
    this.drawCount(this.waiting, lora.waiting);
    this.drawFlags(lora.pinned, card.effect ?? lora.effect);
    if (!this.isBusy) this.drawPin();
  }

  drawCount(node, value) {
    setText(node, value === undefined ? "–" : count(value));
    node.classList.toggle("zero", !value);
  }

  drawFlags(isPinned, effect) {
    const flags = [];
    if (isPinned) flags.push(["pinned", "pinned", "Never leaves its slot."]);
    if (effect?.is_weak) {
      flags.push(["weak", "weak effect", weaknessOf(effect)]);
    }
    const state = flags.map(([kind]) => kind).join(" ");
    if (this.flags.dataset.state === state && this.flags.childNodes.length > 0) return;
    this.flags.dataset.state = state;
    const badges = flags.map(([kind, text, title]) =>
      el("span", { class: `badge badge-${kind}`, title }, text),
    );
    this.flags.replaceChildren(...(badges.length ? badges : [el("span", { class: "zero" }, "–")]));
  }

  drawPin() {
    const verb = this.card.lora.pinned ? "Unpin" : "Pin";
    setText(this.pin, verb);
    setAttribute(this.pin, "aria-label", `${verb} ${this.name}`);
  }

  async togglePin() {
    if (this.isBusy) return;
    const verb = this.card.lora.pinned ? "unpin" : "pin";
    await this.whileBusy(this.pin, async () => {
      const path = `v1/adapters/${encodeURIComponent(this.name)}/${verb}`;
      await this.table.act(() => send(path, { body: {} }), `${this.name} is ${verb}ned.`);
    });
    this.drawPin();
  }

  async askUnload() {
    if (this.isBusy || !(await isConfirmed(this.name))) return;
    const idx = [...this.node.parentNode.children].indexOf(this.node);
    const body = { lora_name: this.name };
    const work = () => send("v1/unload_lora_adapter", { body });
    await this.whileBusy(this.unload, () => this.table.act(work, `${this.name} is unloaded.`));
    if (!this.node.isConnected) this.table.focusNear(idx);
  }

  /** Mark a button as at work. It stays focusable, so that the keyboard does not lose its place. */
  async whileBusy(button, work) {
    this.isBusy = true;
    setAttribute(button, "aria-disabled", "true");
    try {
      await work();
    } finally {
      this.isBusy = false;
      button.removeAttribute("aria-disabled");
    }
  }

  async copy() {
    const { digest } = this.card.lora;
    const isCopied = await copyText(digest);
    const message = isCopied
      ? `The digest of ${this.name} is copied: ${digest}`
      : `The digest of ${this.name} is ${digest}`;
    notify(byId("adapters-notice"), { message });
  }
}

/** Say what the probe showed. */
function weaknessOf({ logit_shift: shift }) {
  const measured = shift ? ` They move by ${shift.max.toPrecision(2)} at most.` : "";
  return `It hardly moves the base's answers to the probe.${measured}`;
}

function requests(card) {
  return (card.lora.running ?? 0) + (card.lora.waiting ?? 0);
}

/** Ask before a name is taken away from its callers. */
function isConfirmed(name) {
  const dialog = byId("unload-dialog");
  setText(byId("unload-title"), `Unload ${name}?`);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "unload"), { once: true });
  });
}

/** Copy a text; say whether that worked. Outside https and localhost there is no clipboard API. */
async function copyText(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(
      () => true,
      () => false,
    );
  }
  const before = document.activeElement;
  const area = el("textarea", { class: "unseen", readonly: true });
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  before?.focus();
  return isCopied;
}
