"use strict";
// What a page does once it is open: tables sort and filter, what is folded unfolds. Without scripts it still shows every
// row with its numbers, but not what opens below it; so all controls are made here, and none stands where it does nothing.

const DASH = "\u2013";

// What a reader chose, kept by the browser for the next visit of this page, where it allows that.
function kept(key) {
  try {
    return JSON.parse(localStorage.getItem(`equitune ${document.body.dataset.name} ${key}`));
  } catch {
    return null;
  }
}

function keep(key, value) {
  try {
    localStorage.setItem(`equitune ${document.body.dataset.name} ${key}`, JSON.stringify(value));
  } catch { /* the page works as well without */ }
}

// What moves and hides: rows, or the bodies of a grouped table, each a row and what is below it.
function partsOf(table) {
  return table.classList.contains("grouped") ? [...table.tBodies] : [...table.tBodies[0].rows];
}

function cellsOf(part) {
  return (part.rows ? part.rows[0] : part).cells;
}

// The first line of a cell; its second, smaller line is in an element of its own.
function lineOf(cell) {
  return (cell.firstChild?.textContent ?? "").trim();
}

// All its lines, parted by blanks: a word of one line never runs into the next.
function textOf(cell) {
  return [...cell.childNodes].map(node => node.textContent).join(" ");
}

// What a cell sorts by: the number behind it, else its text. Null is what is absent, which comes last either way.
function keyOf(cell) {
  const text = cell.dataset.value ?? lineOf(cell);
  if (text === "" || text === DASH || cell.classList.contains("failed")) return null;
  const number = Number(text.replace(/[,%\u00d7]/g, ""));
  return Number.isNaN(number) ? text : number;
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  // A column may hold both (a knob's "none" beside 2): numbers first.
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return a.localeCompare(b, "en");
}

function sortBy(head, up) {
  const table = head.closest("table");
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const keyed = partsOf(table).map(part => ({ part, key: keyOf(cellsOf(part)[head.cellIndex]) }));
  keyed.sort((a, b) => (a.key === null) - (b.key === null)
    || (a.key === null ? 0 : (up ? 1 : -1) * compare(a.key, b.key)));
  const parent = table.classList.contains("grouped") ? table : table.tBodies[0];
  parent.append(...keyed.map(({ part }) => part));
}

function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// A box for words, all of which a row must have, and a choice a column that the page marked.
function addFilter(table) {
  const parts = partsOf(table), caption = table.caption.textContent;
  const texts = parts.map(part => [...cellsOf(part)].map(textOf).join(" ").toLowerCase());
  const words = element("input", { type: "search", placeholder: "words in a row", ariaLabel: `Filter: ${caption}` });
  const shown = element("output", {});
  const choices = [];
  for (const head of table.querySelectorAll(":scope > thead th[data-filter]")) {
    const lines = parts.map(part => lineOf(cellsOf(part)[head.cellIndex]));
    const values = [...new Set(lines)].sort((a, b) => a.localeCompare(b, "en"));
    if (values.length < 2) continue;
    const name = head.dataset.filter;
    const select = element("select", { ariaLabel: `${name}: ${caption}` }, new Option(`${name}: all`, ""),
      ...values.map(value => new Option(value, value)));
    choices.push({ select, lines });
  }
  const apply = () => {
    const needed = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    parts.forEach((part, index) => {
      const kept = needed.every(word => texts[index].includes(word))
        && choices.every(({ select, lines }) => select.value === "" || lines[index] === select.value);
      part.hidden = !kept;
      count += kept;
    });
    shown.textContent = count === parts.length ? `${count} rows` : `${count} of ${parts.length} rows`;
    bar.classList.toggle("narrowed", count < parts.length);
  };
  const bar = element("div", { className: "filter" }, words, ...choices.map(({ select }) => select), shown);
  bar.addEventListener("input", apply);
  apply();
  table.closest(".scroll").before(bar);
}

// What is opened seldom is long, so it stands in files beside the page: scripts that hand it over to these functions.
const parts = new Map(), sources = new Map(), files = new Map();
function details(content) {
  for (const [key, markup] of Object.entries(content)) parts.set(key, markup);
}

