// Which page is shown, the recent queries and the pool.
import { $, json, made, note, openTrace, seconds, shown, useKey } from "./asking.js";
import { showQuery } from "./query.js";
import { forgetModels, showTry } from "./try.js";

const cell = (text, kind = "") => made("td", { className: kind }, text);
const rows = (where, list) => $(where).replaceChildren(...list.map((cells) => made("tr", {}, ...cells)));
const time = (unix) => new Date(unix * 1000).toLocaleTimeString();

function meter(share) {
  if (share === null) return cell("");
  const bar = made("meter", { value: share });
  bar.setAttribute("aria-label", "KV cache in use");
  const found = cell((100 * share).toFixed(0) + " % ");
  found.append(bar);
  return found;
}

function link(query) {
  const to = made("a", { href: "#trace", textContent: query.id });
  to.addEventListener("click", (event) => { event.preventDefault(); openTrace(query.id); });
  return made("td", {}, to);
}

async function showRecent() {
  const [found, waiting] = await Promise.all([json("/v1/activity"), json("/v1/queries?status=waiting")]);
  $("waiting").hidden = waiting.data.length === 0;
  rows("waiting-queries", waiting.data.map((q) => [
    made("td", {}, made("a", { href: "#query/" + q.id, textContent: q.id })), cell(q.app), cell(time(q.created)),
    cell((q.waiting.interrupts.map((one) => shown(one.value)).join("; ") || "to be told to go on").slice(0, 80)),
  ]));
  $("no-queries").hidden = found.data.length > 0;
  rows("queries", found.data.map((q) => [
    link(q), cell(q.app), cell(q.status, q.status), cell(time(q.began)),
    cell(seconds(q.seconds), q.within_goal === false ? "n late" : "n"), cell(seconds(q.goal), "n"),
    cell(Object.entries(q.models).map(([name, count]) => name + (count > 1 ? " × " + count : "")).join(", ")),
  ]));
}

async function showPool() {
  const found = await json("/pages/pool");
  $("figures").replaceChildren(...Object.entries(found.figures).map(([name, value]) =>
    made("div", {}, made("dt", { textContent: name }), made("dd", { textContent: value }))));
  rows("engines", found.engines.map((e) => [cell(e.name), cell(e.model), cell(e.requests ?? "", "n"), meter(e.kv_used)]));
  rows("apps", found.apps.map((a) => [
    cell(a.app), cell(a.accepted, "n"), cell(a.refused, "n"), cell(a.answered, "n"), cell(a.within_goal, "n"),
  ]));
}

const shows = { recent: showRecent, pool: showPool, try: showTry, query: showQuery };

async function show() {
  const [wanted, ...more] = decodeURIComponent(location.hash.slice(1)).split("/");
  if (wanted === "main") return;
  const page = wanted in shows && (wanted !== "query" || more.length) ? wanted : "recent";
  for (const name of Object.keys(shows)) $(name).hidden = name !== page;
  for (const to of document.querySelectorAll("nav a")) {
    if (to.hash === "#" + page) to.setAttribute("aria-current", "page");
    else to.removeAttribute("aria-current");
  }
  await shows[page](more.join("/"));
}

let failing = false;

async function turned() {
  note("");
  await again();
}

// What somebody is told of what they did stays; what could not be shown is forgotten once it can.
async function again() {
  try {
    await show();
    if (failing) note("");
    failing = false;
  } catch (error) {
    note(error.message);
    failing = true;
  }
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value.trim());
  $("key").value = "";
  $("key-form").hidden = true;
  forgetModels();
  turned();
});
window.addEventListener("hashchange", () => { turned(); $("main").focus(); });
setInterval(() => { if (!document.hidden && $("try").hidden) again(); }, 2000);
turned();
