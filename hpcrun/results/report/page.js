"use strict";
// The groups, tables and controls of the page; page.figures.js has the figures. The address's fragment has the state.

const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const DASHES = ["solid", "dash", "dot"];
const GRAY = "#8b939c";
const byId = id => document.getElementById(id);
let data, groups, state;

/** Store a value in the address; null: the default. */
function keep(name, value) {
  if (value === null) state.delete(name); else state.set(name, value);
  history.replaceState(null, "", state.size ? `#${state}` : location.pathname + location.search);
}

// --- Texts and elements ---

/** Return a text for plotly, which reads some HTML and templates such as %{x}. */
const plain = text => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll("%{", "%&#123;");
const decoded = text => String(text).replaceAll("&#123;", "{").replaceAll("&lt;", "<").replaceAll("&amp;", "&");
const shown = value => typeof value === "number" ? String(+value.toPrecision(12)) : String(value);
const words = name => data.names[name] ?? name;
const some = (names, most) => names.slice(0, most).join(", ") + (names.length > most ? ` and ${names.length - most} more` : "");

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return "not finite";
  const size = Math.abs(value);
  if (size && (size >= 1e9 || size < 1e-4)) return value.toExponential(digits - 1);
  return size >= 10 ** digits || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toPrecision(digits);
}

const interval = (middle, half) => half === null ? "–" : `${number(middle - half)} … ${number(middle + half)}`;

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** Return the caption, head and body of a table; a cell is [content, class, tag]. */
function tableParts(caption, head, rows) {
  const cell = ([content, className = "", tag = "td"]) =>
    element(tag, tag === "th" ? { className, scope: "row" } : { className }, content);
  const headCell = name => element("th", { scope: "col" }, element("button", { type: "button" }, name));
  return [
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...head.map(headCell))),
    element("tbody", {}, ...rows.map(cells => element("tr", {}, ...cells.map(cell)))),
  ];
}

// --- Statistics ---

const quantiles = new Map();

/** Return the t that |T| exceeds with a probability of 5%: with t = sqrt(df) tan(a) the density is cos(a)^(df - 1). */
function quantile(df) {
  if (!quantiles.has(df)) {
    const parts = 4000, width = Math.PI / 2 / parts, areas = [0];
    const density = a => Math.cos(a) ** (df - 1);
    for (let a = 0; areas.length <= parts; a = areas.length * width - width) {
      areas.push(areas.at(-1) + width / 6 * (density(a) + 4 * density(a + width / 2) + density(a + width)));
    }
    const wanted = 0.95 * areas[parts], at = areas.findIndex(area => area >= wanted) - 1;
    const rest = wanted - areas[at], start = at * width;
    quantiles.set(df, Math.sqrt(df) * Math.tan(start + rest / density(start + rest / density(start) / 2)));
  }
  return quantiles.get(df);
}

function summary(values) {
  const n = values.length, mean = values.reduce((sum, one) => sum + one, 0) / n;
  if (n < 2) return { n, mean, variance: null, std: null, half: null };
  const variance = values.reduce((sum, one) => sum + (one - mean) ** 2, 0) / (n - 1);
  return { n, mean, variance, std: Math.sqrt(variance), half: quantile(n - 1) * Math.sqrt(variance / n) };
}

/** Return the mean of b - a with half of its interval: over pairs if most runs have one, else Welch's. */
function difference(a, b) {
  const first = new Map(a.counted.map(one => [one.pair, one.value]));
  const changes = b.counted.filter(one => first.has(one.pair)).map(one => one.value - first.get(one.pair));
  if (changes.length > 1 && 2 * changes.length >= Math.min(a.n, b.n)) {
    return { ...summary(changes), over: `${changes.length} pairs` };
  }
  const found = { mean: b.mean - a.mean, half: null, over: "–" };
  if (Math.min(a.n, b.n) < 2) return found;
  const [v, w] = [a.variance / a.n, b.variance / b.n];
  const df = v + w ? (v + w) ** 2 / (v ** 2 / (a.n - 1) + w ** 2 / (b.n - 1)) : 1;
  return { ...found, half: quantile(df) * Math.sqrt(v + w), over: "all runs" };
}

