// What all pages share: requests with the tab's key, text put into the page (never as markup), pages of queries.
export const $ = (id) => document.getElementById(id);
let key = sessionStorage.getItem("teola-key") || "";

export function useKey(given) {
  key = given;
  sessionStorage.setItem("teola-key", key);
}

export async function api(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (key) headers.Authorization = "Bearer " + key;
  const found = await fetch(path, { ...options, headers });
  if (found.status === 401) $("key-form").hidden = false;
  if (!found.ok) {
    let told = found.statusText;
    try { told = (await found.json()).error.message; } catch { /* no JSON */ }
    throw new Error(told);
  }
  return found;
}

export const json = async (path, options) => (await api(path, options)).json();
export const post = (path, body) => json(path, {
  method: "POST", ...(body === undefined ? {} : { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }),
});
export const addressOf = (id) => "/v1/queries/" + encodeURIComponent(id);

export function note(text) { $("note").textContent = text; }

// An element with properties and children; texts stay texts.
export function made(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));
export const seconds = (value) => (value === null || value === undefined ? "" : value.toFixed(value < 10 ? 3 : 1));

export function parsed(text, what) {
  try { return JSON.parse(text); } catch { throw new Error(what + " no JSON."); }
}

// The page of what happened to a query, by a ticket: browsers send no key when they follow a link.
export async function openTrace(id) {
  try {
    location.assign((await post("/pages/tickets/" + encodeURIComponent(id))).url);
  } catch (error) { note(error.message); }
}

const ENDS = ["done", "failed", "cancelled", "interrupted", "waiting"];
const TRIES = 5;

// What happens to a submitted query, as [kind, data], until it rests; goes on where a connection broke.
export async function* events(id, signal) {
  let last = "";
  for (let broken = 0; ; broken += 1) {
    try {
      const headers = last ? { "Last-Event-ID": last } : {};
      for await (const event of lines(await api(addressOf(id) + "/events", { headers, signal }))) {
        last = event.id;
        yield [event.event, JSON.parse(event.data)];
        if (ENDS.includes(event.event)) return;
      }
    } catch (error) {
      if (!(error instanceof TypeError) || broken >= TRIES) throw error;  // a TypeError: the network, not the server
    }
    if (broken >= TRIES) throw new Error("The connection to the server was lost.");
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

async function* lines(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", event = {};
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const complete = (rest + value).split(/\r\n|\n|\r(?!$)/);  // a CR at the end may be half of a CRLF
    rest = complete.pop();
    for (const line of complete) {
      if (line) {
        const [, field, text] = line.match(/^([^:]*):? ?(.*)$/s);
        event[field] = field === "data" && "data" in event ? event.data + "\n" + text : text;
        continue;
      }
      if ("data" in event) yield event;
      event = {};
    }
  }
}
