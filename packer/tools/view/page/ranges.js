// Bytes of files by Range requests of at most 1 MB; bytes that were read are kept, and neighbouring ranges are one
// request.

export const MOST = 1_000_000;
const BLOCK = 2048, GAP = 8, MOST_BLOCKS = 16_384, WHOLE_FILE = 16 << 20, AT_ONCE = 6;

/** Runs a limited number of tasks at once; a task that is aborted before its turn never begins. */
export class Turns {
  #waiting = [];
  #free;

  constructor(atOnce) {
    this.#free = atOnce;
  }

  async take(work, signal) {
    if (this.#free > 0) this.#free--;
    else await new Promise((resolve) => this.#waiting.push(resolve));
    try {
      signal?.throwIfAborted();
      return await work();
    } finally {
      const next = this.#waiting.shift();
      if (next) next();
      else this.#free++;
    }
  }
}

const turns = new Turns(AT_ONCE);

/** The error for a server's refusal, with the server's message. */
export async function failure(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    const said = (await response.json()).error;
    if (said?.message) message = said.message;
  } catch { /* not a document of packer */ }
  return new Error(message);
}

export async function getJson(url, signal) {
  const response = await fetch(url, { signal, credentials: "same-origin" });
  if (!response.ok) throw await failure(response);
  return response.json();
}

/** Bytes first…end of a file, in one request. Aborts if the server sends the whole of a large file. */
async function fetchRange(url, first, end, signal) {
  const response = await fetch(url, { headers: { Range: `bytes=${first}-${end - 1}` }, signal, credentials: "same-origin" });
  if (response.status === 416) return new Uint8Array();
  if (!response.ok) throw await failure(response);
  if (response.status === 206) return new Uint8Array(await response.arrayBuffer());
  if (!(Number(response.headers.get("Content-Length") ?? Infinity) <= WHOLE_FILE)) {
    await response.body?.cancel();
    throw new Error("This web server does not answer Range requests, which this page needs to read a part of a large " +
                    "file. Serve it with one that does (nginx, Apache, Caddy, an object store, packer view).");
  }
  return new Uint8Array(await response.arrayBuffer()).subarray(first, end);
}

/** Bytes first…end of a file, in requests of 1 MB, without caching. */
export async function readOnce(url, first, end, signal) {
  const whole = new Uint8Array(end - first);
  const parts = [];
  for (let at = first; at < end; at += MOST) {
    const until = Math.min(at + MOST, end);
    parts.push(turns.take(() => fetchRange(url, at, until, signal), signal).then((part) => {
      if (part.length !== until - at) throw new Error(`${part.length} bytes of the ${until - at} at ${at} of ${url}`);
      whole.set(part, at - first);
    }));
  }
  await Promise.all(parts);
  return whole;
}

/** The first bytes of a file, at most `most`. */
export const readStart = (url, most, signal) => turns.take(() => fetchRange(url, 0, most, signal), signal);

/** Blocks of files, read on first use; the oldest are dropped. */
export class Blocks {
  #blocks = new Map();

  /** The bytes of each [first, end) of a file. Neighbouring missing blocks are requested together. */
  async read(url, spans, signal) {
    const missing = new Set();
    for (const [first, end] of spans)
      for (let block = Math.floor(first / BLOCK); block * BLOCK < end; block++)
        if (!this.#blocks.has(`${block} ${url}`)) missing.add(block);
    this.#ask(url, [...missing].sort((a, b) => a - b));
    return Promise.all(spans.map(([first, end]) => this.#joined(url, first, end)));
  }

  #ask(url, missing) {
    for (let from = 0; from < missing.length;) {
      let to = from + 1;
      while (to < missing.length && missing[to] - missing[to - 1] <= GAP && (missing[to] + 1 - missing[from]) * BLOCK <= MOST) to++;
      const first = missing[from], end = missing[to - 1] + 1;
      const run = turns.take(() => fetchRange(url, first * BLOCK, end * BLOCK));
      for (let block = first; block < end; block++) {
        const name = `${block} ${url}`;
        if (this.#blocks.has(name)) continue;
        const part = run.then((bytes) => bytes.slice((block - first) * BLOCK, (block - first + 1) * BLOCK));
        part.catch(() => this.#blocks.delete(name)); // requested again next time
        this.#blocks.set(name, part);
      }
      from = to;
    }
    for (const name of this.#blocks.keys()) {
      if (this.#blocks.size <= MOST_BLOCKS) break;
      this.#blocks.delete(name);
    }
  }

  async #joined(url, first, end) {
    const whole = new Uint8Array(end - first), parts = [];
    for (let block = Math.floor(first / BLOCK); block * BLOCK < end; block++)
      parts.push([block * BLOCK, this.#blocks.get(`${block} ${url}`)]); // take all at once, because later requests may drop some
    for (const [start, part] of parts) {
      const bytes = await part;
      if (start + bytes.length < Math.min(end, start + BLOCK))
        throw new Error(`${url} is shorter than the documents say: it has no bytes ${first}–${end}`);
      const from = Math.max(first - start, 0), to = Math.min(end - start, BLOCK);
      whole.set(bytes.subarray(from, to), start + from - first);
    }
    return whole;
  }
}
