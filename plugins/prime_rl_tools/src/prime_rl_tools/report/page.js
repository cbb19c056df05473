"use strict";

// Data: blocks of base64, gzip, JSON. "facts" is read at once, a chunk when one of its rollouts is shown.

const $ = (id) => document.getElementById(id);

async function unpack(id) {
  const bytes = Uint8Array.from(atob($(id).textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") made.style.cssText = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

const number = (value, digits = 4) =>
  value === null || value === undefined ? "–" : Number(value.toPrecision(digits)).toString().replace("-", "−");
const signed = (value, digits = 3) => (value > 0 ? "+" : "") + number(value, digits);
const at = (column, index) => (Array.isArray(column) ? column[index] : column);

// -- state ------------------------------------------------------------------------------------

let facts, columns, texts, size;
let pieces = new Map();
let order = []; // rows that pass the filters, sorted
let current = -1; // the row shown
let sort = { by: null, down: false };
let sideBySide = false;
let coloring = "credit";
let cursor = null; // the selected token: [span]
const chunks = new Map();

async function rolloutOf(row) {
  const chunk = columns.chunk[row];
  if (!chunks.has(chunk)) {
    if (chunks.size >= 24) chunks.delete(chunks.keys().next().value);
    chunks.set(chunk, unpack(`chunk-${chunk}`));
  }
  return (await chunks.get(chunk))[columns.place[row]];
}

const envOf = (row) => texts.env[columns.env[row]];
const algorithmOf = (row) => facts.algorithms[envOf(row)]?.type ?? "";
const droppedOf = (row) => texts.dropped[columns.dropped[row]];

function siblingsOf(row) {
  const found = [];
  for (let other = 0; other < size; other++)
    if (columns.group[other] === columns.group[row] && columns.env[other] === columns.env[row])
      found.push(other);
  return found.sort((a, b) => columns.episode[a] - columns.episode[b] || a - b);
}

// -- curves -----------------------------------------------------------------------------------

const LINES = ["#2f78c8", "#d07a00", "#2a9562", "#a655ad", "#8a6d3b", "#c0445c"];
const SVG = "http://www.w3.org/2000/svg";

function svg(tag, props, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function named(pattern) {
  return Object.keys(facts.curves).flatMap((metric) => {
    const match = metric.match(pattern);
    return match ? [{ metric, label: match[1] }] : [];
  });
}

function byEnv(pattern, alone = "") {
  const found = named(pattern);
  const envs = found.filter((each) => each.label !== "all" && each.label !== "agg");
  if (envs.length > 1) return found;
  return (envs.length ? envs : found).map((each) => ({ ...each, label: alone || each.label }));
}

function panels() {
  const losses = named(/^loss\/(rl|ce|ref_kl)$/).filter((each) => facts.curves[each.metric].some(([, v]) => v !== 0));
  const evals = named(/^eval\/(.+)\/all\/reward\/mean$/);
  const held = evals.map((each) => ({ ...each, label: evals.length > 1 ? `${each.label} held out` : "held out", dots: true }));
  return [
    { title: "Reward", series: [...byEnv(/^train\/(.+)\/all\/reward\/mean$/, "sampled"), ...held] },
    { title: "Loss", series: losses.length ? losses : named(/^(loss)\/mean$/) },
    { title: "Entropy", series: byEnv(/^entropy\/(.+)\/mean$/) },
    { title: "Mismatch KL", series: byEnv(/^mismatch_kl\/(.+)\/mean$/) },
  ];
}

function drawCurves() {
  const box = $("curves");
  box.replaceChildren(...panels().map((panel) => chart(panel.title, panel.series)));
  const choices = Object.keys(facts.curves);
  if (!choices.length) return;
  const select = el("select", { "aria-label": "metric" }, ...choices.map((name) => el("option", {}, name)));
  select.value = choices.find((name) => name.startsWith("plugin/")) ?? choices.find((name) => name === "off_policy/mean") ?? choices[0];
  const redraw = () => last.replaceWith((last = chart(select, [{ metric: select.value, label: "" }])));
  let last = chart(select, [{ metric: select.value, label: "" }]);
  select.addEventListener("change", () => { redraw(); select.focus(); });
  box.append(last);
}

function chart(title, series) {
  const drawn = series.map((each, index) => ({
    ...each, points: facts.curves[each.metric].filter(([, v]) => v !== null), color: LINES[index % LINES.length],
  }));
  const all = drawn.flatMap((each) => each.points);
  const legend = el("div", { class: "legend" });
  const box = el("div", { class: "chart" }, el("h2", {}, title), legend);
  if (!all.length) return box.append(el("p", { class: "empty" }, "nothing recorded")), box;
  const W = Math.max(190, $("curves").clientWidth / 5 - 20), H = 104, L = 46, R = 8, T = 6, B = 16;
  const xs = all.map(([x]) => x), ys = all.map(([, y]) => y);
  const x0 = Math.min(...xs), x1 = Math.max(...xs, x0 + 1);
  let y0 = Math.min(...ys), y1 = Math.max(...ys);
  if (y0 === y1) [y0, y1] = [y0 - (Math.abs(y0) || 1) * 0.5, y1 + (Math.abs(y1) || 1) * 0.5];
  const X = (x) => L + ((x - x0) / (x1 - x0)) * (W - L - R);
  const Y = (y) => H - B - ((y - y0) / (y1 - y0)) * (H - T - B);
  const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "aria-label": drawn.map((e) => e.metric).join(", ") });
  for (const y of [y0, (y0 + y1) / 2, y1]) {
    picture.append(svg("line", { class: "grid", x1: L, x2: W - R, y1: Y(y), y2: Y(y) }));
    picture.append(svg("text", { x: L - 4, y: Y(y) + 3, "text-anchor": "end" }, number(Math.abs(y) < (y1 - y0) * 1e-6 ? 0 : y, 3)));
  }
  for (const x of [x0, x1]) picture.append(svg("text", { x: X(x), y: H - 3, "text-anchor": x === x0 ? "start" : "end" }, x));
  for (const { points, color, dots } of drawn) {
    if (dots || points.length === 1)
      for (const [x, y] of points) picture.append(svg("circle", { cx: X(x), cy: Y(y), r: 3, fill: color }));
    if (!dots)
      picture.append(svg("polyline", { points: points.map(([x, y]) => `${X(x)},${Y(y)}`).join(" "), fill: "none", stroke: color, "stroke-width": 1.6, "vector-effect": "non-scaling-stroke" }));
  }
  const mark = svg("line", { class: "grid", y1: T, y2: H - B, visibility: "hidden" });
  picture.append(mark);
  const say = (step) =>
    legend.replaceChildren(
      step === null ? "" : `step ${step}  `,
      ...drawn.flatMap((each) => {
        const value = step === null ? each.points.at(-1)[1] : each.points.find(([x]) => x === step)?.[1];
        return [el("span", { style: `color:${each.color}` }, each.dots ? "● " : "━ "), `${each.label} ${number(value)}  `];
      }),
    );
  const stepAt = (event) => {
    const box = picture.getBoundingClientRect();
    const x = x0 + (((event.clientX - box.left) / box.width) * W - L) / (W - L - R) * (x1 - x0);
    return xs.reduce((best, each) => (Math.abs(each - x) < Math.abs(best - x) ? each : best), xs[0]);
  };
  picture.addEventListener("mousemove", (event) => {
    const step = stepAt(event);
    say(step);
    mark.setAttribute("x1", X(step));
    mark.setAttribute("x2", X(step));
    mark.setAttribute("visibility", "visible");
  });
  picture.addEventListener("mouseleave", () => { say(null); mark.setAttribute("visibility", "hidden"); });
  picture.addEventListener("click", (event) => { $("f-step").value = stepAt(event); refilter(); });
  say(null);
  box.append(picture);
  return box;
}

// -- table ------------------------------------------------------------------------------------

const ROW = 24, HEAD = 26; // pixels, as in the style sheet
const FIELDS = [
  { name: "step", width: "3.4em", value: (row) => columns.step[row] },
  { name: "env", width: "minmax(5em, 1.4fr)", value: envOf, text: true },
  { name: "algorithm", width: "minmax(4em, 1fr)", value: algorithmOf, text: true, wide: true, only: () => !isReplay() },
  { name: "agent", width: "minmax(4em, .8fr)", value: (row) => texts.agent[columns.agent[row]], text: true, wide: true, only: () => texts.agent.length > 1 },
  { name: "group", width: "4em", value: (row) => columns.group[row] },
  { name: "example", width: "4.8em", value: (row) => columns.example[row], wide: true },
  { name: "reward", width: "4.4em", value: (row) => columns.reward[row], show: (v) => number(v, 3) },
  { name: "credit", width: "8.2em", value: (row) => columns.credit[row], bar: true },
  { name: "replayed", width: "8.2em", value: (row) => columns.credit_again[row], bar: true, only: () => isReplay() },
  { name: "tokens", width: "4.2em", value: (row) => columns.tokens[row], wide: true },
  { name: "turns", width: "3.6em", value: (row) => columns.turns[row], wide: true, only: () => !isReplay() },
  { name: "dropped", width: "minmax(4.5em, .9fr)", value: droppedOf, text: true, wide: true, show: (v) => v.replace("_batch_filters", " filter") },
];
let fields = FIELDS;
const isReplay = () => "credit_again" in columns;

function drawHead() {
  fields = FIELDS.filter((field) => !(field.only && !field.only()) && !(sideBySide && field.wide));
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
  order = [];
  for (let row = 0; row < size; row++) {
    const step = columns.step[row], reward = columns.reward[row], why = droppedOf(row);
    if (step < step0 || step > step1 || reward < low || reward > high) continue;
    if ((env && envOf(row) !== env) || (algorithm && algorithmOf(row) !== algorithm)) continue;
    if (dropped && (dropped === "trained" ? why : dropped === "any" ? !why : why !== dropped)) continue;
    order.push(row);
  }
  const field = FIELDS.find((each) => each.name === sort.by);
  if (field) {
    const way = sort.down ? -1 : 1;
    const key = order.map((row) => field.value(row));
    const compare = field.text ? (a, b) => key[a].localeCompare(key[b]) : (a, b) => (key[a] ?? -Infinity) - (key[b] ?? -Infinity);
    const places = order.map((_, index) => index).sort((a, b) => way * compare(a, b) || a - b);
    order = places.map((index) => order[index]);
  }
  $("count").textContent = order.length === size ? `${size.toLocaleString("en")} rollouts` : `${order.length.toLocaleString("en")} of ${size.toLocaleString("en")}`;
  $("rows").style.height = `${order.length * ROW}px`;
  $("table").setAttribute("aria-rowcount", order.length);
  drawRows();
}

// Only visible rows are in the DOM.
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
    return el("span", { role: "gridcell", class: (field.text ? "text" : "") + (value === "" || value === null ? " off" : "") }, field.show ? field.show(value) : String(value));
  if (value === null) return el("span", { role: "gridcell", class: "off" }, "–");
  const share = Math.min(1, Math.abs(value) / facts.scales[columns.env[row]]) * 22;
  const side = value < 0 ? `left:${24 - share}px;--c:var(--neg)` : `left:24px;--c:var(--pos)`;
  return el("span", { role: "gridcell", class: "bar" }, el("i", { style: `${side};width:${share}px` }), signed(value));
}

function select(row, reveal = true) {
  if (row === undefined || row < 0) return;
  current = row;
  cursor = null;
  const index = order.indexOf(row), body = $("body");
  if (reveal && index >= 0) {
    const top = index * ROW;
    if (top < body.scrollTop) body.scrollTop = top;
    else if (top + ROW > body.scrollTop + body.clientHeight - HEAD) body.scrollTop = top + ROW - body.clientHeight + HEAD;
  }
  drawRows();
  history.replaceState(null, "", `#rollout-${row}`);
  return drawDetail();
}

function move(by) {
  const index = order.indexOf(current);
  select(order[Math.max(0, Math.min(order.length - 1, index < 0 ? 0 : index + by))]);
}

// -- one rollout ------------------------------------------------------------------------------

const pair = (name, value, kind) => el("span", { class: kind }, `${name} `, el("b", {}, value));

async function drawDetail() {
  const row = current;
  const group = siblingsOf(row);
  document.querySelector("main").classList.toggle("side", sideBySide);
  const shown = sideBySide ? group : [row];
  const rollouts = await Promise.all(shown.map(rolloutOf));
  if (row !== current) return; // another rollout was selected meanwhile
  const rollout = rollouts[shown.indexOf(row)];
  const talk = el("div", { class: sideBySide ? "talk side" : "talk", tabindex: 0, "aria-label": "tokens" });
  talk.append(...(sideBySide ? shown.map((each, index) => column(each, rollouts[index])) : conversation(rollout, row)));
  talk.addEventListener("mouseover", (event) => event.target.classList.contains("tok") && look(event.target));
  talk.addEventListener("click", (event) => event.target.classList.contains("tok") && look(event.target));
  $("detail").replaceChildren(heading(row, rollout, group), talk, el("div", { class: "card", id: "card", "aria-live": "polite" }));
  talk.querySelector('.one[aria-current="true"]')?.scrollIntoView({ block: "nearest", inline: "nearest" });
  drawCard(null);
}

function heading(row, rollout, group) {
  const why = droppedOf(row), version = columns.version[row];
  const again = facts.algorithms_again?.[envOf(row)]?.type;
  return el("div", { class: "top" },
    el("h2", {}, envOf(row), el("span", { class: "sub" }, `${algorithmOf(row)}${again ? ` → ${again}` : ""} · step ${columns.step[row]} · group ${columns.group[row]} · example ${columns.example[row]} · ${texts.agent[columns.agent[row]]}`)),
    el("div", { class: "numbers" },
      pair("reward", number(columns.reward[row])),
      pair("credit", columns.credit[row] === null ? "none" : signed(columns.credit[row])),
      isReplay() && pair("replayed", columns.credit_again[row] === null ? "none" : signed(columns.credit_again[row])),
      pair("sampled", `${columns.sampled[row]} of ${columns.tokens[row]} tokens`),
      pair("version", version),
      rollout.source !== "policy" && pair("source", rollout.source),
      rollout.stop && pair("stop", rollout.stop),
      rollout.truncated && pair("", "truncated", "warn"),
      why && pair("dropped by", why, "warn")),
    more(rollout),
    el("div", { class: "tools" },
      el("div", { class: "siblings", role: "group", "aria-label": "siblings" }, ...group.map((each) => sibling(each, row))),
      el("button", { id: "side", "aria-pressed": String(sideBySide), title: "Group siblings side by side (s)", onclick: toggleSide }, "Side by side"),
      el("label", {}, "color ", colorings()),
      scaleOf(row)));
}

function sibling(each, row) {
  const value = columns.credit[each] ?? 0;
  const color = value === 0 ? "var(--line)" : `var(${value > 0 ? "--pos" : "--neg"})`;
  return el("button", { "aria-current": String(each === row), style: `border-bottom-color:${color}`, onclick: () => select(each),
    title: `reward ${number(columns.reward[each])}, credit ${signed(value)}${droppedOf(each) ? `, dropped by ${droppedOf(each)}` : ""}` }, number(columns.reward[each], 3));
}

function more(rollout) {
  const tables = { reward: rollout.rewards, metric: rollout.metrics, task: rollout.task, info: rollout.info };
  const entries = Object.entries(tables).flatMap(([kind, table]) => Object.entries(table).map(([name, value]) => [`${kind} ${name}`, value]));
  if (!entries.length) return null;
  const short = Object.entries(rollout.rewards).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  return el("details", { class: "more" }, el("summary", {}, short ? `rewards: ${short}; metrics, task, info` : "metrics, task, info"),
    el("dl", {}, ...entries.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, typeof value === "number" ? number(value) : value)])));
}

