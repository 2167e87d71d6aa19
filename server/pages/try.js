// A page to ask a model or an app: message, documents, settings; the answer as it comes.
import { $, addressOf, events, json, note, openTrace, parsed, post } from "./asking.js";
import { settingsForm } from "./settings.js";

let asking = null, asked = null;
let kinds = {}, takes = {}, settings = () => ({});

export async function showTry() {
  if ($("model").options.length) return;
  const found = (await json("/v1/models")).data.filter((m) => m.kind === "chat" || m.kind === "app");
  found.sort((a, b) => (a.kind === b.kind ? 0 : a.kind === "app" ? -1 : 1));
  kinds = Object.fromEntries(found.map((m) => [m.id, m.kind]));
  $("model").replaceChildren(...found.map((m) => new Option(m.id + (m.description ? ": " + m.description : ""), m.id)));
  await chosen();
}

export const forgetModels = () => $("model").replaceChildren();

// What the chosen one takes: documents, settings, inputs.
async function chosen() {
  const model = $("model").value;
  if (!model) return;
  for (const part of ["upload", "more", "settings"]) $(part).hidden = true;  // what another one took
  takes = {}, settings = () => ({});
  const found = await json("/v1/models/" + model.split("/").map(encodeURIComponent).join("/"));
  if (model !== $("model").value) return;  // another one was chosen meanwhile
  takes = { documents: kinds[model] === "chat" || Boolean(found.documents) };
  $("upload").hidden = !takes.documents;
  if (!takes.documents) $("documents").value = "";
  $("more").hidden = kinds[model] !== "app";
  settings = settingsForm($("settings-fields"), found.settings);
  $("settings").hidden = !$("settings-fields").children.length;
  $("question").placeholder = found.example || "";
}

function submission() {
  const inputs = $("inputs").value.trim(), given = inputs ? parsed(inputs, "The inputs are") : undefined;
  const model = $("model").value, chosenSettings = settings();
  const query = {
    model,
    ...(given !== undefined && kinds[model] === "app" ? { inputs: given } : { input: $("question").value }),
    ...(Object.keys(chosenSettings).length ? { settings: chosenSettings } : {}),
  };
  const files = takes.documents ? [...$("documents").files] : [];
  if (!files.length) return { headers: { "Content-Type": "application/json" }, body: JSON.stringify(query) };
  const form = new FormData();
  form.append("query", JSON.stringify(query));
  for (const file of files) form.append("documents", file, file.name);
  return { body: form };
}

async function ask(event) {
  event.preventDefault();
  if (asking) return;
  if (!$("question").value.trim() && !$("inputs").value.trim()) { note("Write a message first."); return; }
  note("");
  asking = new AbortController();
  asked = null;
  $("send").disabled = true;
  $("stop").disabled = false;
  $("answer").textContent = $("answer-facts").textContent = "";
  $("answer-links").hidden = true;
  const began = performance.now();
  try {
    const options = { method: "POST", signal: asking.signal, ...submission() };
    asked = await json("/v1/queries", options);
    $("answer-page").href = "#query/" + asked.id;
    told(await followed(asking.signal), began);
    $("answer-links").hidden = false;
  } catch (error) {
    note(error.name === "AbortError" ? "Stopped." : error.message);
  } finally {
    asking = null;
    $("send").disabled = false;
    $("stop").disabled = true;
  }
}

async function followed(signal) {
  for await (const [kind, data] of events(asked.id, signal)) {
    if (kind === "running" || kind === "reset") $("answer").textContent = "";
    else if (kind === "delta") $("answer").textContent += data.text;
    else return data;
  }
  throw new Error("The query has no end.");
}

function told(query, began) {
  asked = query;
  if (query.status === "waiting") { location.hash = "query/" + query.id; return; }
  if (query.answer) $("answer").textContent = query.answer.text;
  const taken = ((performance.now() - began) / 1000).toFixed(2) + " s", usage = (query.answer || {}).usage;
  const tokens = usage && usage.total_tokens ? `, ${usage.prompt_tokens} + ${usage.completion_tokens} tokens` : "";
  $("answer-facts").textContent = taken + tokens;
  if (query.error) note(query.error.message);
}

async function stop() {
  if (!asking) return;
  const query = asked;
  asking.abort();
  if (!query) return;
  try { await post(addressOf(query.id) + "/cancel"); } catch (error) { note(error.message); }
}

$("ask").addEventListener("submit", ask);
$("stop").addEventListener("click", stop);
$("model").addEventListener("change", () => chosen().catch((error) => note(error.message)));
$("answer-query").addEventListener("click", (event) => { event.preventDefault(); openTrace(asked.query); });