// --- Groups of runs ---

const metric = () => data.metrics.includes(state.get("metric")) ? state.get("metric") : data.metric;
const keys = () => state.has("by") ? data.keys.filter(key => state.getAll("by").includes(key)) : data.by;
const visible = () => groups.filter(group => !group.hidden);

/** Group the runs that the filter leaves, the best mean first. */
function makeGroups() {
  const name = metric(), by = keys(), found = new Map(), sign = data.lower[name] ? 1 : -1;
  const rest = data.pair.filter(key => !by.includes(key));
  for (const row of byId("runs-table").tBodies[0].rows) {
    if (row.hidden) continue;
    const run = data.runs[row.dataset.at];
    const label = by.map(key => `${key}=${shown(run.keys[key])}`).join(" ") || "all runs";
    if (!found.has(label)) found.set(label, { label, runs: [], counted: [] });
    found.get(label).runs.push(run);
    if (!run.counts || run.values[name] === null) continue;
    // Without a seed no other run makes a pair with this run.
    const own = by.includes("seed") || run.keys.seed !== null ? "" : run.name;
    const pair = JSON.stringify([own, ...rest.map(key => run.keys[key])]);
    found.get(label).counted.push({ run, pair, value: run.values[name] });
  }
  groups = [...found.values()].map(group => ({ ...group, ...summary(group.counted.map(one => one.value)) }));
  const place = group => group.n ? sign * group.mean : Infinity;
  groups.sort((a, b) => place(a) - place(b) || a.label.localeCompare(b.label, "en", { numeric: true }));
  groups.forEach((group, at) => {
    const colored = at < COLORS.length * DASHES.length;
    group.color = colored ? COLORS[at % COLORS.length] : GRAY;
    group.dash = colored ? DASHES[Math.floor(at / COLORS.length)] : "solid";
    group.hidden = state.getAll("hide").includes(group.label);
    group.seeds = [...new Set(group.counted.map(one => one.run.keys.seed ?? "none"))].sort((a, b) => a - b);
  });
}

/** Hide the groups with these labels in all figures. */
function hide(labels) {
  state.delete("hide");
  labels.forEach(label => state.append("hide", label));
  keep("brush", null);
  makeGroups();
  showGroups();
  redraw();
}

function toggle(label) {
  const hidden = groups.filter(group => group.hidden).map(group => group.label);
  hide(hidden.includes(label) ? hidden.filter(one => one !== label) : [...hidden, label]);
}

function showGroups() {
  const lower = data.lower[metric()], first = groups[0], table = byId("groups");
  const rows = groups.map((group, at) => {
    const box = element("input", { type: "checkbox", checked: !group.hidden, ariaLabel: `show ${group.label}` });
    box.addEventListener("change", () => toggle(group.label));
    const swatch = element("span", { className: `swatch ${group.dash}` });
    swatch.style.borderColor = group.color;
    const values = group.counted.map(one => one.value), top = lower ? least(values) : most(values);
    const change = at && group.n ? difference(first, group) : { mean: null, half: null, over: "–" };
    return [
      [element("label", {}, box, swatch)], [at + 1, "n"], [group.label, "w", "th"],
      [group.n, "n"], [group.runs.length - group.n, "n"], [number(group.n ? group.mean : null), "n"],
      [interval(group.mean, group.half), "n"], [number(group.std, 2), "n"], [number(change.mean), "n"],
      [interval(change.mean, change.half), "n"], [change.over],
      [group.counted.find(one => one.value === top)?.run.name ?? "–"], [some(group.seeds, 10) || "–"],
    ];
  });
  const head = ["show", "#", "group", "n", "not counted", "mean", "95% interval", "std", "difference", "its interval", "over"];
  const caption = `${words(metric())} by group, the ${lower ? "lowest" : "highest"} mean first`;
  table.replaceChildren(...tableParts(caption, [...head, "best run", "seeds"], rows));
  prepareTable(table);
  showBest(first, groups[1], lower ? 1 : -1);
}