function column(row, rollout) {
  const why = droppedOf(row);
  return el("div", { class: "one", "aria-current": String(row === current) },
    el("h3", { onclick: () => select(row), title: "Show this one" }, el("span", {}, `reward ${number(columns.reward[row], 3)}`), el("span", {}, columns.credit[row] === null ? "" : signed(columns.credit[row]))),
    el("div", { class: "sample" }, `${texts.agent[columns.agent[row]]}, version ${columns.version[row]}${why ? `, dropped by ${why}` : ""}`),
    ...conversation(rollout, row));
}

function conversation(rollout, row) {
  return rollout.samples.flatMap((sample, index) => {
    const trained = sample.ids.length ? [...sample.ids.keys()].filter((t) => at(sample.mask, t)).length : 0;
    const title = rollout.samples.length > 1 ? [el("div", { class: "sample" }, `sample ${index + 1} of ${rollout.samples.length}: ${sample.ids.length} tokens, ${trained} sampled`)] : [];
    return [...title, ...turns(sample, row)];
  });
}

const ROLES = ["system", "user", "assistant", "tool"];
const roleOf = (sample, t) => (sample.roles === undefined ? "tokens" : ROLES[at(sample.roles, t)] ?? "template");

function turns(sample, row) {
  const made = [];
  let role = null, box = null;
  for (let t = 0; t < sample.ids.length; t++) {
    if (roleOf(sample, t) !== role) {
      role = roleOf(sample, t);
      box = el("div");
      made.push(el("div", { class: "turn" }, el("h4", {}, role), box));
    }
    box.append(token(sample, t, row));
  }
  return made;
}

