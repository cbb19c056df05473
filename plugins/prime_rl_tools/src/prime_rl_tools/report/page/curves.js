// Curves of the metrics, the histogram of the rewards that pass the filters, and that of the versions
// that a batch is behind.

const LINES = ["#2f78c8", "#d07a00", "#2a9562", "#a655ad", "#8a6d3b", "#c0445c"];
let chosenMetric = null;

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

function panels() {
  const losses = named(/^loss\/(rl|ce|ref_kl)$/).filter((each) => runs.some((run) => run.curves[each.metric]?.some(([, v]) => v !== 0)));
  const evals = named(/^eval\/(.+)\/all\/reward\/mean$/);
  const held = evals.map((each) => ({ ...each, label: evals.length > 1 ? `${each.label} held out` : "held out", dots: true }));
  return [
    { title: "Reward", series: [...byEnv(/^train\/(.+)\/all\/reward\/mean$/, "sampled"), ...held], note: lostOf },
    { title: "Loss", series: losses.length ? losses : named(/^(loss)\/mean$/) },
    { title: "Entropy", series: byEnv(/^entropy\/(.+)\/mean$/) },
    { title: "Mismatch KL", series: byEnv(/^mismatch_kl\/(.+)\/mean$/) },
  ];
}

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
    const name = runs.length > 1 ? `${"AB"[index] ?? index + 1} ` : "";
    return parts.length ? [`${name}of rollouts ${parts.join(", ")}`] : [];
  });
  return texts.join("; ");
}

const percent = (share) => (share > 0 && share < 0.0005 ? "<0.1%" : `${(100 * share).toFixed(1)}%`);