function showBest(first, second, sign) {
  const line = byId("best"), strong = text => element("strong", {}, text);
  if (!first?.n) return line.replaceChildren("No run of this selection counts.");
  const runs = `${first.n} run${first.n > 1 ? "s" : ""}, seed${first.seeds.length > 1 ? "s" : ""} ${some(first.seeds, 10)}`;
  line.replaceChildren("Best: ", strong(first.label), `, mean ${number(first.mean)} (${runs})`);
  if (!second?.n) return line.append(".");
  const { mean, half, over } = difference(first, second);
  const ends = half === null ? "too few runs for an interval" : `95% interval ${interval(sign * mean, half)} over ${over}`;
  if (sign * mean >= 0) return line.append(`: ${number(sign * mean)} better than `, strong(second.label), ` (${ends}).`);
  return line.append(". Over the runs that both have it is ", `${number(-sign * mean)} worse than `, strong(second.label), ` (${ends}).`);
}

const least = values => values.reduce((a, b) => a < b ? a : b, Infinity);
const most = values => values.reduce((a, b) => a > b ? a : b, -Infinity);

// --- Tables ---

const cellValue = cell => cell.dataset.v ?? cell.textContent.trim().replaceAll(",", "");
const asNumber = text => text === "" ? NaN : Number(text);

/** Make a table sort by its heads, and give a long table a filter. */
function prepareTable(table) {
  [...table.tHead.rows[0].cells].forEach((head, column) => head.firstChild.addEventListener("click", () => {
    keep(`sort-${table.id}`, state.get(`sort-${table.id}`) === String(column) ? `-${column}` : String(column));
    sortTable(table);
  }));
  sortTable(table);
  // The controls have the filter of the runs.
  if (["groups", "runs-table"].includes(table.id) || table.tBodies[0].rows.length < 8) return;
  const input = element("input", { type: "search", placeholder: "filter", ariaLabel: `filter ${table.caption.textContent}`, value: state.get(`filter-${table.id}`) ?? "" });
  input.addEventListener("input", () => { keep(`filter-${table.id}`, input.value || null); filterTable(table, input.value); });
  table.closest(".box").before(input);
  filterTable(table, input.value);
}

function sortTable(table) {
  const wanted = state.get(`sort-${table.id}`), heads = [...table.tHead.rows[0].cells];
  const column = wanted === null ? -1 : Math.abs(parseInt(wanted, 10)), down = wanted?.startsWith("-");
  heads.forEach((head, at) => head.setAttribute("aria-sort", at !== column ? "none" : down ? "descending" : "ascending"));
  if (!heads[column]) return;
  const rows = [...table.tBodies[0].rows].map(row => ({ row, text: cellValue(row.cells[column]) }));
  rows.sort((a, b) => {
    const [x, y] = [asNumber(a.text), asNumber(b.text)];
    // Cells without a number are last in both directions.
    if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
    const order = Number.isNaN(x) ? a.text.localeCompare(b.text, "en", { numeric: true }) : x - y;
    return down ? -order : order;
  });
  table.tBodies[0].append(...rows.map(one => one.row));
}

/** Hide the rows without all words; a word such as train.lr>0.001 compares the column of this name. Return the names without a column. */
function filterTable(table, text) {
  const heads = [...table.tHead.rows[0].cells].map(head => head.textContent), unknown = [];
  const tests = text.split(/\s+/).filter(Boolean).map(word => {
    const [, name, sign, wanted] = word.match(/^(.+?)(!=|>=|<=|=|>|<)(.+)$/) ?? [], column = heads.indexOf(name);
    if (column < 0 && name) unknown.push(name);
    if (column < 0) return row => row.textContent.toLowerCase().includes(word.toLowerCase());
    return row => {
      const value = cellValue(row.cells[column]), [a, b] = [asNumber(value), asNumber(wanted)], equal = value === wanted || a === b;
      return { "=": equal, "!=": !equal, ">": a > b, "<": a < b, ">=": a >= b, "<=": a <= b }[sign];
    };
  });
  for (const row of table.tBodies[0].rows) row.hidden = !tests.every(test => test(row));
  return unknown;
}

