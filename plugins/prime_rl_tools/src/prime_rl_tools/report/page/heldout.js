// The same held-out prompts at every evaluated version: a slider, and what has changed since the
// evaluation before.

const heldOut = { version: null, sort: "example" };
const versionsOf = () => [...new Set([...columns.set ?? []].flatMap((set, row) => (set === HELD_OUT ? [columns.step[row]] : [])))].sort((a, b) => a - b);
const isHeldOutShown = () => !$("heldout").hidden;

// One prompt: for each run, its rows by version (those of one member; another member is another entry).
function heldOutEntries() {
  const found = new Map();
  for (let row = 0; row < size; row++) {
    if (!isHeldOut(row)) continue;
    const key = [columns.env[row], columns.example[row], columns.episode[row], columns.agent[row]].join();
    if (!found.has(key)) found.set(key, { row, runs: runs.map(() => []) });
    found.get(key).runs[columns.run[row]].push(row);
  }
  for (const entry of found.values()) entry.runs.forEach((rows) => rows.sort((a, b) => columns.step[a] - columns.step[b]));
  return [...found.values()];
}

// The latest evaluation at a version, and the one before it.
function around(rows, version) {
  const until = rows.filter((row) => columns.step[row] <= version);
  return { now: until.at(-1), before: until.at(-2), first: rows[0] };
}

function drawHeldOut() {
  const versions = versionsOf();
  if (!versions.includes(heldOut.version)) heldOut.version = versions.at(-1);
  const entries = heldOutEntries();
  const gain = (entry) => { const { now, first } = around(entry.runs.find((rows) => rows.length), heldOut.version); return columns.reward[now ?? first] - columns.reward[first]; };
  const reward = (entry) => columns.reward[around(entry.runs.find((rows) => rows.length), heldOut.version).now] ?? -Infinity;
  const orders = { example: () => 0, "reward, best first": (a, b) => reward(b) - reward(a), "change, best first": (a, b) => gain(b) - gain(a), "change, worst first": (a, b) => gain(a) - gain(b) };
  entries.sort(orders[heldOut.sort] ?? orders.example);
  const slider = el("input", { type: "range", id: "version", min: 0, max: versions.length - 1, value: versions.indexOf(heldOut.version), "aria-label": "policy version", oninput: () => toVersion(versions[slider.value]) });
  const sorting = el("select", { id: "heldout-sort", onchange: () => { heldOut.sort = sorting.value; drawHeldOut(); } }, ...Object.keys(orders).map((name) => el("option", {}, name)));
  sorting.value = heldOut.sort;
  $("heldout").replaceChildren(
    el("div", { class: "slider" }, el("button", { onclick: () => slide(-1), title: "evaluation before ({)" }, "‹"), slider, el("button", { onclick: () => slide(1), title: "next evaluation (})" }, "›"), el("output", { id: "at-version" }),
      el("label", {}, "sort ", sorting), el("span", { class: "key" }, el("span", { class: "tok fresh" }, "changed"), " since the evaluation before")),
    el("div", { class: "cards", id: "cards" }, ...entries.map((entry) => { const card = el("article", {}); card.entry = entry; cardWatch.observe(card); return card; })));
  showVersion();
}

const cardWatch = new IntersectionObserver((entries) => entries.forEach((each) => { each.target.isNear = each.isIntersecting; if (each.isIntersecting) drawCardOf(each.target); }), { rootMargin: "200px", scrollMargin: "200px" });

function slide(by) {
  const versions = versionsOf(), place = versions.indexOf(heldOut.version) + by;
  toVersion(versions[Math.max(0, Math.min(versions.length - 1, place))]);
}

function toVersion(version) {
  heldOut.version = version;
  $("version").value = versionsOf().indexOf(version);
  showVersion();
}