function drawCurves() {
  if ($("curves").hidden) return;
  const wanted = panels(), choices = metricNames();
  if (choices.length) {
    const select = el("select", { "aria-label": "metric" }, ...choices.map((name) => el("option", {}, name)));
    const first = choices.find((name) => name.startsWith("plugin/")) ?? choices.find((name) => name === "off_policy/mean") ?? choices[0];
    select.value = choices.includes(chosenMetric) ? chosenMetric : first;
    select.addEventListener("change", () => { chosenMetric = select.value; drawCurves(); $("curves").querySelector("select").focus(); });
    wanted.push({ title: select, series: [{ metric: select.value, label: "" }] });
  }
  const boxes = wanted.map(() => el("div", { class: "chart" }));
  const ages = runs.some((run) => agesOf(run).size) ? [el("div", { class: "chart", id: "ages" })] : [];
  $("curves").replaceChildren(...boxes, el("div", { class: "chart", id: "histogram" }), ...ages);
  wanted.forEach((panel, index) => chart(boxes[index], panel.title, panel.series, panel.note)); // now they have a width
  drawHistogram();
  drawAges();
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
  const most = Math.max(...all.flatMap((each) => [...each.values()].map((shares) => shares.length)));
  const said = el("output", {}), bars = el("div", { class: "bars" });
  const show = (step) => {
    said.textContent = `batch ${step} `;
    const cells = Array.from({ length: most }, (_, behind) => all.map((each, index) => {
      const share = each.get(step)?.[behind] ?? 0;
      const name = runs.length > 1 ? `${"AB"[index] ?? index + 1}: ` : "";
      const title = `${name}${percent(share)} of batch ${step}: ${behind} versions behind`;
      return el("span", { title, role: "img", "aria-label": title }, el("i", { style: `height:${100 * share}%;opacity:${index ? 0.5 : 1}` }));
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

// Of several runs: the first run's lines are solid, the others' are dashed.
function seriesOf(each, index) {
  return runs.flatMap((run, number) => {
    const points = (run.curves[each.metric] ?? []).filter(([, value]) => value !== null);
    const label = runs.length > 1 ? `${each.label} ${"AB"[number] ?? number + 1}` : each.label;
    return points.length ? [{ ...each, label, points, color: LINES[index % LINES.length], dash: number ? "4 3" : null }] : [];
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
  const all = drawn.flatMap((each) => each.points);
  const legend = el("div", { class: "legend" }), below = el("div", { class: "lost" });
  box.append(el("h2", {}, title), legend, ...(note ? [below] : []));
  if (!all.length) return box.append(el("p", { class: "empty" }, "nothing recorded"));
  const xs = all.map(([x]) => x), ys = all.map(([, y]) => y);
  const x0 = Math.min(...xs), x1 = Math.max(...xs, x0 + 1);
  let y0 = Math.min(...ys), y1 = Math.max(...ys);
  if (y0 === y1) [y0, y1] = [y0 - (Math.abs(y0) || 1) * 0.5, y1 + (Math.abs(y1) || 1) * 0.5];
  const labels = axisLabels([y0, (y0 + y1) / 2, y1].map((y) => (Math.abs(y) < (y1 - y0) * 1e-6 ? 0 : y)));
  const L = 10 + 6 * Math.max(...labels.map(([, label]) => label.length)), R = 8, T = 6, B = 16; // 6 px a digit
  const W = Math.max(130, box.clientWidth - 20), H = 104;
  const X = (x) => L + ((x - x0) / (x1 - x0)) * (W - L - R);
  const Y = (y) => H - B - ((y - y0) / (y1 - y0)) * (H - T - B);
  const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "aria-label": series.map((e) => e.metric).join(", ") });
  for (const [y, label] of labels) {
    picture.append(svg("line", { class: "grid", x1: L, x2: W - R, y1: Y(y), y2: Y(y) }));
    picture.append(svg("text", { x: L - 4, y: Y(y) + 3, "text-anchor": "end" }, label));
  }
  for (const x of [x0, x1]) picture.append(svg("text", { x: X(x), y: H - 3, "text-anchor": x === x0 ? "start" : "end" }, x));
  for (const { points, color, dots, dash } of drawn) {
    if (dots || points.length === 1)
      for (const [x, y] of points) picture.append(svg("circle", { cx: X(x), cy: Y(y), r: 3, fill: dash ? "none" : color, stroke: color }));
    if (!dots)
      picture.append(svg("polyline", { points: points.map(([x, y]) => `${X(x)},${Y(y)}`).join(" "), fill: "none", stroke: color, "stroke-width": 1.6, "stroke-dasharray": dash ?? "none", "vector-effect": "non-scaling-stroke" }));
  }
  const mark = svg("line", { class: "grid", y1: T, y2: H - B, visibility: "hidden" });
  picture.append(mark);
  const say = (step) => {
    if (note) below.textContent = note(step);
    legend.replaceChildren(
      step === null ? "" : `step ${step}  `,
      ...drawn.flatMap((each) => {
        const value = step === null ? each.points.at(-1)[1] : each.points.find(([x]) => x === step)?.[1];
        return [el("span", { style: `color:${each.color}` }, each.dots ? (each.dash ? "○ " : "● ") : each.dash ? "┅ " : "━ "), `${each.label} ${number(value)}  `];
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
  const average = rewards.length ? `mean ${number(mean(rewards), 3)} of ${rewards.length.toLocaleString("en")} rollouts` : "no rollouts";
  box.replaceChildren(el("h2", {}, "Reward histogram"), el("div", { class: "average" }, average), el("div", { class: "bars" }, ...bars),
    el("div", { class: "ends" }, el("span", {}, rewards.length ? number(low, 3) : ""), el("span", {}, rewards.length ? number(high, 3) : "")));
}

const bounded = (values) => values.reduce(([low, high], each) => [Math.min(low, each), Math.max(high, each)], [Infinity, -Infinity]);

function keepRewards(from, to) {
  $("f-min").value = Number(from.toPrecision(6));
  $("f-max").value = Number(to.toPrecision(6));
  refilter();
}