function weights(sample, t) {
  const sampled = at(sample.mask, t) ? 1 : 0;
  return { rl: sample.rl === undefined ? sampled : at(sample.rl, t) * sampled, ce: at(sample.ce, t) ?? 0, ref_kl: at(sample.ref_kl, t) ?? 0 };
}

function token(sample, t, row) {
  const classes = ["tok"];
  const component = Object.entries(weights(sample, t)).find(([, weight]) => weight !== 0);
  if (component) classes.push(component[0]);
  const scaffold = sample.content !== undefined && !at(sample.content, t);
  if (scaffold) classes.push("scaffold");
  if (at(sample.is_masked, t)) classes.push("hit");
  const text = pieces.get(sample.ids[t]) ?? `⟨${sample.ids[t]}⟩`;
  const span = el("span", { class: classes.join(" "), style: background(sample, t, row) }, text.replace(/\n/g, scaffold ? "↵" : "↵\n").replace(/\t/g, "⇥\t") || "·");
  span.token = { sample, t, row };
  return span;
}

// -- color -----------------------------------------------------------------------------------

const COLORINGS = {
  credit: { label: "credit", value: (s, t) => at(s.advantages, t), scale: (row) => facts.scales[columns.env[row]] },
  again: { label: "replayed credit", value: (s, t) => at(s.advantages_again, t), scale: (row) => facts.scales[columns.env[row]], only: () => facts.algorithms_again },
  change: { label: "change of credit", value: (s, t) => (at(s.advantages_again, t) ?? 0) - (at(s.advantages, t) ?? 0), scale: (row) => facts.scales[columns.env[row]], only: () => facts.algorithms_again },
  reference: { label: "log reference − log μ", value: (s, t) => (weights(s, t).ref_kl ? at(s.ref_logprobs, t) - at(s.logprobs, t) : null), scale: () => 2, only: () => facts.has_references },
  logprob: { label: "surprise (−log μ)", value: (s, t) => (at(s.mask, t) ? -at(s.logprobs, t) : null), scale: () => 5, plain: true },
  ratio: { label: "log π/μ", value: (s, t) => (at(s.ratio, t) > 0 ? Math.log(at(s.ratio, t)) : null), scale: () => 0.5, only: () => facts.has_exports },
  entropy: { label: "entropy", value: (s, t) => at(s.entropy, t), scale: () => 4, plain: true, only: () => facts.has_exports },
};
const LEAST = 7, FULL = 55; // percent of the color: for the smallest credit, and at the end of the scale
const tint = (name, percent) => `color-mix(in srgb, var(${name}) ${percent.toFixed(1)}%, transparent)`;
const allowed = () => Object.entries(COLORINGS).filter(([, each]) => !each.only || each.only());

