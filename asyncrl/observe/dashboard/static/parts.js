"use strict";
// Small parts of the page. Everything of a run is put in as text and never parsed.

const DARK = matchMedia("(prefers-color-scheme: dark)").matches;
const DIM = DARK ? "#98a0ae" : "#646b78";
const RUN_COLOURS = ["#2f6fde", "#e0662f", "#1f9d66", "#9a5bd1", "#d64598", "#8a8f00"];
const VERSION_COLOURS = ["#8fb4e3", "#b7a3d9", "#9fd0b5", "#f0c987", "#e8a3a3", "#9ad2e0"];
const PHASES = {
  wait_for_batch: ["waits for rollouts", "#d9534f"],
  switch: ["waits for servers to leave", "#7fb8c9"],
  train: ["trains", "#3b6fb6"],
  publish: ["publishes weights", "#e0a030"],
  memory_checkpoint: ["keeps the step", "#8a8f98"],
  wait_eval: ["waits for an evaluation", "#a05fb5"],
  other: ["rest", "#b9bec6"],
};

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

function card(width, title, sub, ...children) {
  return element("section", { class: `card w${width}` },
    element("h3", {}, title), sub ? element("div", { class: "sub" }, sub) : null, ...children);
}

function table(heads, rows, numeric = []) {
  const kind = (column) => (numeric.includes(column) ? "n" : column === 0 ? "name" : "");
  return element("div", { class: "scroll" }, element("table", {},
    element("tr", {}, heads.map((head, column) => element("th", { class: kind(column) }, head))),
    rows.map((row) => element("tr", {}, row.map((cell, column) => element("td", { class: kind(column) }, cell))))));
}

function number(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  if (value !== 0 && Math.abs(value) < 0.01) return value.toPrecision(2);
  return String(+value.toFixed(digits));
}

function capital(text) { return text.charAt(0).toUpperCase() + text.slice(1); }

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value.toFixed(unit > 2 ? 1 : 0)} ${units[unit]}`;
}

function seconds(value) {
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

function known(values) { return (values || []).filter((value) => value !== null && value !== undefined); }
function last(values) { return known(values).at(-1); }
function mean(values) { const all = known(values); return all.length ? all.reduce((a, b) => a + b, 0) / all.length : 0; }

function tip(event, text) {
  const shown = document.getElementById("tip");
  shown.style.display = text ? "block" : "none";
  if (!text) return;
  shown.textContent = text;
  const left = Math.min(event.clientX + 12, innerWidth - shown.offsetWidth - 8);
  const top = event.clientY + 14 + shown.offsetHeight > innerHeight ? event.clientY - shown.offsetHeight - 8 : event.clientY + 14;
  shown.style.left = `${Math.max(4, left)}px`;
  shown.style.top = `${top}px`;
}
