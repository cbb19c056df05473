// Tokens as spans: their marks, their colors, and only those that are near the window.

const ROLES = ["system", "user", "assistant", "tool"];
const roleOf = (sample, t) => (sample.roles === undefined ? "tokens" : t < prefaceOf(sample) ? "template" : ROLES[at(sample.roles, t)] ?? "template");

// Tokens before the first message that the template wrote: tools, or a system prompt of its own. Their
// role is that of the message after them. They end where the message opens: at the last token before its
// content that is the sample's first token or, after a token of the whole text (<s>), its second.
const prefaces = new WeakMap();
function prefaceOf(sample) {
  if (!prefaces.has(sample)) prefaces.set(sample, findPreface(sample));
  return prefaces.get(sample);
}

function findPreface(sample) {
  if (sample.content === undefined || ROLES[at(sample.roles, 0)] === "system") return 0;
  let content = 0;
  while (content < sample.ids.length && !at(sample.content, content) && at(sample.roles, content) === at(sample.roles, 0)) content++;
  const before = sample.ids.slice(0, content);
  const opens = before.lastIndexOf(before[0]);
  if (opens > 0) return opens;
  const afterStart = before.lastIndexOf(before[1]);
  return afterStart > 1 ? afterStart : 0;
}

function weights(sample, t) {
  const sampled = at(sample.mask, t) ? 1 : 0;
  return { rl: sample.rl === undefined ? sampled : at(sample.rl, t) * sampled, ce: at(sample.ce, t) ?? 0, ref_kl: at(sample.ref_kl, t) ?? 0 };
}

function shownText(sample, t, row) {
  const text = pieceOf(row, sample.ids[t]);
  if (text && !/[\n\t]/.test(text)) return text;
  const isScaffold = sample.content !== undefined && !at(sample.content, t);
  return text.replace(/\n/g, isScaffold ? "↵" : "↵\n").replace(/\t/g, "⇥\t") || "·";
}

// `marks`: positions of this sample -> class.
function token(sample, t, row, marks) {
  const classes = ["tok"];
  const component = isHeldOut(row) ? null : Object.entries(weights(sample, t)).find(([, weight]) => weight !== 0);
  if (component) classes.push(component[0]);
  if (sample.content !== undefined && !at(sample.content, t)) classes.push("scaffold");
  if (at(sample.is_masked, t)) classes.push("hit");
  if (marks?.has(t)) classes.push(marks.get(t));
  const span = el("span", { class: classes.join(" "), style: background(sample, t, row) }, shownText(sample, t, row));
  span.token = { sample, t, row };
  return span;
}

// A part is plain text, which a browser need not lay out, until it comes near the window: 65,000 spans
// take thirteen seconds.
const PART = 256, BREAK = 64; // tokens; a part ends at a line's end among its last ones, if there is one
const nearby = new IntersectionObserver((entries) => entries.forEach((each) => each.isIntersecting && fill(each.target)), { rootMargin: "300px", scrollMargin: "300px" });

function fill(part) {
  if (!part.range) return;
  const { sample, from, to, row, marks } = part.range;
  part.range = null;
  nearby.unobserve(part);
  const spans = [];
  for (let t = from; t < to; t++) spans.push(token(sample, t, row, marks));
  part.replaceChildren(...spans);
}

// Tokens [from, to) as parts. `budget.left`: how many are spans at once.
function parts(sample, from, to, row, marks, budget) {
  const made = [];
  for (let first = from, end; first < to; first = end) {
    end = endOfPart(sample, first, to, row);
    const part = el("span", { class: end - first < to - from ? "part block" : "part" });
    part.range = { sample, from: first, to: end, row, marks };
    if (budget.left >= end - first) {
      budget.left -= end - first;
      fill(part);
    } else {
      let text = "";
      for (let t = first; t < end; t++) text += shownText(sample, t, row);
      part.textContent = text;
      nearby.observe(part);
    }
    made.push(part);
  }
  return made;
}