function background(sample, t, row) {
  const { value, scale, plain } = COLORINGS[coloring];
  const found = value(sample, t);
  if (found === null || found === undefined || found === 0) return null;
  const strength = Math.min(1, Math.abs(found) / scale(row)) * (FULL - LEAST) + LEAST;
  return `background:${tint(plain ? "--seq" : found > 0 ? "--pos" : "--neg", strength)}`;
}

function colorings() {
  const select = el("select", { id: "color", title: "Measure of the color (m)", onchange: () => recolor(select.value) }, ...allowed().map(([key, each]) => el("option", { value: key }, each.label)));
  select.value = coloring;
  return select;
}

function recolor(key) {
  coloring = key;
  drawDetail();
}

function scaleOf(row) {
  const { scale, plain } = COLORINGS[coloring], full = scale(row);
  const left = plain ? tint("--seq", LEAST) : tint("--neg", FULL), right = tint(plain ? "--seq" : "--pos", FULL);
  return el("span", { class: "scale" }, plain ? "0" : `−${number(full, 3)}`, el("i", { style: `background:linear-gradient(90deg,${left},${plain ? "" : "transparent,"}${right})` }), `${number(full, 3)}`);
}

// -- the selected token -----------------------------------------------------------------------

function look(span) {
  cursor?.classList.remove("at");
  cursor = span;
  span.classList.add("at");
  drawCard(span.token);
}

