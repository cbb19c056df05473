// Curves of the metrics, the histogram of the rewards that pass the filters, and that of the versions
// that a batch is behind.

const LINES = ["#2f78c8", "#d07a00", "#2a9562", "#a655ad", "#8a6d3b", "#c0445c"];
const DASHES = ["none", "5 3", "2 2", "8 3 2 3"];
let chosenMetric = null;
let smoothing = 0; // steps of the running mean; 0: none

const runColor = (index) => LINES[index % LINES.length];
const runLetter = (index) => "AB"[index] ?? String(index + 1);

const metricNames = () => [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];

function named(pattern) {
  return metricNames().flatMap((metric) => {
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

// What the trainer's seconds are spent on, and for how long new weights kept the engines from sampling.
function secondsOfAStep() {
  const paused = named(/^time\/(engines_paused)$/).map((each) => ({ ...each, label: "paused" }));
  return [...named(/^pace\/(training|held|starved)$/), ...paused];
}

function panels() {
  const losses = named(/^loss\/(rl|ce|ref_kl)$/).filter((each) => runs.some((run) => run.curves[each.metric]?.some(([, v]) => v !== 0)));
  const evals = named(/^eval\/(.+)\/all\/reward\/mean$/);
  const held = evals.map((each) => ({ ...each, label: evals.length > 1 ? `${each.label} held out` : "held out", dots: true }));
  const terms = termsByEnv();
  const loads = named(/^router\/load\/(max|min)$/);
  const lengths = byEnv(/^train\/(.+)\/all\/num_output_tokens\/mean$/, "tokens");
  return [
    { title: "Reward", series: [...byEnv(/^train\/(.+)\/all\/reward\/mean$/, "sampled"), ...held], note: lostOf },
    ...(terms.length ? [{ title: "Reward terms", series: terms }] : []),
    ...(lengths.length ? [{ title: "Reply length", series: lengths }] : []),
    { title: "Loss", series: losses.length ? losses : named(/^(loss)\/mean$/) },
    { title: "Entropy", series: byEnv(/^entropy\/(.+)\/mean$/) },
    { title: "Mismatch KL", series: byEnv(/^mismatch_kl\/(.+)\/mean$/) },
    ...(loads.length ? [{ title: "Load of experts", series: loads }] : []),
    { title: "Seconds of a step", series: secondsOfAStep() },
  ];
}

// The terms whose weighted sum is the reward; with the env's name where there are several.
function termsByEnv() {
  const found = metricNames().flatMap((metric) => {
    const match = metric.match(/^train\/(.+)\/all\/rewards\/(.+)\/mean$/);
    return match && !["agg", "all"].includes(match[1]) ? [{ metric, env: match[1], term: match[2] }] : [];
  });
  const isMixed = new Set(found.map((each) => each.env)).size > 1;
  return found.map(({ metric, env, term }) => ({ metric, label: isMixed ? `${env} ${term}` : term }));
}

const NARROWEST = 142; // CSS pixels of a chart

// The shares of rollouts that the reward does not show: it is the mean of those that ended well.
const LOST = [["failed", "has_error"], ["truncated", "is_truncated"], ["dropped", "is_dropped"], ["cancelled", "cancelled"]];

// At a step, or at the newest one that has them.
function lostOf(step) {
  const texts = runs.flatMap((run, index) => {
    const parts = LOST.flatMap(([word, key]) => {
      const points = run.curves[`train/agg/all/${key}/mean`] ?? [];
      const value = (step === null ? points.at(-1) : points.find(([x]) => x === step))?.[1];
      return value === undefined || value === null || (word === "cancelled" && !value) ? [] : [`${word} ${percent(value)}`];
    });
    parts.push(...heldOutFailures(run, step));
    const name = runs.length > 1 ? `${runLetter(index)} ` : "";
    return parts.length ? [`${name}${parts.join(", ")}`] : [];
  });
  return texts.join("; ");
}

// Failed rollouts of an evaluation count as reward 0: the share of each env that has some, at the last evaluation up to a step.
function heldOutFailures(run, step) {
  const metrics = Object.keys(run.curves).filter((name) => /^eval\/.+\/all\/has_error\/mean$/.test(name));
  return metrics.flatMap((metric) => {
    const value = run.curves[metric].findLast(([x]) => step === null || x <= step)?.[1];
    const env = metrics.length > 1 ? `${metric.split("/")[1]} ` : "";
    return value ? [`${env}held out failed ${percent(value)}`] : [];
  });
}

const percent = (share) => (share > 0 && share < 0.0005 ? "<0.1%" : `${(100 * share).toFixed(1)}%`);

function drawCurves() {
  if ($("curves").hidden || isMenuOpen()) return; // closing the menu draws them
  const wanted = panels(), choices = metricNames();
  if (choices.length) {
    const first = choices.find((name) => name.startsWith("plugin/")) ?? choices.find((name) => name === "off_policy/mean") ?? choices[0];
    const metric = choices.includes(chosenMetric) ? chosenMetric : first;
    wanted.push({ title: metricMenu(metric), series: [{ metric, label: "" }] });
  }
  const boxes = wanted.map(() => el("div", { class: "chart" }));
  const ages = runs.some((run) => agesOf(run).size) ? [el("div", { class: "chart", id: "ages" })] : [];
  const charts = [...boxes, el("div", { class: "chart", id: "histogram" }), ...ages];
  const rows = Math.ceil((charts.length * NARROWEST) / $("curves").clientWidth);
  $("curves").style.setProperty("--columns", Math.ceil(charts.length / rows)); // rows of equal length
  $("curves").replaceChildren(...charts);
  wanted.forEach((panel, index) => chart(boxes[index], panel.title, panel.series, panel.note)); // now they have a width
  drawHistogram();
  drawAges();
}

const MOST_CHOICES = 200; // entries of the menu: a run may have thousands of metrics

const isMenuOpen = () => document.activeElement?.closest("#curves .menu") != null;

// A field that finds a metric by parts of its name, in any order.
function metricMenu(metric) {
  const field = el("input", { type: "search", role: "combobox", "aria-label": "metric", "aria-expanded": "false", "aria-controls": "metrics", autocomplete: "off", spellcheck: "false", title: `${metric}: type to find another metric` });
  const list = el("ul", { id: "metrics", role: "listbox", hidden: "" });
  field.value = metric;
  let found = [], active = 0;
  const mark = (index) => {
    active = Math.max(0, Math.min(list.children.length - 1, index));
    [...list.children].forEach((entry, place) => entry.setAttribute("aria-selected", String(place === active)));
    list.children[active]?.scrollIntoView({ block: "nearest" });
  };
  const show = (text) => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    found = metricNames().filter((name) => words.every((word) => name.toLowerCase().includes(word)));
    const entries = found.slice(0, MOST_CHOICES).map((name) => el("li", { role: "option", onmousedown: (event) => { event.preventDefault(); choose(name); } }, name));
    const rest = found.length - entries.length;
    const note = rest > 0 ? `${plural(rest, "more metric")}: type a part of the name` : found.length ? null : "no metric has these words";
    list.replaceChildren(...entries);
    if (note) list.append(el("li", { class: "off", "aria-disabled": "true" }, note));
    list.hidden = false;
    list.className = field.getBoundingClientRect().left > innerWidth / 2 ? "from-right" : "";
    field.setAttribute("aria-expanded", "true");
    mark(text ? 0 : Math.max(0, found.indexOf(metric)));
  };
  const choose = (name) => { chosenMetric = name; field.blur(); };
  field.addEventListener("focus", () => { field.select(); show(""); });
  field.addEventListener("input", () => show(field.value));
  field.addEventListener("blur", () => setTimeout(drawCurves)); // after the focus has moved
  field.addEventListener("keydown", (event) => {
    const way = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (way) { event.preventDefault(); mark(active + way); }
    if (event.key === "Enter" && found[active]) choose(found[active]);
  });
  return el("div", { class: "menu" }, field, list);
}

// Means of the last `smoothing` steps up to each point.
function smoothed(points) {
  let first = 0, sum = 0;
  return points.map(([x, y], index) => {
    sum += y;
    while (points[first][0] <= x - smoothing) sum -= points[first++][1];
    return [x, sum / (index - first + 1)];
  });
}

// step -> shares of its batch that are 0, 1, 2 ... versions behind.
function agesOf(run) {
  const found = new Map();
  for (const [metric, points] of Object.entries(run.curves)) {
    const match = metric.match(/^off_policy\/behind\/(\d+)$/);
    for (const [step, share] of match ? points : []) {
      if (!found.has(step)) found.set(step, []);
      found.get(step)[Number(match[1])] = share;
    }
  }
  return found;
}

let ageStep = null;

// One batch at a time: a slider, at the newest batch until it is moved. Of two runs, bars side by side.
function drawAges() {
  const box = $("ages");
  if (!box) return;
  const all = runs.map(agesOf);
  const steps = [...new Set(all.flatMap((each) => [...each.keys()]))].sort((a, b) => a - b);
  const newest = steps.length - 1;
  const [, most] = bounded(all.flatMap((each) => [...each.values()].map((shares) => shares.length)));
  const said = el("output", {}), bars = el("div", { class: "bars" });
  const show = (step) => {
    said.textContent = `batch ${step} `;
    const cells = Array.from({ length: most }, (_, behind) => all.map((each, index) => {
      const share = each.get(step)?.[behind] ?? 0;
      const name = runs.length > 1 ? `${runLetter(index)}: ` : "";
      const title = `${name}${percent(share)} of batch ${step}: ${plural(behind, "version")} behind`;
      const color = runs.length > 1 ? `;background:${runColor(index)}` : "";
      return el("span", { title, role: "img", "aria-label": title }, el("i", { style: `height:${100 * share}%${color}` }));
    }));
    bars.replaceChildren(...cells.flat());
  };
  const place = steps.includes(ageStep) ? steps.indexOf(ageStep) : newest;
  const slider = el("input", { type: "range", min: 0, max: newest, value: place, "aria-label": "batch" });
  slider.addEventListener("input", () => {
    const at = Number(slider.value);
    ageStep = at === newest ? null : steps[at]; // the newest batch is followed
    show(steps[at]);
  });
  show(steps[place]);
  box.replaceChildren(el("h2", {}, "Versions behind"), el("div", { class: "average" }, said, slider), bars,
    el("div", { class: "ends" }, el("span", {}, "0"), el("span", {}, String(most - 1))));
}

// Of several runs, each has its color, and the series of one run differ by their dashes.
function seriesOf(each, index) {
  return runs.flatMap((run, number) => {
    const raw = (run.curves[each.metric] ?? []).filter(([, value]) => value !== null);
    if (!raw.length) return [];
    const points = smoothing && !each.dots ? smoothed(raw) : raw;
    if (runs.length === 1) return [{ ...each, raw, points, color: LINES[index % LINES.length], dash: "none" }];
    const lines = each.dots ? 0 : index;
    return [{ ...each, label: `${each.label} ${runLetter(number)}`, raw, points, color: runColor(number), dash: DASHES[lines % DASHES.length] }];
  });
}

// Values of one axis with their labels, all with the same power of ten: 0.606e−6, not 6.06e−7 beside 0.00000121.
function axisLabels(values) {
  const most = Math.max(...values.map(Math.abs));
  const power = most >= 1e6 || (most && most < 1e-3) ? Math.floor(Math.log10(most)) : 0;
  const unit = power ? `e${power}`.replace("-", "−") : "";
  return values.map((each) => [each, number(each / 10 ** power, 3) + (each ? unit : "")]);
}

// note: text of a step under the legend; null: the newest step.
function chart(box, title, series, note = null) {
  const drawn = series.flatMap(seriesOf);
  const all = drawn.flatMap((each) => each.raw);
  const legend = el("div", { class: "legend" }), below = el("div", { class: "lost" });
  box.append(el("h2", {}, title), legend, ...(note ? [below] : []));
  if (!all.length) return box.append(el("p", { class: "empty" }, "nothing recorded"));
  const xs = all.map(([x]) => x), ys = all.map(([, y]) => y);
  const [x0, newest] = bounded(xs), x1 = Math.max(newest, x0 + 1);
  let [y0, y1] = bounded(ys);
  if (y0 === y1) [y0, y1] = [y0 - (Math.abs(y0) || 1) * 0.5, y1 + (Math.abs(y1) || 1) * 0.5];
  const labels = axisLabels([y0, (y0 + y1) / 2, y1].map((y) => (Math.abs(y) < (y1 - y0) * 1e-6 ? 0 : y)));
  const L = 10 + 6 * Math.max(...labels.map(([, label]) => label.length)), R = 8, T = 6, B = 16; // 6 px a digit
  const W = Math.max(130, box.clientWidth - 20), H = parseFloat(getComputedStyle(box).getPropertyValue("--chart"));
  const X = (x) => L + ((x - x0) / (x1 - x0)) * (W - L - R);
  const Y = (y) => H - B - ((y - y0) / (y1 - y0)) * (H - T - B);
  const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "aria-label": series.map((e) => e.metric).join(", ") });
  for (const [y, label] of labels) {
    picture.append(svg("line", { class: "grid", x1: L, x2: W - R, y1: Y(y), y2: Y(y) }));
    picture.append(svg("text", { x: L - 4, y: Y(y) + 3, "text-anchor": "end" }, label));
  }
  for (const x of [x0, x1]) picture.append(svg("text", { x: X(x), y: H - 3, "text-anchor": x === x0 ? "start" : "end" }, x));
  const line = (points, color, more) => svg("polyline", { points: points.map(([x, y]) => `${X(x)},${Y(y)}`).join(" "), fill: "none", stroke: color, "vector-effect": "non-scaling-stroke", ...more });
  for (const { raw, points, color, dots, dash } of drawn) {
    if (dots || points.length === 1)
      for (const [x, y] of points) picture.append(svg("circle", { cx: X(x), cy: Y(y), r: 3, fill: color, stroke: color }));
    if (dots) continue;
    if (points !== raw) picture.append(line(raw, color, { class: "raw", "stroke-width": 1, opacity: 0.3 }));
    picture.append(line(points, color, { "stroke-width": 1.6, "stroke-dasharray": dash }));
  }
  const mark = svg("line", { class: "grid", y1: T, y2: H - B, visibility: "hidden" });
  picture.append(mark);
  const say = (step) => {
    if (note) below.textContent = note(step);
    legend.replaceChildren(
      step === null ? "" : `step ${step}  `,
      ...drawn.flatMap((each) => {
        const value = step === null ? each.points.at(-1)[1] : each.points.find(([x]) => x === step)?.[1];
        const key = each.dots ? "● " : each.dash === "none" ? "━ " : "┅ ";
        const average = each.points === each.raw ? "" : "⌀ ";
        return [el("span", { class: "entry" }, el("span", { style: `color:${each.color}` }, key), `${each.label} ${average}${number(value)}`), " "];
      }),
    );
  };
  const stepAt = (event) => {
    const place = picture.getBoundingClientRect();
    const x = x0 + (((event.clientX - place.left) / place.width) * W - L) / (W - L - R) * (x1 - x0);
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
}

const BINS = 20;

// A click on a bar keeps the rewards in it.
function drawHistogram() {
  const box = $("histogram");
  if (!box) return;
  const rewards = order.map((row) => columns.reward[row]);
  const [low, high] = bounded(rewards);
  const width = (high - low) / BINS || 1;
  const counts = new Array(high > low ? BINS : 1).fill(0);
  for (const reward of rewards) counts[Math.min(counts.length - 1, Math.floor((reward - low) / width))]++;
  const most = Math.max(...counts);
  const bars = counts.map((count, bin) => {
    const from = low + bin * width, to = counts.length === 1 ? high : from + width;
    const title = `${count} of ${rewards.length}: reward ${number(from, 3)} to ${number(to, 3)}`;
    return el("button", { title, "aria-label": title, onclick: () => keepRewards(from, to) }, el("i", { style: `height:${most ? (count / most) * 100 : 0}%` }));
  });
  const average = rewards.length ? `mean ${number(mean(rewards), 3)} of ${plural(rewards.length, "rollout")}` : "no rollouts";
  box.replaceChildren(el("h2", {}, "Reward histogram"), el("div", { class: "average" }, average), el("div", { class: "bars" }, ...bars),
    el("div", { class: "ends" }, el("span", {}, rewards.length ? number(low, 3) : ""), el("span", {}, rewards.length ? number(high, 3) : "")));
}

// Not Math.min(...values): a call takes about 100,000 arguments, and a long run has more points.
const bounded = (values) => values.reduce(([low, high], each) => [Math.min(low, each), Math.max(high, each)], [Infinity, -Infinity]);

function keepRewards(from, to) {
  $("f-min").value = Number(from.toPrecision(6));
  $("f-max").value = Number(to.toPrecision(6));
  refilter();
}
