// A page in one file: blocks of base64, gzip, JSON.

async function unpack(id) {
  const text = atob($(id).textContent.trim()), bytes = new Uint8Array(text.length);
  for (let n = 0; n < text.length; n++) bytes[n] = text.charCodeAt(n);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const readChunk = unpack;

async function load() {
  for (let run = 0; ; run++) {
    const id = run ? `facts-${run}` : "facts";
    if (!$(id)) return;
    ingest(run, await unpack(id));
  }
}

const follow = () => {};