function drawCard(token) {
  if (!token) return $("card").replaceChildren(el("p", { class: "hint", style: "padding:0" }, "Point at a token, or press Enter and the arrow keys, to see what it was sampled with and how it trains."));
  const { sample, t } = token;
  const weight = weights(sample, t), sampled = at(sample.mask, t);
  const dropped = droppedOf(token.row);
  const members = Object.entries(weight).filter(([, each]) => each !== 0).map(([name, each]) => `${name} × ${number(each, 3)}`);
  const trust = at(sample.is_masked_high, t) ? "masked, too likely" : at(sample.is_masked_low, t) ? "masked, too unlikely" : at(sample.is_masked, t) ? "masked" : sample.is_masked === undefined || at(sample.is_masked, t) === null ? null : "inside";
  const rows = [
    ["component", dropped ? "none: dropped" : members.join(", ") || "none"],
    ["advantage", sample.advantages === undefined ? null : signed(at(sample.advantages, t), 4)],
    ["advantage replayed", sample.advantages_again === undefined ? null : signed(at(sample.advantages_again, t), 4)],
    ["mask", sampled ? "sampled" : "given"],
    ["log μ (inference)", sampled ? number(at(sample.logprobs, t)) : null],
    ["log π (trainer)", at(sample.trainer_logprobs, t)],
    ["ratio π/μ", at(sample.ratio, t)],
    ["entropy", at(sample.entropy, t)],
    ["log reference", sample.ref_logprobs === undefined ? null : at(sample.ref_logprobs, t)],
    ["trust region", trust],
    ["policy version", sampled && sample.versions !== undefined ? at(sample.versions, t) : null],
    ["role", roleOf(sample, t)],
    ["attribution", sample.content === undefined ? null : at(sample.content, t) ? "content" : "template"],
    ["repeat", at(sample.repeat, t) ? "trains in an earlier sample" : null],
  ];
  $("card").replaceChildren(
    el("div", { class: "what" }, JSON.stringify(pieces.get(sample.ids[t]) ?? ""), el("span", {}, `id ${sample.ids[t]}, position ${t}`)),
    el("dl", {}, ...rows.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, typeof value === "number" ? number(value) : value)))));
}

