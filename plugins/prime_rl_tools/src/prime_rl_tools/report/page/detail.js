// One rollout, its siblings side by side, as a tree, or the same example at another step.

let current = -1; // the row shown
let mode = "one"; // one, side, tree, diff
let cursor = null; // the selected token's span

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

// Below each other, as on a phone: the detail is under the list.
const isStacked = () => matchMedia("(max-width: 1000px)").matches;

function bringDetail() {
  if (isStacked()) $("detail").scrollIntoView({ block: "start" });
}

// Where the list is out of view.
function walk() {
  const by = (way) => { move(way); bringDetail(); };
  return el("div", { class: "walk" },
    el("button", { id: "to-list", onclick: () => $("list").scrollIntoView({ block: "start" }) }, "↑ Rollouts"),
    el("button", { id: "row-before", title: "rollout before (k)", onclick: () => by(-1) }, "‹ before"),
    el("button", { id: "row-after", title: "next rollout (j)", onclick: () => by(1) }, "next ›"));
}

// What the reply should have been, as environments call it: the first such text of the task.
const REFERENCES = ["answer", "reference", "reference_answer", "target", "solution", "ground_truth", "expected", "gold", "label"];

function referenceOf(rollout) {
  for (const table of [rollout.task, rollout.info])
    for (const name of REFERENCES) if (table[name] && table[name] !== "null") return { name, text: table[name] };
  return null;
}

function reference(rollout) {
  const wanted = referenceOf(rollout);
  return wanted ? [el("div", { class: "turn reference" }, el("h4", { title: `${wanted.name} of the task` }, "reference"), el("div", {}, wanted.text))] : [];
}

const pair = (name, value, kind) => el("span", { class: kind }, `${name} `, el("b", {}, value));

async function drawDetail() {
  const row = current;
  const group = siblingsOf(row), past = historyOf(row);
  const before = past[past.indexOf(row) - 1] ?? past[1];
  if (mode === "diff" && before === undefined) mode = "one";
  document.querySelector("main").classList.toggle("side", mode === "side" || mode === "diff");
  const shown = mode === "side" || mode === "tree" ? group : mode === "diff" ? [before, row] : [row];
  const rollouts = await Promise.all(shown.map(rolloutOf));
  if (row !== current) return; // another rollout was selected meanwhile
  const rollout = rollouts[shown.indexOf(row)];
  const talk = el("div", { class: mode === "side" || mode === "diff" ? "talk side" : "talk", tabindex: 0, "aria-label": "tokens" });
  talk.append(...VIEWS[mode](shown, rollouts, row));
  talk.addEventListener("mouseover", (event) => event.target.token && look(event.target));
  talk.addEventListener("click", (event) => event.target.token && look(event.target));
  $("detail").replaceChildren(heading(row, rollout, group, past), talk, el("div", { class: "card", id: "card", "aria-live": "polite" }));
  talk.querySelector('.one[aria-current="true"]')?.scrollIntoView({ block: "nearest", inline: "nearest" });
  drawCard(null);
}

const VIEWS = {
  one: (shown, [rollout], row) => [...conversation(rollout, row), ...reference(rollout)],
  side: (shown, rollouts) => {
    const budget = { left: shown.reduce((sum, each) => sum + columns.tokens[each], 0) > AT_ONCE ? 0 : AT_ONCE };
    return shown.map((each, index) => column(each, rollouts[index], { budget }));
  },
  diff: (shown, [earlier, later]) => {
    const marks = changes(earlier, later);
    return shown.map((each, index) => column(each, index ? later : earlier, { marks }));
  },
  tree: (shown, rollouts) => [...tree(shown, rollouts), ...reference(rollouts[0])],
};

