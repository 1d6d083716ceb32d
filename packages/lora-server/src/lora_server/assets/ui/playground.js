// One prompt to the base and up to three adapters at once, their answers streamed side by side.

import { Answer } from "./answer.js";
import { byId, el, setText } from "./dom.js";

const CHOICES = ["adapter-1", "adapter-2", "adapter-3"];
const NOBODY = "";

/** The form and its answers. */
export class Playground {
  constructor() {
    this.base = null;
    this.names = [];
    this.isUntouched = true;
    this.stopping = null;
    byId("play-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.run();
      }
    });
    byId("stop").addEventListener("click", () => this.stopping?.abort());
    for (const id of CHOICES) {
      byId(id).addEventListener("change", () => {
        this.isUntouched = false;
      });
    }
    this.offer([]);
  }

  /** Offer these adapters; what is chosen stays chosen while it is served. */
  offer(names) {
    if (names.length > 0 && names.join("\n") === this.names.join("\n")) return;
    this.names = names;
    CHOICES.forEach((id, idx) => {
      const select = byId(id);
      const wanted = this.isUntouched ? (names[idx] ?? NOBODY) : select.value;
      const options = names.map((name) => el("option", { value: name }, name));
      select.replaceChildren(el("option", { value: NOBODY }, "none"), ...options);
      select.value = names.includes(wanted) ? wanted : NOBODY;
    });
  }

  /** Ask all of them at once and show what they say. */
  async run() {
    if (this.stopping !== null) return;
    const prompt = byId("prompt").value;
    if (prompt.trim() === "") {
      this.say("There is no prompt yet.");
      byId("prompt").focus();
      return;
    }
    this.stopping = new AbortController();
    byId("run").setAttribute("aria-disabled", "true");
    byId("stop").disabled = false;
    byId("diff-legend").hidden = true;
    const answers = this.chosen().map((choice) => new Answer(choice));
    byId("answers").replaceChildren(...answers.map((answer) => answer.node));
    this.say(`Asking ${answers.map((answer) => answer.title).join(", ")}.`);
    const asked = { ...this.fields(), prompt };
    try {
      await Promise.all(answers.map((answer) => answer.fill(asked, this.stopping.signal)));
    } finally {
      this.finish(answers);
    }
  }

  finish(answers) {
    const [base, ...others] = answers;
    for (const answer of others) answer.compareWith(base);
    byId("diff-legend").hidden = !others.some((answer) => answer.isCompared);
    // The focus would fall out of the page with the button that is switched off.
    if (document.activeElement === byId("stop")) byId("run").focus();
    byId("stop").disabled = true;
    byId("run").removeAttribute("aria-disabled");
    this.stopping = null;
    this.say(answers.map((answer) => answer.summary()).join(" "));
  }

  /** The base, then each chosen adapter once. */
  chosen() {
    const names = CHOICES.map((id) => byId(id).value).filter((name) => name !== NOBODY);
    return [
      { model: this.base, title: "base", isBase: true },
      ...[...new Set(names)].map((name) => ({ model: name, title: name, isBase: false })),
    ];
  }

  fields() {
    return {
      isChat: document.querySelector("input[name=mode]:checked").value === "chat",
      maxTokens: numberIn("max-tokens"),
      temperature: numberIn("temperature"),
    };
  }

  say(text) {
    setText(byId("play-status"), text);
  }
}

/** What a field holds as a number, or undefined when it is empty, which is the server's default. */
function numberIn(id) {
  const { value } = byId(id);
  return value.trim() === "" ? undefined : Number(value);
}