function step(by) {
  const spans = [...$("detail").querySelectorAll(".tok")];
  if (!spans.length) return;
  const first = spans.findIndex((span) => at(span.token.sample.mask, span.token.t));
  const index = cursor ? spans.indexOf(cursor) + by : Math.max(first, 0);
  look(spans[Math.max(0, Math.min(spans.length - 1, index))]);
  cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
}

// -- keys and buttons -------------------------------------------------------------------------

function toggleSide() {
  sideBySide = !sideBySide;
  drawHead();
  drawRows();
  drawDetail();
}

function toggleCurves() {
  $("curves").hidden = !$("curves").hidden;
  $("toggle-curves").setAttribute("aria-pressed", String(!$("curves").hidden));
  drawRows();
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("prime-rl-theme", root.dataset.theme); } catch { /* a page from disk may not store */ }
}

function toSibling(by) {
  const group = siblingsOf(current);
  select(group[(group.indexOf(current) + by + group.length) % group.length]);
}

function nextColoring() {
  const keys = allowed().map(([key]) => key);
  recolor(keys[(keys.indexOf(coloring) + 1) % keys.length]);
}

function back() {
  if (cursor) { cursor.classList.remove("at"); cursor = null; drawCard(null); $("table").focus(); }
  else if (sideBySide) toggleSide();
  else $("table").focus();
}

