// The runs of the page. Their rollouts are rows of one table, which grows while a run goes on.

const runs = []; // facts, metrics and token texts of each run
const columns = { run: [], place: [] }; // one value per row; `place` within its chunk
const texts = { set: ["train", "held out"], env: [], agent: [], dropped: [], prompt: [] };
let size = 0;
const groups = new Map(), examples = new Map(); // key -> rows
const chunks = new Map();

const HELD_OUT = 1;
const runOf = (row) => runs[columns.run[row]];
const envOf = (row) => texts.env[columns.env[row]];
const algorithmOf = (row) => runOf(row).algorithms[envOf(row)]?.type ?? "";
const droppedOf = (row) => texts.dropped[columns.dropped[row]];
const isHeldOut = (row) => columns.set[row] === HELD_OUT;
const scaleAt = (row) => runOf(row).scaleOf[envOf(row)] ?? 1;
const pieceOf = (row, id) => runOf(row).pieces.get(id) ?? `⟨${id}⟩`;
const isReplay = () => "credit_again" in columns;
const anyRun = (property) => runs.some((run) => run[property]);

const byEpisode = (a, b) => columns.episode[a] - columns.episode[b] || a - b;
const groupKey = (row) => [columns.run[row], columns.set[row], columns.env[row], columns.group[row], isHeldOut(row) ? columns.step[row] : ""].join();
const exampleKey = (row) => [columns.run[row], columns.set[row], columns.env[row], columns.example[row], columns.agent[row]].join();
const siblingsOf = (row) => [...groups.get(groupKey(row))].sort(byEpisode);

// The rollouts of the same example at other times: one per group, the same member where there is one.
function historyOf(row) {
  const found = new Map();
  for (const other of examples.get(exampleKey(row))) {
    const key = groupKey(other), kept = found.get(key);
    if (other === row || kept === undefined || (kept !== row && columns.episode[other] === columns.episode[row])) found.set(key, other);
  }
  return [...found.values()].sort((a, b) => columns.step[a] - columns.step[b] || a - b);
}

function push(index, key, row) {
  const rows = index.get(key);
  if (rows) rows.push(row);
  else index.set(key, [row]);
}

// Take in what a run has added; `delta` has all of it the first time.
function ingest(index, delta) {
  const run = (runs[index] ??= { pieces: new Map(), curves: {} });
  const { table, pieces, curves, scales, ...facts } = delta;
  Object.assign(run, facts);
  pieces.ids.forEach((id, n) => run.pieces.set(id, pieces.texts[n]));
  for (const [metric, points] of Object.entries(curves)) addPoints((run.curves[metric] ??= []), points);
  run.scaleOf = Object.fromEntries(table.texts.env.map((env, n) => [env, scales[n]]));
  const numbers = Object.fromEntries(Object.entries(table.texts).map(([name, values]) => [name, values.map((value) => numberOf(name, value))]));
  const added = table.columns.step?.length ?? 0;
  for (const [name, values] of Object.entries(table.columns)) {
    const column = (columns[name] ??= new Array(size).fill(null));
    for (const value of values) column.push(name in numbers ? numbers[name][value] : value);
  }
  for (const row of Array(added).keys()) addRow(index, size + row);
  size += added;
}

const codes = {};

function numberOf(name, value) {
  const known = (codes[name] ??= new Map(texts[name].map((text, n) => [text, n])));
  if (!known.has(value)) known.set(value, texts[name].push(value) - 1);
  return known.get(value);
}

const last = {}; // run -> its row before

function addRow(run, row) {
  const before = last[run];
  columns.run.push(run);
  columns.place.push(before !== undefined && columns.chunk[before] === columns.chunk[row] ? columns.place[before] + 1 : 0);
  last[run] = row;
  push(groups, groupKey(row), row);
  push(examples, exampleKey(row), row);
}

function addPoints(points, added) {
  const isLater = !points.length || !added.length || added[0][0] > points.at(-1)[0];
  if (isLater) return points.push(...added);
  const all = new Map([...points, ...added]);
  points.splice(0, points.length, ...[...all].sort(([a], [b]) => a - b));
}

async function rolloutOf(row) {
  const key = `chunk-${columns.run[row] ? `${columns.run[row]}-` : ""}${columns.chunk[row]}`;
  if (!chunks.has(key)) {
    if (chunks.size >= 32) chunks.delete(chunks.keys().next().value);
    chunks.set(key, readChunk(key)); // frozen.js or live.js
  }
  return (await chunks.get(key))[columns.place[row]];
}
