// Elements and their texts. Text is always set as text, never as markup.

/** Return the element with an id; the page is wrong without it. */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`no element #${id}`);
  return found;
}

/** Make an element: attributes by name, listeners as functions under `onclick` and the like. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Set a text only when it changed, so that a selection or a screen reader is left in peace. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Set an attribute only when it changed. */
export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/** Show what came of an action: a sentence, and the server's list of reasons under it. */
export function notify(node, { kind = "good", message = "", details = [] } = {}) {
  node.dataset.kind = message ? kind : "";
  const rest = details.filter((detail) => detail !== message);
  const list = rest.length ? [el("ul", {}, ...rest.map((text) => el("li", {}, text)))] : [];
  node.replaceChildren(...(message ? [el("p", {}, message), ...list] : []));
}

/** Show an error in the same place. */
export function notifyError(node, error) {
  notify(node, { kind: "bad", message: error.message, details: error.details ?? [] });
}
