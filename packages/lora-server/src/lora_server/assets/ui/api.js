// Talks to the server this page came from, with the key the user entered.

const ROOT = new URL("../", import.meta.url);
const KEY_NAME = "lora-server.api-key";
const UNREACHABLE = "The server cannot be reached.";

/** A request that was refused, or that found nobody. */
export class ApiError extends Error {
  constructor({ status = 0, message = UNREACHABLE, details = [] } = {}) {
    super(message);
    this.status = status;
    this.details = details;
  }

  /** Make it of the server's `error` object. */
  static from(status, error) {
    const details = Array.isArray(error.details) ? error.details.map(String) : [];
    return new ApiError({ status, message: String(error.message ?? `status ${status}`), details });
  }
}

/** The key of this tab, or "". It is in no other storage. */
export function storedKey() {
  return sessionStorage.getItem(KEY_NAME) ?? "";
}

/** Keep a key for this tab; "" forgets it. */
export function storeKey(key) {
  if (key) sessionStorage.setItem(KEY_NAME, key);
  else sessionStorage.removeItem(KEY_NAME);
}

/**
 * Send a request and return its reply; throw an `ApiError` unless it succeeded.
 *
 * The page asks for a key when one is missing or refused, unless `asksForKey` is false.
 */
export async function send(path, { body, signal, asksForKey = true } = {}) {
  const headers = {};
  const key = storedKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const options = { method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store" };
  if (body !== undefined) options.body = JSON.stringify(body);
  let reply;
  try {
    reply = await fetch(new URL(path, ROOT), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError();
  }
  if (!reply.ok) throw await refusal(reply, asksForKey);
  return reply;
}

/** Send a request and return the JSON of its reply. */
export async function sendForJson(path, options) {
  return (await send(path, options)).json();
}

/** Yield the events of a streamed reply; throw if it ends before its end mark. */
export async function* eventsOf(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError({ message: "The connection ended before the answer did." });
      rest += value;
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw ApiError.from(reply.status, event.error);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function refusal(reply, asksForKey) {
  let error = {};
  try {
    error = (await reply.json()).error ?? {};
  } catch {
    error = { message: `The server answered ${reply.status} ${reply.statusText}`.trim() };
  }
  if (reply.status === 401 && asksForKey) {
    document.dispatchEvent(new CustomEvent("key-needed", { detail: error.message }));
  }
  return ApiError.from(reply.status, error);
}
