// The table of rollouts: filters, search, order, export. Only visible rows are in the document.

const ROW = 24, HEAD = 26; // pixels, as in the style sheet
const FIELDS = [
  { name: "run", width: "2.6em", value: (row) => runLetter(columns.run[row]), text: true, color: (row) => runColor(columns.run[row]) },
  { name: "set", width: "5.2em", value: (row) => texts.set[columns.set[row]], text: true, wide: true },
  { name: "step", width: "3.4em", value: (row) => columns.step[row], always: true },
  { name: "env", width: "minmax(5em, 1fr)", value: envOf, text: true, wide: true },
  { name: "algorithm", width: "minmax(5.4em, .8fr)", value: algorithmOf, text: true, wide: true, only: () => !isReplay() },
  { name: "agent", width: "minmax(4em, .8fr)", value: (row) => texts.agent[columns.agent[row]], text: true, wide: true },
  { name: "group", width: "4em", value: (row) => columns.group[row] },
  { name: "example", width: "4.8em", value: (row) => columns.example[row], wide: true },
  { name: "reward", width: "4.6em", value: (row) => columns.reward[row], show: (v) => number(v, 3), always: true },
  { name: "credit", width: "8.2em", value: (row) => columns.credit[row], bar: true },
  { name: "replayed", width: "8.2em", value: (row) => columns.credit_again[row], bar: true, only: () => isReplay() },
  { name: "tokens", width: "4.2em", value: (row) => columns.tokens[row], wide: true },
  { name: "turns", width: "3.6em", value: (row) => columns.turns[row], wide: true, only: () => !isReplay() },
  { name: "dropped", width: "minmax(5em, .9fr)", value: droppedOf, text: true, wide: true, show: (v) => v.replace("_batch_filters", " filter") },
  { name: "reply", width: "minmax(6em, 2.4fr)", value: (row) => columns.reply[row], text: true, always: true, title: true },
];
let fields = FIELDS;
let order = []; // rows that pass the filters, sorted
let sort = { by: null, down: false };

// A column in which every row says the same says nothing.
const varies = (field) => { const first = size ? field.value(0) : null; for (let row = 1; row < size; row++) if (field.value(row) !== first) return true; return false; };
const isNarrow = () => $("list").clientWidth < 600;

function drawHead() {
  const isCramped = mode === "side" || mode === "diff" || isNarrow();
  fields = FIELDS.filter((field) => (!field.only || field.only()) && !(isCramped && field.wide) && (field.always || varies(field)));
  if (mode === "side" || mode === "diff") fields = fields.filter((field) => field.name !== "reply");
  $("head").style.gridTemplateColumns = fields.map((field) => field.width).join(" ");
  $("head").replaceChildren(
    ...fields.map((field) => {
      const sorted = sort.by === field.name ? (sort.down ? "descending" : "ascending") : null;
      const arrow = sorted ? (sort.down ? " ↓" : " ↑") : "";
      return el("button", { role: "columnheader", class: field.text && "text", "aria-sort": sorted, onclick: () => sortBy(field.name), tabindex: -1 }, field.name + arrow);
    }),
  );
}

function sortBy(name) {
  sort = sort.by !== name ? { by: name, down: false } : sort.down ? { by: null, down: false } : { by: name, down: true };
  drawHead();
  refilter();
}

// -- filters ----------------------------------------------------------------------------------

function bounds() {
  const [first, last] = $("f-step").value.split("-").map((part) => parseFloat(part));
  const low = parseFloat($("f-min").value), high = parseFloat($("f-max").value);
  return {
    step0: Number.isNaN(first) ? -Infinity : first,
    step1: last !== undefined && !Number.isNaN(last) ? last : Number.isNaN(first) ? Infinity : first,
    low: Number.isNaN(low) ? -Infinity : low,
    high: Number.isNaN(high) ? Infinity : high,
  };
}

function refilter() {
  const { step0, step1, low, high } = bounds();
  const env = $("f-env").value, algorithm = $("f-algorithm").value, dropped = $("f-dropped").value;
  const set = $("f-set").value, run = $("f-run").value, isFound = search.hits;
  order = [];
  for (let row = 0; row < size; row++) {
    const step = columns.step[row], reward = columns.reward[row], why = droppedOf(row);
    if (step < step0 || step > step1 || reward < low || reward > high) continue;
    if ((env && envOf(row) !== env) || (algorithm && algorithmOf(row) !== algorithm)) continue;
    if ((set && texts.set[columns.set[row]] !== set) || (run && runOf(row).name !== run)) continue;
    if (dropped && (dropped === "trained" ? why || isHeldOut(row) : dropped === "any" ? !why : why !== dropped)) continue;
    if (isFound && !isFound.has(row)) continue;
    order.push(row);
  }
  const field = FIELDS.find((each) => each.name === sort.by);
  if (field) {
    const way = sort.down ? -1 : 1;
    const key = order.map((row) => field.value(row));
    const compare = field.text ? (a, b) => String(key[a]).localeCompare(String(key[b])) : (a, b) => (key[a] ?? -Infinity) - (key[b] ?? -Infinity);
    const places = order.map((_, index) => index).sort((a, b) => way * compare(a, b) || a - b);
    order = places.map((index) => order[index]);
  }
  $("count").textContent = order.length === size ? plural(size, "rollout") : `${order.length.toLocaleString("en")} of ${size.toLocaleString("en")}`;
  $("rows").style.height = `${order.length * ROW}px`;
  $("table").setAttribute("aria-rowcount", order.length);
  drawRows();
  drawHistogram();
}

