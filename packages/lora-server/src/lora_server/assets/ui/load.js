// The form that loads an adapter. What is wrong with it is the server's to say.

import { sendForJson } from "./api.js";
import { byId, notify, notifyError } from "./dom.js";
import { bytes } from "./format.js";

/** Connect the form. `onLoaded` is called after a load. */
export function connectLoadForm({ onLoaded }) {
  byId("load-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const submit = byId("load-submit");
    if (submit.getAttribute("aria-disabled")) return;
    submit.setAttribute("aria-disabled", "true");
    notify(byId("load-notice"), { kind: "wait", message: "Loading…" });
    try {
      const card = await sendForJson("v1/load_lora_adapter", { body: bodyOf() });
      notify(byId("load-notice"), { message: described(card) });
      byId("load-form").reset();
      onLoaded();
    } catch (error) {
      notifyError(byId("load-notice"), error);
    } finally {
      submit.removeAttribute("aria-disabled");
    }
  });
}

function bodyOf() {
  return {
    lora_name: byId("load-name").value.trim(),
    lora_path: byId("load-path").value.trim(),
    load_inplace: byId("load-inplace").checked,
    pinned: byId("load-pinned").checked,
  };
}

function described({ id, lora, effect }) {
  const size = bytes(lora.bytes).join(" ");
  const weakness = (effect ?? lora.effect)?.is_weak ? " Its effect is weak." : "";
  return `${id} is loaded: rank ${lora.rank}, ${size}, digest ${lora.digest.slice(0, 12)}.${weakness}`;
}
