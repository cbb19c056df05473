// A page that a server shows: it waits for what is new, and asks for the tokens that are looked at.

const readChunk = async (id) => answered(await fetch(id));

async function answered(response) {
  if (!response.ok) throw new Error(`${response.status} ${await response.text()}`);
  return response.json();
}

// The first call answers at once, a later one when a run has written something.
async function load() {
  const have = runs.map((run) => run.has);
  const deltas = await answered(await fetch(`facts?have=${JSON.stringify(have)}`));
  if (deltas.some((delta) => delta.reset)) return location.reload(); // resumed from an earlier step
  deltas.forEach((delta, run) => ingest(run, delta));
  return deltas.length > 0;
}

async function follow() {
  $("freeze").hidden = false;
  for (;;) {
    try {
      if (await load()) grown();
      connected(true);
    } catch {
      connected(false);
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}