function heading(row, rollout, group, past) {
  const why = droppedOf(row), version = columns.version[row];
  const again = runOf(row).algorithms_again?.[envOf(row)]?.type;
  const place = [algorithmOf(row) + (again ? ` → ${again}` : ""), isHeldOut(row) && `held out, version ${version}`, !isHeldOut(row) && `step ${columns.step[row]}`, `group ${columns.group[row]}`, `example ${columns.example[row]}`, texts.agent[columns.agent[row]], runs.length > 1 && runOf(row).name];
  const button = (id, value, label, title, on = true) => on && el("button", { id, "aria-pressed": String(mode === value), title, onclick: () => toggle(value) }, label);
  return el("div", { class: "top" },
    walk(),
    el("h2", {}, envOf(row), el("span", { class: "sub" }, place.filter(Boolean).join(" · "))),
    el("div", { class: "numbers" },
      pair("reward", number(columns.reward[row])),
      pair("credit", columns.credit[row] === null ? "none" : signed(columns.credit[row])),
      isReplay() && pair("replayed", columns.credit_again[row] === null ? "none" : signed(columns.credit_again[row])),
      pair("sampled", `${columns.sampled[row].toLocaleString("en")} of ${plural(columns.tokens[row], "token")}`),
      pair("version", version),
      rollout.source !== "policy" && pair("source", rollout.source),
      rollout.stop && pair("stop", rollout.stop),
      rollout.truncated && pair("", "truncated", "warn"),
      why && pair("dropped by", why, "warn"),
      ...Object.entries(rollout.objections ?? {}).map(([filter, said]) => pair(filter, said, "warn"))),
    more(rollout),
    el("div", { class: "tools" },
      group.length > 1 && el("div", { class: "siblings", role: "group", "aria-label": "siblings" }, ...group.map((each) => sibling(each, row))),
      button("side", "side", "Side by side", "Group siblings side by side (s)", group.length > 1),
      button("tree", "tree", "Tree", "Where the siblings part (p)", group.length > 1),
      past.length > 1 && el("label", { title: "The same example at other steps ({ and })" }, isHeldOut(row) ? "version " : "seen at step ", steps(row, past)),
      button("diff", "diff", "Changes", "What has changed since the example was sampled before (d)", past.length > 1),
      el("label", {}, "color ", colorings()),
      scaleOf(row)));
}

function steps(row, past) {
  const choice = el("select", { id: "past", onchange: () => select(past[choice.selectedIndex]) }, ...past.map((each) => el("option", {}, `${columns.step[each]}: ${number(columns.reward[each], 3)}`)));
  choice.selectedIndex = past.indexOf(row);
  return choice;
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

function column(row, rollout, how) {
  const why = droppedOf(row);
  const place = [mode === "diff" && (isHeldOut(row) ? `held out, version ${columns.step[row]}` : `step ${columns.step[row]}`), texts.agent[columns.agent[row]], `version ${columns.version[row]}`, why && `dropped by ${why}`];
  return el("div", { class: "one", "aria-current": String(row === current) },
    el("h3", { onclick: () => select(row), title: "Show this one" }, el("span", {}, `reward ${number(columns.reward[row], 3)}`), el("span", {}, columns.credit[row] === null ? "" : signed(columns.credit[row]))),
    el("div", { class: "sample" }, place.filter(Boolean).join(", ")),
    ...conversation(rollout, row, how), ...reference(rollout));
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
    ["component", isHeldOut(token.row) ? "none: held out" : dropped ? "none: dropped" : members.join(", ") || "none"],
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
    el("div", { class: "what" }, JSON.stringify(pieceOf(token.row, sample.ids[t])), el("span", {}, `id ${sample.ids[t]}, position ${t}`)),
    el("dl", {}, ...rows.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, typeof value === "number" ? number(value) : value)))));
}

function step(by) {
  const next = cursor ? neighbor(cursor, by) : firstSampled();
  if (!next) return;
  look(next);
  next.scrollIntoView({ block: "nearest", inline: "nearest" });
}

const allParts = () => [...$("detail").querySelectorAll(".part")];

function neighbor(span, by) {
  const beside = by < 0 ? span.previousElementSibling : span.nextElementSibling;
  if (!by || beside) return by ? beside : span;
  const part = allParts()[allParts().indexOf(span.parentElement) + by];
  if (!part) return span;
  fill(part);
  return by < 0 ? part.lastElementChild : part.firstElementChild;
}

function firstSampled() {
  const all = allParts();
  for (const part of all) {
    const tokens = part.range ? part.range : { ...part.firstElementChild.token, from: part.firstElementChild.token.t, to: part.lastElementChild.token.t + 1 };
    for (let t = tokens.from; t < tokens.to; t++)
      if (at(tokens.sample.mask, t)) { fill(part); return part.children[t - tokens.from]; }
  }
  if (all.length) fill(all[0]);
  return all[0]?.firstElementChild;
}