function source(name, lines) {
  sources.set(name, lines.join("\n"));
}

function load(file) {
  if (!files.has(file)) files.set(file, new Promise((resolve, reject) => {
    const missing = () => reject(new Error(`the file ${file} is not beside this page`));
    document.head.append(element("script", { src: file, onload: resolve, onerror: missing }));
  }));
  return files.get(file);
}

async function partOf(key) {
  await load(`${document.body.dataset.name}.details.js`);
  return parts.get(key);
}

async function sourceOf(name) {
  await load(`${document.body.dataset.name}.sources/${name}.js`);
  return sources.get(name);
}

async function unfold(details) {
  const told = error => `It cannot unfold: ${error.message}`;
  if (details.dataset.source) {
    const code = details.querySelector("code");
    code.textContent = await sourceOf(details.dataset.source).catch(told);
  }
  for (const place of details.querySelectorAll("[data-part]")) {
    const made = document.createElement("template");
    try {
      made.innerHTML = await partOf(place.dataset.part);
      enliven(made.content);
      place.replaceWith(made.content);
    } catch (error) {
      place.textContent = told(error);
      delete place.dataset.part;
    }
  }
}

// A control per axis of what can be picked: later ones offer what earlier ones leave. The page shows the first row.
function addPicker(picker) {
  const name = picker.dataset.rows, { axes, first, rows } = JSON.parse(document.getElementById(name).textContent);
  const which = picker.querySelector(".which"), shown = picker.querySelector(".chosen");
  const last = kept(name), chosen = [...(last?.length === axes.length ? last : rows[first])];
  const selects = axes.map(() => element("select", {}));
  const fill = () => {
    let fitting = rows;
    selects.forEach((select, n) => {
      const values = [...new Set(fitting.map(row => row[n]))];
      if (!values.includes(chosen[n])) chosen[n] = values[0];
      select.replaceChildren(...values.map(value => new Option(value, value, false, value === chosen[n])));
      select.disabled = values.length < 2;
      fitting = fitting.filter(row => row[n] === chosen[n]);
    });
    return fitting[0];
  };
  let row = fill();
  const show = async () => {
    const picked = row;
    shown.ariaBusy = "true";
    const markup = await partOf(`${name}-${rows.indexOf(picked)}`).catch(error => element("p", {}, error.message).outerHTML);
    if (picked !== row) return; // another one was picked meanwhile
    const open = shown.querySelector("details")?.open;
    shown.innerHTML = markup;
    if (open && shown.querySelector("details")) shown.querySelector("details").open = true;
    which.textContent = chosen.join(" \u00b7 ");
    shown.ariaBusy = "false";
  };
  selects.forEach((select, n) => select.addEventListener("change", () => {
    chosen[n] = select.value;
    row = fill();
    keep(name, chosen);
    show();
  }));
  const labels = axes.map((title, n) => element("label", {}, title, selects[n]));
  which.before(element("div", { className: "controls" }, ...labels));
  which.hidden = true;
  if (row !== rows[first]) show();
}

// Opens what holds the target of a link.
function reveal(name) {
  const target = document.getElementById(name);
  for (let part = target?.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
}

function enliven(root) {
  for (const table of root.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells], key = `sorted ${table.caption.textContent}`, last = kept(key);
    if (heads[last?.[0]]) sortBy(heads[last[0]], last[1]);
    for (const head of heads) head.querySelector("button")?.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      sortBy(head, up);
      keep(key, [head.cellIndex, up]);
    });
  }
  for (const table of root.querySelectorAll("table.filtered")) addFilter(table);
  for (const place of root.querySelectorAll("[data-part], details[data-source]")) {
    const details = place.closest("details");
    details.addEventListener("toggle", () => unfold(details), { once: true });
  }
}

enliven(document);
document.querySelectorAll(".picker").forEach(addPicker);
for (const link of document.querySelectorAll("nav a")) link.addEventListener("click", () => reveal(link.hash.slice(1)));
reveal(location.hash.slice(1));