function options(id, names, first) {
  const select = $(id), before = select.value;
  select.replaceChildren(...[["", first], ...names.map((name) => [name, name])].map(([value, label]) => el("option", { value }, label)));
  select.value = names.includes(before) ? before : "";
  select.closest("label").hidden = names.length < 2 && id !== "f-dropped"; // nothing to choose
}

function fillFilters() {
  const types = new Set(runs.flatMap((run) => Object.values(run.algorithms).map((each) => each.type)));
  options("f-run", runs.map((run) => run.name), "all");
  options("f-set", columns.set?.includes(HELD_OUT) ? texts.set : [], "all");
  options("f-env", texts.env, "all");
  options("f-algorithm", [...types], "all");
  options("f-dropped", ["trained", "any", ...texts.dropped.filter(Boolean)], "all");
}

// -- search -----------------------------------------------------------------------------------

const search = { hits: null, text: "", number: 0 };

// What is typed, as a regular expression: /between slashes/ it is one, else its letters.
function searchPattern(flags = "") {
  const typed = search.text, between = typed.match(/^\/(.+)\/$/);
  if (!typed) return null;
  try {
    return new RegExp(between ? between[1] : typed.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), `iu${flags}`);
  } catch {
    return null;
  }
}

// Reads every chunk in turn, and shows what it has found so far.
async function searchAll() {
  search.text = $("f-text").value;
  const mine = ++search.number, wanted = searchPattern();
  search.hits = wanted ? new Set() : null;
  $("f-text").setAttribute("aria-invalid", String(Boolean(search.text && !wanted)));
  refilter();
  let shown = performance.now();
  for (let row = 0; wanted && row < size; row++) {
    const rollout = await rolloutOf(row);
    if (mine !== search.number) return; // another text was typed
    if (rollout.samples.some((sample) => wanted.test(sampledText(sample, row)))) search.hits.add(row);
    if (performance.now() - shown > 200) { refilter(); shown = performance.now(); $("count").textContent += ` · searching ${Math.round((row / size) * 100)} %`; }
  }
  if (wanted) refilter();
  if (current >= 0) drawDetail();
}

function sampledText(sample, row) {
  let text = "";
  for (let t = 0; t < sample.ids.length; t++) if (at(sample.mask, t)) text += pieceOf(row, sample.ids[t]);
  return text;
}

// -- export -----------------------------------------------------------------------------------

// The rollouts that pass the filters, one JSON object per line.
async function exported() {
  const lines = [];
  for (const row of order) {
    const { samples, ...rest } = await rolloutOf(row);
    const say = (wanted) => samples.map((sample) => sample.ids.map((id, t) => (Boolean(at(sample.mask, t)) === wanted ? pieceOf(row, id) : "")).join(""));
    const names = ["step", "group", "example", "episode", "reward", "credit", "tokens", "sampled", "version"];
    lines.push(JSON.stringify({
      run: runOf(row).name, set: texts.set[columns.set[row]], env: envOf(row), agent: texts.agent[columns.agent[row]],
      ...Object.fromEntries(names.map((name) => [name, columns[name][row]])), dropped: droppedOf(row) || null,
      prompt: say(false), reply: say(true), ...rest,
    }));
  }
  return lines.join("\n") + "\n";
}

async function exportSelection() {
  const url = URL.createObjectURL(new Blob([await exported()], { type: "application/jsonl" }));
  el("a", { href: url, download: `${runs[0].name}.jsonl` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// -- rows -------------------------------------------------------------------------------------

function drawRows() {
  const body = $("body");
  const first = Math.max(0, Math.floor(body.scrollTop / ROW) - 8);
  const last = Math.min(order.length, Math.ceil((body.scrollTop + body.clientHeight) / ROW) + 8);
  const grid = fields.map((field) => field.width).join(" ");
  const rows = [];
  for (let index = first; index < last; index++) {
    const row = order[index];
    rows.push(
      el("div", { class: "row", role: "row", "aria-selected": String(row === current), "aria-rowindex": index + 1, "data-row": row, style: `top:${index * ROW}px;grid-template-columns:${grid}` },
        ...fields.map((field) => cell(field, row))),
    );
  }
  $("rows").replaceChildren(...rows);
}

function cell(field, row) {
  const value = field.value(row);
  if (!field.bar)
    return el("span", { role: "gridcell", style: field.color && `color:${field.color(row)};font-weight:600`, title: field.title && value, class: (field.text ? "text" : "") + (value === "" || value === null ? " off" : "") + (field.title ? " reply" : "") }, field.show ? field.show(value) : String(value));
  if (value === null) return el("span", { role: "gridcell", class: "off" }, "–");
  const share = Math.min(1, Math.abs(value) / scaleAt(row)) * 22;
  const side = value < 0 ? `left:${24 - share}px;--c:var(--neg)` : `left:24px;--c:var(--pos)`;
  return el("span", { role: "gridcell", class: "bar" }, el("i", { style: `${side};width:${share}px` }), signed(value));
}
