// One submitted query: how it is, its answer, and a form where it waits for somebody.
import { $, addressOf, json, made, note, openTrace, parsed, post, seconds, shown } from "./asking.js";

let id = "", query = null, form = "";

export async function showQuery(wanted) {
  if (wanted !== id) { query = null; form = ""; $("query-form").replaceChildren(); }
  id = wanted;
  if (query && over(query)) return;
  const found = await json(addressOf(id));
  if (wanted === id) show(found);
}

const over = (one) => ["done", "failed", "cancelled", "interrupted"].includes(one.status);

function show(found) {
  query = found;
  $("query-title").textContent = "Query " + query.id;
  const facts = {
    "app": query.app, "status": query.status, "submitted": new Date(query.created * 1000).toLocaleString(),
    "seconds": seconds(query.seconds), "goal": seconds(query.goal),
  };
  $("query-facts").replaceChildren(...Object.entries(facts).filter(([, value]) => value !== "").map(([name, value]) =>
    made("div", {}, made("dt", { textContent: name }), made("dd", { textContent: value, className: name === "status" ? value : "" }))));
  $("query-trace").hidden = query.status === "queued" || query.status === "running";
  $("query-cancel").hidden = over(query);
  told();
  questions();
}

function told() {
  const answer = query.answer || {}, sources = Array.isArray(answer.sources) ? answer.sources : [];
  $("query-answer").hidden = !query.answer && !query.error;
  $("query-text").textContent = query.error ? query.error.message : answer.text || "";
  $("query-text").className = query.error ? "failed" : "";
  $("query-sources").replaceChildren(...sources.map((one, at) =>
    made("details", {}, made("summary", { textContent: "Source " + (at + 1) }), made("pre", { textContent: shown(one.text || one) }))));
}

// The form is made once for each stop: what somebody has begun to write stays.
function questions() {
  const stop = query.status === "waiting" ? query.waiting.at + JSON.stringify(query.waiting.interrupts) : "";
  if (stop === form) return;
  form = stop;
  const asked = stop ? query.waiting.interrupts : [];
  $("query-waiting").hidden = !stop;
  $("query-leave").hidden = asked.length > 0;
  $("query-form").replaceChildren(...asked.map(question), made("div", {}, made("button", {
    id: "query-send", textContent: asked.length ? "Answer" : "Go on",
  })));
}

function question(one, at) {
  const label = `Answer${query.waiting.interrupts.length > 1 ? " " + (at + 1) : ""}`;
  return made("fieldset", { className: "question" }, made("legend", { textContent: "It asks" }),
    made("pre", { textContent: shown(one.value) }),
    made("label", { htmlFor: "reply-" + at, textContent: label }),
    made("textarea", { id: "reply-" + at, rows: 3, spellcheck: true }),
    made("label", { className: "beside" }, made("input", { id: "json-" + at, type: "checkbox" }), " The answer is JSON"));
}

// The value that the API is told: of one question its answer, of several an object by their ids, of none nothing.
function value() {
  const asked = query.waiting.interrupts;
  const replies = asked.map((one, at) => [one.id, $("reply-" + at).value, $("json-" + at).checked]).filter(([, text]) => text.trim());
  if (asked.length && !replies.length) throw new Error("Write an answer first.");
  const read = replies.map(([name, text, is]) => [name, is ? parsed(text, "The answer is") : text]);
  return asked.length > 1 ? Object.fromEntries(read) : asked.length ? read[0][1] : undefined;
}

async function answer(event) {
  event.preventDefault();
  try {
    const given = value();
    $("query-send").disabled = true;
    const found = await post(addressOf(id) + "/resume", given === undefined ? {} : { value: given });
    note("");
    show(found);
    $("main").focus();
  } catch (error) {
    note(error.message);
    if ($("query-send")) $("query-send").disabled = false;
  }
}

async function cancel() {
  try { show(await post(addressOf(id) + "/cancel")); } catch (error) { note(error.message); }
}

$("query-form").addEventListener("submit", answer);
$("query-cancel").addEventListener("click", cancel);
$("query-trace").addEventListener("click", (event) => { event.preventDefault(); openTrace(query.query); });