function endOfPart(sample, first, to, row) {
  const most = first + PART;
  if (most >= to) return to;
  for (let end = most; end > most - BREAK; end--) if (pieceOf(row, sample.ids[end - 1]).endsWith("\n")) return end;
  return most;
}

const AT_ONCE = 2000; // tokens that are spans before the first frame

function conversation(rollout, row, { marks = new Map(), budget = { left: AT_ONCE } } = {}) {
  return rollout.samples.flatMap((sample, index) => {
    const title = rollout.samples.length > 1 ? [el("div", { class: "sample" }, `sample ${index + 1} of ${rollout.samples.length}: ${plural(sample.ids.length, "token")}, ${sampledPlaces(sample).length} sampled`)] : [];
    return [...title, ...turns(sample, row, merged(marks.get(sample), searched(sample, row)), budget)];
  });
}

const merged = (a, b) => (a && b ? new Map([...b, ...a]) : a ?? b);

function turns(sample, row, marks, budget) {
  const made = [];
  for (let from = 0, to; from < sample.ids.length; from = to) {
    const role = roleOf(sample, from);
    for (to = from + 1; to < sample.ids.length && roleOf(sample, to) === role; ) to++;
    made.push(el("div", { class: "turn" }, el("h4", {}, role), el("div", {}, ...parts(sample, from, to, row, marks, budget))));
  }
  return made;
}

// The tokens that overlap what is searched.
function searched(sample, row) {
  const wanted = searchPattern("g");
  if (!wanted) return null;
  const ends = [];
  let text = "";
  for (let t = 0; t < sample.ids.length; t++) { text += pieceOf(row, sample.ids[t]); ends.push(text.length); }
  const found = new Map();
  let t = 0;
  for (const match of text.matchAll(wanted)) {
    while (ends[t] <= match.index) t++;
    for (let n = t; n < ends.length && (n === t || ends[n - 1] < match.index + match[0].length); n++) found.set(n, "found");
  }
  return found;
}

// What two rollouts sampled, compared: marks of each.
function changes(before, after) {
  const marks = new Map();
  after.samples.forEach((sample, index) => {
    const other = before?.samples[index];
    const mine = sampledPlaces(sample), theirs = other ? sampledPlaces(other) : [];
    const { gone, fresh } = difference(theirs.map((t) => other.ids[t]), mine.map((t) => sample.ids[t]));
    marks.set(sample, new Map([...fresh].map((n) => [mine[n], "fresh"])));
    if (other) marks.set(other, new Map([...gone].map((n) => [theirs[n], "gone"])));
  });
  return marks;
}

const sampledPlaces = (sample) => [...sample.ids.keys()].filter((t) => at(sample.mask, t));

// -- color -----------------------------------------------------------------------------------

let coloring = "credit";

const COLORINGS = {
  credit: { label: "credit", value: (s, t) => at(s.advantages, t), scale: scaleAt },
  again: { label: "replayed credit", value: (s, t) => at(s.advantages_again, t), scale: scaleAt, only: () => anyRun("algorithms_again") },
  change: { label: "change of credit", value: (s, t) => (at(s.advantages_again, t) ?? 0) - (at(s.advantages, t) ?? 0), scale: scaleAt, only: () => anyRun("algorithms_again") },
  reference: { label: "log reference − log μ", value: (s, t) => (weights(s, t).ref_kl ? at(s.ref_logprobs, t) - at(s.logprobs, t) : null), scale: () => 2, only: () => anyRun("has_references") },
  logprob: { label: "surprise (−log μ)", value: (s, t) => (at(s.mask, t) ? -at(s.logprobs, t) : null), scale: () => 5, plain: true },
  ratio: { label: "log π/μ", value: (s, t) => (at(s.ratio, t) > 0 ? Math.log(at(s.ratio, t)) : null), scale: () => 0.5, only: () => anyRun("has_exports") },
  entropy: { label: "entropy", value: (s, t) => at(s.entropy, t), scale: () => 4, plain: true, only: () => anyRun("has_exports") },
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
