"use strict";
// Hovering a primitive anywhere shows its facts and marks it everywhere.
const facts = JSON.parse(document.getElementById("facts").textContent);
const tip = document.getElementById("tip");
let hot = null;

function mark(element, on) {
  const name = element.dataset.p;
  for (const other of document.querySelectorAll("[data-p]"))
    if (other.dataset.p === name) other.classList.toggle("hot", on);
}

function fill(lines) {
  const title = document.createElement("b"), list = document.createElement("div");
  title.textContent = lines[0][1];
  for (const [key, value] of lines.slice(1)) {
    const k = document.createElement("span"), v = document.createElement("em");
    k.textContent = key;
    v.textContent = value;
    list.append(k, v);
  }
  tip.replaceChildren(title, list);
}

function move(event) {
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - 12 - box.width : event.clientX + 16;
  const top = Math.min(event.clientY + 16, innerHeight - box.height - 8);
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, top) + "px";
}

function show(event) {
  const found = event.target.closest("[data-p]");
  if (found !== hot) {
    if (hot) mark(hot, false);
    hot = found;
    tip.hidden = !found || !facts[found.dataset.k];
    if (found) mark(found, true);
    if (!tip.hidden) fill(facts[found.dataset.k]);
  }
  if (!tip.hidden) move(event);
}

document.addEventListener("mousemove", show);
document.addEventListener("click", show); // a tap