// --- Page ---

function update() {
  if (data.metric) {
    const unknown = filterTable(byId("runs-table"), state.get("runs") ?? "");
    byId("unknown").textContent = unknown.length ? `The table of runs has no column ${unknown.join(", ")}.` : "";
    makeGroups();
    showGroups();
  }
  redraw();
}

/** Set the controls from the state, and the state from the controls. */
function prepareControls() {
  const fields = [...document.querySelectorAll(".controls input, .controls select")];
  const defaults = { metric: data.metric, x: data.x[0], sx: data.keys[0], smooth: "0" };
  for (const field of fields) {
    if (field.name === "by") field.checked = keys().includes(field.value);
    else field.value = state.get(field.name) ?? defaults[field.name] ?? "";
    if (field.name === "smooth") field.nextElementSibling.value = field.value;
    field.addEventListener(field.matches("select") ? "change" : "input", () => {
      if (field.name === "by") {
        const chosen = fields.filter(one => one.name === "by" && one.checked).map(one => one.value);
        state.delete("by");
        (chosen.length ? chosen : [""]).forEach(key => state.append("by", key));
        keep("hide", null);
      } else {
        keep(field.name, field.value === (defaults[field.name] ?? "") ? null : field.value);
        // Another axis has another range.
        if (field.matches("select")) [...state.keys()].filter(name => name.startsWith("zoom-")).forEach(name => keep(name, null));
      }
      if (field.name === "smooth") field.nextElementSibling.value = field.value;
      update();
    });
  }
  document.querySelectorAll(".controls").forEach(form => form.addEventListener("submit", event => event.preventDefault()));
}

function start() {
  state = new URLSearchParams(location.hash.slice(1));
  data = JSON.parse(byId("data").textContent);
  [...byId("runs-table").tBodies[0].rows].forEach((row, at) => { row.dataset.at = at; });
  document.querySelectorAll("main table:not(#groups)").forEach(prepareTable);
  prepareControls();
  update();
}

/** Replace the content of the page; the state stays. */
function renew(html) {
  const main = byId("main"), top = scrollY;
  document.querySelectorAll(".plot").forEach(plot => Plotly.purge(plot));
  main.innerHTML = main.source = html;
  start();
  scrollTo(0, top);
}

/** Ask the server of `hpcrun report --serve` for the content. */
async function poll() {
  try {
    const answer = await fetch("main", { cache: "no-store" }), text = await answer.text();
    if (!answer.ok) throw new Error(text);
    byId("read").textContent = answer.headers.get("X-Read");
    byId("live").textContent = "Live.";
    // A new page would take the cursor from a field.
    if (text !== byId("main").source && !document.activeElement?.matches("main input, main select")) renew(text);
  } catch (error) {
    byId("live").textContent = `Not live: ${error.message}`;
  }
}

document.querySelectorAll("nav a").forEach(link => link.addEventListener("click", event => {
  // The fragment has the state, so the browser cannot use the fragment for the section.
  event.preventDefault();
  byId(link.hash.slice(1)).scrollIntoView();
}));
addEventListener("hashchange", () => renew(byId("main").source));
const resize = size => document.querySelectorAll("figure").forEach(made => {
  draw(made);
  Plotly.relayout(made.querySelector(".plot"), size);
});
addEventListener("beforeprint", () => resize({ width: 680 }));
addEventListener("afterprint", () => resize({ width: null, autosize: true }));
byId("main").source = byId("main").innerHTML;
start();
if (document.body.dataset.live) setInterval(poll, 1000 * document.body.dataset.live);
