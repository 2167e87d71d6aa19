"use strict";
// No answer of a model is ever put into the page as markup: text only.
const $ = (id) => document.getElementById(id);
const pages = ["recent", "pool", "try"];
let key = sessionStorage.getItem("teola-key") || "";
let asking = null, asked = "";

async function api(path, options = {}) {
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

function note(text) { $("note").textContent = text; }

function cell(text, kind) {
  const made = document.createElement("td");
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function rows(where, list) {
  $(where).replaceChildren(...list.map((cells) => {
    const row = document.createElement("tr");
    row.append(...cells);
    return row;
  }));
}

function meter(share) {
  const made = cell(share === null ? "" : (100 * share).toFixed(0) + " % ");
  if (share !== null) {
    const bar = document.createElement("meter");
    bar.value = share;
    bar.setAttribute("aria-label", "KV cache in use");
    made.append(bar);
  }
  return made;
}

const seconds = (value) => (value === null || value === undefined ? "" : value.toFixed(value < 10 ? 3 : 1));

function link(query) {
  const made = document.createElement("td");
  const to = document.createElement("a");
  to.href = "#trace";
  to.textContent = query.id;
  to.addEventListener("click", (event) => { event.preventDefault(); open(query.id); });
  made.append(to);
  return made;
}

async function open(id) {
  try {
    const ticket = await (await api("/pages/tickets/" + encodeURIComponent(id), { method: "POST" })).json();
    location.assign(ticket.url);
  } catch (error) { note(error.message); }
}

async function showRecent() {
  const found = (await (await api("/v1/activity")).json()).data;
  $("no-queries").hidden = found.length > 0;
  rows("queries", found.map((q) => [
    link(q), cell(q.app), cell(q.status, q.status), cell(new Date(q.began * 1000).toLocaleTimeString()),
    cell(seconds(q.seconds), q.within_goal === false ? "n late" : "n"), cell(seconds(q.goal), "n"),
    cell(Object.entries(q.models).map(([name, count]) => name + (count > 1 ? " × " + count : "")).join(", ")),
  ]));
}

async function showPool() {
  const found = await (await api("/pages/pool")).json();
  $("figures").replaceChildren(...Object.entries(found.figures).map(([name, value]) => {
    const tile = document.createElement("div");
    const term = document.createElement("dt"), told = document.createElement("dd");
    term.textContent = name;
    told.textContent = value;
    tile.append(term, told);
    return tile;
  }));
  rows("engines", found.engines.map((e) => [
    cell(e.name), cell(e.model), cell(e.requests ?? "", "n"), meter(e.kv_used),
  ]));
  rows("apps", found.apps.map((a) => [
    cell(a.app), cell(a.accepted, "n"), cell(a.refused, "n"), cell(a.answered, "n"), cell(a.within_goal, "n"),
  ]));
}

async function showTry() {
  if ($("model").options.length) return;
  const found = (await (await api("/v1/models")).json()).data.filter((m) => m.kind === "chat" || m.kind === "app");
  found.sort((a, b) => (a.kind === b.kind ? 0 : a.kind === "app" ? -1 : 1));
  $("model").replaceChildren(...found.map((m) => new Option(m.id + (m.description ? ": " + m.description : ""), m.id)));
}

async function ask(event) {
  event.preventDefault();
  if (asking) return;
  asking = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  $("answer").textContent = "";
  $("answer-facts").textContent = "";
  $("answer-query").hidden = true;
  const began = performance.now();
  try {
    const body = {
      model: $("model").value, stream: true, stream_options: { include_usage: true },
      messages: [{ role: "user", content: $("question").value }],
    };
    const found = await api("/v1/chat/completions", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: asking.signal,
    });
    asked = found.headers.get("X-Teola-Query") || "";
    await read(found, began);
    $("answer-query").hidden = !asked;
  } catch (error) {
    note(error.name === "AbortError" ? "Stopped." : error.message);
  } finally {
    asking = null;
    $("send").disabled = false;
    $("stop").disabled = true;
  }
}

async function read(found, began) {
  const reader = found.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", usage = null;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage || usage;
      for (const choice of chunk.choices || []) $("answer").textContent += choice.delta.content || "";
    }
  }
  const taken = ((performance.now() - began) / 1000).toFixed(2) + " s";
  const tokens = usage && usage.total_tokens ? `, ${usage.prompt_tokens} + ${usage.completion_tokens} tokens` : "";
  $("answer-facts").textContent = taken + tokens;
}

const shows = { recent: showRecent, pool: showPool, try: showTry };

async function show() {
  const wanted = location.hash.slice(1);
  if (wanted === "main") return;
  const page = pages.includes(wanted) ? wanted : "recent";
  for (const name of pages) $(name).hidden = name !== page;
  for (const to of document.querySelectorAll("nav a")) {
    if (to.hash === "#" + page) to.setAttribute("aria-current", "page");
    else to.removeAttribute("aria-current");
  }
  try {
    await shows[page]();
    if (!asking) note("");
  } catch (error) { note(error.message); }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem("teola-key", key);
  $("key").value = "";
  $("key-form").hidden = true;
  $("model").replaceChildren();
  show();
});
$("ask").addEventListener("submit", ask);
$("answer-query").addEventListener("click", (event) => { event.preventDefault(); open(asked); });
$("stop").addEventListener("click", () => asking && asking.abort());
window.addEventListener("hashchange", () => { show(); $("main").focus(); });
setInterval(() => { if (!document.hidden && $("try").hidden) show(); }, 2000);
show();
