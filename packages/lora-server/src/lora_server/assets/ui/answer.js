// One column of the playground: who answered, what it says, and where it differs from the base.

import { eventsOf, send } from "./api.js";
import { compare } from "./diff.js";
import { el, notifyError, setText } from "./dom.js";
import { duration, plural, rate } from "./format.js";

/** One answer, from the request to its last token. */
export class Answer {
  /**
   * @param model name to ask for; null asks for the base
   * @param title what the column is called
   * @param isBase whether the others are compared with it
   */
  constructor({ model, title, isBase }) {
    this.model = model;
    this.title = title;
    this.isBase = isBase;
    this.text = "";
    this.state = "waiting";
    this.isCompared = false;
    this.numDifferent = 0;
    this.heading = el("h3", {}, title);
    this.label = el("p", { class: "answered-by", title: "X-LoRA-Adapter" }, "…");
    this.body = el("div", { class: "answer-text", "aria-busy": "true" });
    this.failure = el("div", { class: "notice", role: "alert" });
    this.foot = el("p", { class: "answer-foot" }, "waiting");
    this.node = el(
      "article",
      { class: isBase ? "answer answer-base" : "answer", "data-model": title },
      el("header", {}, this.heading, this.label),
      this.body,
      this.failure,
      this.foot,
    );
  }

  /** Ask and show the answer as it comes. Never throws: a failure is shown in the column. */
  async fill(asked, signal) {
    const startMs = performance.now();
    this.numTokens = 0;
    try {
      const [path, body] = this.request(asked);
      const reply = await send(path, { body, signal });
      setText(this.label, decoded(reply.headers.get("X-LoRA-Adapter") ?? "unknown"));
      this.state = "answering";
      for await (const event of eventsOf(reply)) this.take(event, startMs);
      this.state = "done";
    } catch (error) {
      this.state = error.name === "AbortError" ? "stopped" : "failed";
      if (this.state === "failed") notifyError(this.failure, error);
      if (this.label.textContent === "…") setText(this.label, "no answer");
    }
    this.body.removeAttribute("aria-busy");
    this.body.classList.toggle("answer-nothing", this.text === "" && this.state === "done");
    setText(this.foot, this.measured(startMs));
  }

  request({ isChat, prompt, maxTokens, temperature }) {
    const body = {
      model: this.model ?? undefined,
      max_tokens: maxTokens,
      temperature,
      stream: true,
      stream_options: { include_usage: true },
    };
    if (!isChat) return ["v1/completions", { ...body, prompt }];
    return ["v1/chat/completions", { ...body, messages: [{ role: "user", content: prompt }] }];
  }

  take(event, startMs) {
    if (event.usage) this.numTokens = event.usage.completion_tokens;
    for (const choice of event.choices) {
      const piece = choice.text ?? choice.delta?.content ?? "";
      if (piece !== "" && this.firstMs === undefined) this.firstMs = performance.now();
      if (piece !== "") {
        this.text += piece;
        this.body.append(piece);
      }
      if (choice.finish_reason) this.finishReason = choice.finish_reason;
    }
    if (this.firstMs !== undefined) {
      setText(this.foot, `first ${duration((this.firstMs - startMs) / 1000).join(" ")}`);
    }
  }

  measured(startMs) {
    const seconds = (performance.now() - (this.firstMs ?? startMs)) / 1000;
    const parts = [];
    if (this.state !== "done") parts.push(this.state);
    if (this.numTokens > 0) parts.push(plural(this.numTokens, "token"));
    if (this.firstMs !== undefined) {
      parts.push(`first ${duration((this.firstMs - startMs) / 1000).join(" ")}`);
    }
    if (this.numTokens > 1 && seconds > 0) parts.push(`${rate((this.numTokens - 1) / seconds)}/s`);
    if (this.finishReason === "length") parts.push("cut at limit");
    return parts.join(" · ");
  }

  /** Mark each word that the base's answer does not have. */
  compareWith(base) {
    if (this.text === "" || base.text === "" || base.state === "failed") return;
    const { entries, hasGapAtEnd } = compare(base.text, this.text);
    const gap = () => el("span", { class: "gap" });
    const nodes = entries.flatMap(({ text, isSame, isAfterGap }) => {
      if (isSame) return isAfterGap ? [gap(), text] : [text];
      // The white space before a word is not part of the mark.
      const word = text.trimStart();
      return [text.slice(0, text.length - word.length), el("mark", {}, word)];
    });
    this.body.replaceChildren(...nodes, ...(hasGapAtEnd ? [gap()] : []));
    this.body.normalize();
    this.isCompared = true;
    this.numDifferent = entries.filter(({ isSame }) => !isSame).length;
    const share = `${this.numDifferent} of ${plural(entries.length, "word")} differ`;
    this.node.querySelector("header").append(el("p", { class: "difference" }, share));
  }

  /** One sentence for those who do not see the columns. */
  summary() {
    if (this.state === "failed") return `${this.title} failed.`;
    const words = this.isCompared ? `, ${plural(this.numDifferent, "word")} unlike the base` : "";
    return `${this.title} ${this.state === "done" ? "answered" : this.state}${words}.`;
  }
}

function decoded(label) {
  try {
    return decodeURIComponent(label);
  } catch {
    return label;
  }
}
