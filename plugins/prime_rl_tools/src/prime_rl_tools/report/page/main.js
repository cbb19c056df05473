// Keys, buttons, and the start.

function toggle(value) {
  mode = mode === value ? "one" : value;
  drawHead();
  drawRows();
  drawDetail();
}

function toggleCurves() {
  $("curves").hidden = !$("curves").hidden;
  $("toggle-curves").setAttribute("aria-pressed", String(!$("curves").hidden));
  drawCurves();
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

// The evaluation before or after; of one rollout, the same example at the step before or after.
function toStep(by) {
  if (isHeldOutShown()) return slide(by);
  const past = historyOf(current);
  select(past[past.indexOf(current) + by] ?? current);
}

function nextColoring() {
  const keys = allowed().map(([key]) => key);
  recolor(keys[(keys.indexOf(coloring) + 1) % keys.length]);
}

function back() {
  if (isHeldOutShown()) toggleHeldOut(false);
  else if (cursor) { cursor.classList.remove("at"); cursor = null; drawCard(null); $("table").focus(); }
  else if (mode !== "one") toggle("one");
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
  [["}"], "the same example later, the next evaluation", () => toStep(1)],
  [["{"], "the same example earlier, the evaluation before", () => toStep(-1)],
  [["s"], "siblings side by side", () => toggle("side")],
  [["p"], "siblings as a tree: where they part", () => toggle("tree")],
  [["d"], "changes since the example was sampled before", () => toggle("diff")],
  [["v"], "held-out prompts by version", () => toggleHeldOut()],
  [["m"], "color by the next measure", nextColoring],
  [["/"], "search in what was sampled", () => $("f-text").focus()],
  [["e"], "export what passes the filters", exportSelection],
  [["c"], "curves", toggleCurves],
  [["t"], "light or dark", toggleTheme],
  [["Escape"], "back", back],
  [["?"], "this help", () => $("help").showModal()],
];

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  if (event.target.matches("input:not([type=range]), select")) {
    if (event.key === "Escape") $("table").focus();
    return;
  }
  if (event.key === "Enter" && event.target.matches("button, summary")) return;
  if (event.target.matches("input") && event.key.startsWith("Arrow")) return; // the slider's own keys
  const found = KEYS.find(([keys]) => keys.includes(event.key));
  if (!found) return;
  event.preventDefault();
  found[2]();
});

function wire() {
  $("filters").addEventListener("input", (event) => (event.target.id === "f-text" ? searchAll() : refilter()));
  $("filters").addEventListener("reset", () => setTimeout(searchAll));
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("body").addEventListener("scroll", drawRows);
  $("rows").addEventListener("click", (event) => { const row = event.target.closest(".row"); if (!row) return; select(Number(row.dataset.row), false); $("table").focus({ preventScroll: true }); bringDetail(); });
  $("export").addEventListener("click", exportSelection);
  $("smoothing").addEventListener("change", () => { smoothing = Number($("smoothing").value); drawCurves(); });
  $("toggle-curves").addEventListener("click", toggleCurves);
  $("toggle-heldout").addEventListener("click", () => toggleHeldOut());
  $("toggle-theme").addEventListener("click", toggleTheme);
  $("open-help").addEventListener("click", () => $("help").showModal());
  const names = { ArrowDown: "↓", ArrowUp: "↑", ArrowRight: "→", ArrowLeft: "←", Escape: "Esc" };
  $("keys").replaceChildren(...KEYS.flatMap(([keys, what]) => [el("dt", {}, keys.map((key) => names[key] ?? key).join(" ")), el("dd", {}, what)]));
  new ResizeObserver(() => { drawHead(); drawRows(); }).observe($("body"));
  window.addEventListener("resize", drawCurves);
}

function about() {
  const described = runs.map((run, index) => {
    const algorithms = Object.entries(run.algorithms).map(([env, { type, settings }]) => {
      const again = run.algorithms_again?.[env]?.type;
      return el("span", { title: JSON.stringify(settings) }, `${env}: `, el("b", {}, again ? `${type} → ${again}` : type), "  ");
    });
    const notes = [!run.has_tokenizer && size && "no tokenizer found: tokens show as numbers", !run.has_exports && "no token export: trainer columns are absent", ...run.problems].filter(Boolean);
    const state = run.state === "running" ? `step ${run.step} of ${run.max_steps}, ` : "";
    const name = runs.length > 1 ? el("b", { style: `color:${runColor(index)}` }, `${runLetter(index)} ${run.name}  `) : "";
    return el("div", {}, name, ...algorithms, `${state}model ${run.model}, loss ${run.loss}, seed ${run.seed}`, notes.length ? ` (${notes.join("; ")})` : "",
      ...run.verdicts.map(({ env, finding, evidence, advice }) => el("details", { class: "verdict" }, el("summary", {}, `${env ? `${env}: ` : ""}${finding}`), el("div", {}, `found: ${evidence}`), el("div", {}, `change: ${advice}`))));
  });
  const differs = runs[0].differs ?? [];
  if (runs.length > 1)
    described.push(el("details", { class: "differs" }, el("summary", {}, `${plural(differs.length, "key")} of the config ${differs.length === 1 ? "differs" : "differ"}`),
      el("table", {}, ...differs.map(([key, ...values]) => el("tr", {}, el("th", {}, key), ...values.map((value) => el("td", {}, value)))))));
  $("name").textContent = runs.length > 1 ? "A and B" : runs[0].name;
  $("about").replaceChildren(...described);
  $("toggle-heldout").hidden = !versionsOf().length;
}

function connected(is) {
  const isRunning = runs.some((run) => run.state === "running");
  $("live").hidden = false;
  $("live").className = is ? (isRunning ? "on" : "") : "lost";
  $("live").textContent = is ? (isRunning ? "live" : runs[0].state) : "not connected: prime-rl watch has ended";
}

// A run has written something: draw it, and leave what is being read where it is.
function grown() {
  about();
  fillFilters();
  drawHead();
  drawCurves();
  refilter();
  if (current < 0 && size) select(order[0] ?? 0);
  else if (isHeldOutShown()) drawHeldOut();
}

async function start() {
  try { const kept = localStorage.getItem("prime-rl-theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* as above */ }
  await load();
  if (anyRun("has_references") && columns.credit?.every((credit) => !credit)) coloring = "reference";
  about();
  wire();
  fillFilters();
  drawHead();
  refilter();
  drawCurves();
  const asked = Number(location.hash.match(/^#rollout-(\d+)$/)?.[1] ?? order[0]);
  if (size && asked !== order[0]) bringDetail(); // a link to one rollout
  if (size) await select(Math.min(asked, size - 1));
  else $("detail").replaceChildren(el("p", { class: "hint" }, "No rollouts are saved: orchestrator.save_rollouts is off, or no step was finished."));
  $("table").focus({ preventScroll: true });
  document.documentElement.dataset.ready = "true";
  follow();
}

start();