const KEYS = [
  [["j", "ArrowDown"], "next rollout", () => move(1)],
  [["k", "ArrowUp"], "rollout before", () => move(-1)],
  [["PageDown"], "twenty on", () => move(20)],
  [["PageUp"], "twenty back", () => move(-20)],
  [["g", "Home"], "first", () => select(order[0])],
  [["G", "End"], "last", () => select(order.at(-1))],
  [["Enter"], "into the tokens", () => { $("detail").querySelector(".talk")?.focus(); step(0); }],
  [["ArrowRight", "l"], "next token", () => step(1)],
  [["ArrowLeft", "h"], "token before", () => step(-1)],
  [["]"], "next sibling", () => toSibling(1)],
  [["["], "sibling before", () => toSibling(-1)],
  [["s"], "siblings side by side", toggleSide],
  [["m"], "color by the next measure", nextColoring],
  [["/"], "filter", () => $("f-env").focus()],
  [["c"], "curves", toggleCurves],
  [["t"], "light or dark", toggleTheme],
  [["Escape"], "back", back],
  [["?"], "this help", () => $("help").showModal()],
];

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  if (event.target.matches("input, select")) {
    if (event.key === "Escape") $("table").focus();
    return;
  }
  if (event.key === "Enter" && event.target.matches("button, summary")) return;
  const found = KEYS.find(([keys]) => keys.includes(event.key));
  if (!found) return;
  event.preventDefault();
  found[2]();
});

function options(id, names, first) {
  $(id).replaceChildren(...[["", first], ...names.map((name) => [name, name])].map(([value, label]) => el("option", { value }, label)));
}

function wire() {
  const types = [...new Set(Object.values(facts.algorithms).map((each) => each.type))];
  options("f-env", texts.env, "all");
  options("f-algorithm", types, "all");
  options("f-dropped", ["trained", "any", ...texts.dropped.filter(Boolean)], "all");
  $("filters").addEventListener("input", refilter);
  $("filters").addEventListener("reset", () => setTimeout(refilter));
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("body").addEventListener("scroll", drawRows);
  $("rows").addEventListener("click", (event) => { const row = event.target.closest(".row"); if (row) { select(Number(row.dataset.row), false); $("table").focus(); } });
  $("toggle-curves").addEventListener("click", toggleCurves);
  $("toggle-theme").addEventListener("click", toggleTheme);
  $("open-help").addEventListener("click", () => $("help").showModal());
  const names = { ArrowDown: "↓", ArrowUp: "↑", ArrowRight: "→", ArrowLeft: "←", Escape: "Esc" };
  $("keys").replaceChildren(...KEYS.flatMap(([keys, what]) => [el("dt", {}, keys.map((key) => names[key] ?? key).join(" ")), el("dd", {}, what)]));
  new ResizeObserver(drawRows).observe($("body"));
  window.addEventListener("resize", drawCurves);
}

function about() {
  const algorithms = Object.entries(facts.algorithms).map(([env, { type }]) => {
    const again = facts.algorithms_again?.[env]?.type;
    return el("span", { title: JSON.stringify(facts.algorithms[env].settings) }, `${env}: `, el("b", {}, again ? `${type} → ${again}` : type), "  ");
  });
  const notes = [!facts.has_tokenizer && "no tokenizer found: tokens show as numbers", !facts.has_exports && "no token export: trainer columns are absent"].filter(Boolean);
  $("name").textContent = facts.name;
  $("about").replaceChildren(...algorithms, `model ${facts.model}, loss ${facts.loss}, seed ${facts.seed}`, notes.length ? ` (${notes.join("; ")})` : "");
}

async function start() {
  try { const kept = localStorage.getItem("prime-rl-theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* as above */ }
  facts = await unpack("facts");
  ({ columns, texts } = facts.table);
  size = columns.step?.length ?? 0;
  pieces = new Map(facts.pieces.ids.map((id, index) => [id, facts.pieces.texts[index]]));
  columns.place = [];
  for (let row = 0; row < size; row++) columns.place.push(columns.chunk[row] === columns.chunk[row - 1] ? columns.place[row - 1] + 1 : 0);
  if (facts.has_references && columns.credit.every((credit) => !credit)) coloring = "reference";
  about();
  drawCurves();
  wire();
  drawHead();
  refilter();
  const asked = Number(location.hash.match(/^#rollout-(\d+)$/)?.[1] ?? order[0]);
  if (size) await select(Math.min(asked, size - 1));
  else $("detail").replaceChildren(el("p", { class: "hint" }, "No rollouts are saved: orchestrator.save_rollouts is off, or no step was finished."));
  $("table").focus();
  document.documentElement.dataset.ready = "true";
}

start();