function showVersion() {
  const said = runs.map((run, index) => {
    const rows = heldOutEntries().map((entry) => around(entry.runs[index], heldOut.version)).filter(({ now }) => now !== undefined);
    if (!rows.length) return "";
    const name = runs.length > 1 ? `${runLetter(index)}: ` : "";
    return `${name}mean reward ${number(mean(rows.map(({ now }) => columns.reward[now])), 3)}, first ${number(mean(rows.map(({ first }) => columns.reward[first])), 3)}`;
  });
  $("at-version").textContent = `version ${heldOut.version} · ${said.filter(Boolean).join(" · ")}`;
  for (const card of $("cards").children) { card.version = null; if (card.isNear) drawCardOf(card); }
}

async function drawCardOf(card) {
  const { entry } = card, version = heldOut.version;
  if (card.version === version) return;
  card.version = version;
  const answers = await Promise.all(entry.runs.map(async (rows, index) => {
    const { now, before } = around(rows, version);
    if (now === undefined) return runs.length > 1 ? el("div", { class: "off" }, `${runLetter(index)}: ${rows.length ? "not evaluated yet" : "no rollouts kept"}`) : null;
    const [rollout, earlier] = await Promise.all([rolloutOf(now), before === undefined ? null : rolloutOf(before)]);
    return answer(now, rollout, rows, earlier ? changes(earlier, rollout) : new Map(), index);
  }));
  if (card.version !== version) return; // the slider has moved
  const wanted = referenceOf(await rolloutOf(entry.row));
  const reference = wanted && el("div", { class: "wanted" }, el("b", {}, "reference "), wanted.text);
  if (card.version !== version) return;
  card.replaceChildren(el("h3", {}, texts.prompt[columns.prompt[entry.row]] || `example ${columns.example[entry.row]}`), reference, ...answers.filter(Boolean));
}

function answer(row, rollout, rows, marks, index) {
  const why = droppedOf(row);
  const said = rollout.samples.map((sample) => {
    const places = sampledPlaces(sample).filter((t) => sample.content === undefined || at(sample.content, t));
    return el("div", { class: "said" }, ...places.slice(0, 400).map((t) => token(sample, t, row, marks.get(sample))), places.length > 400 ? ` … ${plural(places.length - 400, "more token")}` : "");
  });
  const rewards = rows.map((each) => `${columns.step[each]}: ${number(columns.reward[each], 3)}`).join(", ");
  return el("div", { class: "answer" },
    el("button", { title: `${rewards}. Open it.`, onclick: () => openRow(row) }, runs.length > 1 ? el("b", { style: `color:${runColor(index)}` }, runLetter(index)) : "", number(columns.reward[row], 3), sparkline(rows, row)),
    why ? el("div", { class: "said off" }, `failed: ${why}. ${rollout.info.error ?? ""}`) : "", ...said);
}

function sparkline(rows, row) {
  const values = rows.map((each) => columns.reward[each]), low = Math.min(...values, 0), high = Math.max(...values, 1);
  const X = (n) => 2 + (n / Math.max(1, rows.length - 1)) * 46, Y = (value) => 14 - ((value - low) / (high - low)) * 12;
  const picture = svg("svg", { viewBox: "0 0 50 16", width: 50, height: 16, "aria-hidden": "true" });
  picture.append(svg("polyline", { points: values.map((value, n) => `${X(n)},${Y(value)}`).join(" "), fill: "none", stroke: "currentColor" }));
  picture.append(svg("circle", { cx: X(rows.indexOf(row)), cy: Y(columns.reward[row]), r: 2.5, fill: "currentColor" }));
  return picture;
}

function openRow(row) {
  toggleHeldOut(false);
  $("f-set").value = "held out";
  mode = "diff";
  drawHead();
  refilter();
  select(row);
}

function toggleHeldOut(on = !isHeldOutShown()) {
  if (on && !versionsOf().length) return;
  $("heldout").hidden = !on;
  document.querySelector("main").hidden = on;
  $("toggle-heldout").setAttribute("aria-pressed", String(on));
  if (on) { drawHeldOut(); if (isStacked()) $("heldout").scrollIntoView({ block: "start" }); }
  else drawRows();
}
