// A set by its documents: columns, orders and bytes, for both `packer view` and exports.

import { crc32c } from "./bytes.js";
import { Blocks, failure, getJson, readOnce, readStart, Turns } from "./ranges.js";

const TYPES = {
  "|u1": Uint8Array, "<u2": Uint16Array, "<u4": Uint32Array, "<u8": BigUint64Array, "<i4": Int32Array,
  "<i8": BigInt64Array, "<f4": Float32Array, "<f8": Float64Array,
};
const PROCESSES = { 0xc0: "baseline", 0xc1: "extended", 0xc2: "progressive", 0xc3: "lossless" };
const MOST_SHOWN = 256 << 20, MOST_IN_GRID = 1_000_000; // of one field, in memory
const MOST_SCANNED = 1_000_000; // numbers of an order that are searched for a sample
const POLL_MS = 400, PROBES = 8;
const LARGE = 400; // pixels; larger pictures need more than thumbnails
const MOST_SEARCHED = 500_000, SEARCHED_AT_ONCE = 20_000; // keys
const images = new Turns(4);

export async function openSet() {
  const view = await getJson("view.json");
  if (view.format !== 1) throw new Error(`view.json has the format ${view.format}, this page reads 1`);
  const classes = view.classes ?? (view.classes_url ? await getJson(view.classes_url) : []);
  const blocks = new Blocks();
  const splits = new Map(Object.entries(view.splits).map(([name, split]) => [name, new Split(view, classes, name, split, blocks)]));
  return { view, classes, splits };
}

class Column {
  constructor(document, blocks) {
    this.length = document.length;
    this.#document = document;
    this.#blocks = blocks;
    this.#type = TYPES[document.dtype];
    if (!this.#type) throw new Error(`a column of ${document.dtype}`);
  }
  #document;
  #blocks;
  #type;

  /** For each [first, end) the values. */
  async spans(spans) {
    const { url, start } = this.#document, size = this.#type.BYTES_PER_ELEMENT;
    const parts = await this.#blocks.read(url, spans.map(([first, end]) => [start + first * size, start + end * size]));
    return parts.map((bytes) => new this.#type(bytes.buffer));
  }

  /** The values of samples, as plain numbers. */
  async at(indices) {
    return (await this.spans(indices.map((index) => [index, index + 1]))).map((values) => Number(values[0]));
  }
}

/** Sample numbers in some order, with its named runs. */
export class Order {
  constructor(name, document, column, total) {
    this.name = name;
    this.title = document?.title ?? name;
    this.count = document?.count ?? document?.values?.length ?? document?.length ?? total;
    this.runs = document?.runs ?? null;
    this.values = document?.values ?? null;
    this.#column = column;
  }
  #column;

  async numbers(first, end) {
    if (this.values) return this.values.slice(first, end);
    if (!this.#column) return Array.from({ length: end - first }, (_, i) => first + i);
    return Array.from((await this.#column.spans([[first, end]]))[0]);
  }

  /** The position of a sample in first…end; null if finding it needs more than 4 MB. */
  async position(index, first, end) {
    if (!this.#column && !this.values) return index >= first && index < end ? index : null;
    if (end - first > MOST_SCANNED) return null;
    const step = 200_000;
    for (let from = first; from < end; from += step) {
      const found = (await this.numbers(from, Math.min(from + step, end))).indexOf(index);
      if (found >= 0) return from + found;
    }
    return null;
  }
}

export class Split {
  constructor(view, classes, name, document, blocks) {
    Object.assign(this, { view, classes, name, document, blocks, samples: document.samples });
    this.columns = new Map(Object.entries(document.columns ?? {}).map(([name, column]) => [name, new Column(column, blocks)]));
  }
  #orders = new Map();

  get address() {
    return `${encodeURIComponent(this.name)}`;
  }

  /** The names of the orders, with their numbers of samples if known. */
  get orderNames() {
    const orders = Object.entries(this.document.orders ?? {}).filter(([, order]) => order === null || order.count !== 0);
    const names = orders.map(([name, order]) => ({ name, title: order?.title ?? name, count: order?.count ?? null }));
    return names.some(({ name }) => name === "stored") ? names : [{ name: "stored", title: "stored", count: this.samples }, ...names];
  }

  /** An order. progress(done, total) is called for an order that needs a read of every sample. */
  order(name, progress = () => {}) {
    if (!this.#orders.has(name)) {
      const made = this.#order(name, progress);
      made.catch(() => this.#orders.delete(name));
      this.#orders.set(name, made);
    }
    return this.#orders.get(name);
  }

  async #order(name, progress) {
    const orders = this.document.orders ?? {};
    let document = Object.hasOwn(orders, name) ? orders[name] : null; // the name may come from a link
    if (document === null && name !== "stored") throw new Error(`there is no order "${name}" in ${this.name}`);
    if (document?.pending) document = { title: document.title, ...(await finished(document.document, progress)) };
    return this.#opened(name, document);
  }

  async #opened(name, document) {
    if (document?.runs_url) document = { ...document, runs: await getJson(document.runs_url) };
    const column = document?.url ? new Column({ dtype: "<u4", start: 128, ...document }, this.blocks) : null;
    return new Order(name, document, column, this.samples);
  }

  /** Whether texts can be searched; without Python the search reads every key. */
  get isSearchable() {
    return Boolean(this.view.can?.where) || this.samples <= MOST_SEARCHED;
  }

  /** The samples that match an expression (`packer subset --where`) and a text, in an order and its runs. */
  async select({ where, search, order }, progress = () => {}) {
    if (!this.view.can?.where) return this.#searched(where, search, order, progress);
    const query = new URLSearchParams({ split: this.name, where, search, order });
    return this.#opened(order, await finished(`where.json?${query}`, progress));
  }

  /** The same without Python, for a text in keys and class names only: reads all keys, in parts. */
  async #searched(where, search, name, progress) {
    if (where) throw new Error("an exported page has no expressions; packer view SET has them");
    const order = await this.order(name), wanted = search.toLowerCase(), values = [], before = [0];
    const isOfClass = this.classes.map((name) => name.toLowerCase().includes(wanted));
    for (let first = 0; first < order.count; first += SEARCHED_AT_ONCE) {
      progress(first, order.count);
      const indices = await order.numbers(first, Math.min(first + SEARCHED_AT_ONCE, order.count));
      const [keys, labels] = await Promise.all([this.keys(indices), this.labels(indices)]);
      indices.forEach((index, i) => {
        if (keys[i].toLowerCase().includes(wanted) || isOfClass[labels[i]]) values.push(index);
        before.push(values.length);
      });
    }
    const runs = order.runs?.map(([run, first, number]) => [run, before[first], before[first + number] - before[first]]);
    return new Order(name, { title: order.title, values, runs }, null, this.samples);
  }

  async keys(indices) {
    const offsets = await this.columns.get("key.offset")?.spans(indices.map((index) => [index, index + 2]));
    if (!offsets) return indices.map((index) => `#${index}`);
    return this.#strings("key", offsets);
  }

  async #strings(name, offsets) {
    const spans = offsets.map(([first, end]) => [Number(first), Math.min(Number(end), Number(first) + 16_384)]);
    if (spans.some(([first, end]) => !(first <= end))) throw new Error(`the offsets of ${name} are not in order`);
    const texts = await this.columns.get(name).spans(spans);
    return texts.map((bytes) => new TextDecoder().decode(bytes));
  }

  async labels(indices) {
    return this.columns.has("label") ? this.columns.get("label").at(indices) : indices.map(() => -1);
  }

  /** A model's {label, score} for each sample; null without predictions. */
  async predictions(indices) {
    if (!this.columns.has("predicted")) return null;
    const [labels, scores] = await Promise.all(["predicted", "score"].map((name) => this.columns.get(name).at(indices)));
    return labels.map((label, i) => ({ label, score: scores[i] }));
  }

  className(label) {
    return label === null || label < 0 ? "" : (this.classes[label] ?? `class ${label}`);
  }

  /** The first position in the order of keys whose key begins with `prefix`; null if there is none. */
  async findKey(prefix) {
    const order = await this.order("key"), wanted = new TextEncoder().encode(prefix);
    const keyAt = async (position) => new TextEncoder().encode((await this.keys(await order.numbers(position, position + 1)))[0]);
    let low = 0, high = order.count; // the result is in low…high
    while (low < high) {
      const places = [...new Set(Array.from({ length: PROBES }, (_, i) => low + Math.floor(((high - low) * i) / PROBES)))]; // at once: a round trip costs more
      const isBelow = (await Promise.all(places.map(keyAt))).map((key) => compared(key, wanted) < 0);
      const first = isBelow.indexOf(false);
      if (first < 0) low = places.at(-1) + 1;
      else [low, high] = [first ? places[first - 1] + 1 : low, places[first]];
    }
    if (low >= order.count) return null;
    const found = await keyAt(low);
    return wanted.every((byte, i) => byte === found[i]) ? low : null;
  }

  /** The shards; a long list of them is a separate file. */
  #shards() {
    const { shards, shards_url: url } = this.document;
    return (this.#listed ??= shards || !url ? Promise.resolve(shards ?? []) : getJson(url));
  }
  #listed = null;

  /** The bytes of a field: {shard, offset, length}, shard as the documents have it; null where a sample lacks it or that
   * is not known. */
  async extent(index, field) {
    const columns = [`${field}.offset`, `${field}.length`, this.columns.has(`${field}.shard`) ? `${field}.shard` : "shard"];
    if (!columns.every((name) => this.columns.has(name))) return null;
    const [offset, length, shard] = (await Promise.all(columns.map((name) => this.columns.get(name).at([index])))).map(([value]) => value);
    return offset > Number.MAX_SAFE_INTEGER ? null : { shard: (await this.#shards())[shard], offset, length };
  }

  fieldUrl(index, field, as = "") {
    return `sample/${this.address}/${index}/${encodeURIComponent(field)}${as && `?as=${as}`}`;
  }

  /** The bytes of a field; null if a sample lacks it. size: their number, if known already. */
  async fieldBytes(index, field, { signal, most = MOST_SHOWN, as = "", size = null } = {}) {
    const extent = as ? null : await this.extent(index, field);
    const shard = extent?.shard;
    if (this.columns.has(`${field}.offset`) && !extent && !as) return null;
    if (extent && extent.length > most) throw Object.assign(new Error("large"), { bytes: extent.length });
    if (shard?.url) return readOnce(shard.url, extent.offset, extent.offset + extent.length, signal);
    if (!this.view.live) throw new Error("the shards are not part of this export");
    if (!as && (size ?? extent)) return readOnce(this.fieldUrl(index, field), 0, size ?? extent.length, signal);
    const response = await fetch(this.fieldUrl(index, field, as), { signal });
    if (!response.ok) throw await failure(response);
    return new Uint8Array(await response.arrayBuffer());
  }

  /** The first bytes of a field, at most `most` of them. */
  async head(index, field, most, signal) {
    const extent = await this.extent(index, field), shard = extent?.shard;
    if (shard?.url) return readOnce(shard.url, extent.offset, extent.offset + Math.min(extent.length, most), signal);
    if (!this.view.live) throw new Error("the shards are not part of this export");
    return readStart(this.fieldUrl(index, field), most, signal);
  }

  /** The address of a small picture for the grid, and a function that frees it. */
  async thumbnail(index, side, signal) {
    if (this.view.live) return { url: `thumb/${this.address}/${index}?side=${side}`, free: () => {} };
    return images.take(async () => {
      const data = (side <= LARGE ? await this.#picture(index) : null) ?? (await this.fieldBytes(index, "image", { signal, most: MOST_IN_GRID }));
      if (!data) throw new Error("no image");
      const url = URL.createObjectURL(new Blob([data], { type: mediaType(data) }));
      return { url, free: () => URL.revokeObjectURL(url) };
    }, signal);
  }

  /** The small picture of a sample in an export; null without one, or if the image could not be decoded. */
  async #picture(index) {
    const offsets = await this.columns.get("thumbnail.offset")?.spans([[index, index + 2]]);
    if (!offsets) return null;
    const [first, end] = Array.from(offsets[0], Number);
    if (!(first <= end && end - first <= MOST_IN_GRID)) throw new Error("the offsets of thumbnails are not in order");
    return first === end ? null : (await this.columns.get("thumbnail").spans([[first, end]]))[0];
  }

  /** The description of a sample: the document of `packer view`, or the same made from the columns. */
  async sample(index) {
    if (this.view.live) return getJson(`sample/${this.address}/${index}.json`);
    const [[key], [label], fields, header] = await Promise.all([
      this.keys([index]), this.labels([index]),
      Promise.all(this.view.fields.map((field) => this.#field(index, field))), this.#header(index),
    ]);
    return { index, key, label, class: this.className(label), fields: fields.filter(Boolean), header };
  }

  async #field(index, { name, kind }) {
    const extent = await this.extent(index, name);
    if (!extent) return null;
    const crc = await this.columns.get(`${name}.crc32c`)?.at([index]);
    const { shard } = extent;
    return { name, kind, bytes: extent.length, offset: extent.offset, length: extent.length,
             shard: shard?.path ?? shard?.url ?? null, crc32c: crc && hexadecimal(crc[0]) };
  }

  async #header(index) {
    const names = ["width", "height", "components", "process", "orientation", "media"].filter((name) => this.columns.has(name));
    const values = await Promise.all(names.map((name) => this.columns.get(name).at([index])));
    const header = Object.fromEntries(names.map((name, i) => [name, values[i][0]]));
    if (header.orientation > 4) [header.width, header.height] = [header.height, header.width]; // as displayed
    if ("media" in header) header.media = this.view.media?.[header.media] ?? String(header.media);
    if ("process" in header) header.process = PROCESSES[header.process] ?? null;
    return header;
  }
}

/** Wait for a document that the server computes. */
async function finished(url, progress) {
  for (;;) {
    const document = await getJson(url);
    if (document.error) throw new Error(document.error.message);
    if (!document.pending) return document;
    progress(document.done ?? 0, document.total ?? 0);
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

export const hexadecimal = (crc) => crc.toString(16).padStart(8, "0");
export const checksum = (data) => hexadecimal(crc32c(data));

function compared(a, b) {
  const common = Math.min(a.length, b.length);
  for (let i = 0; i < common; i++) if (a[i] !== b[i]) return a[i] - b[i];
  return a.length - b.length;
}

const MAGIC = [
  ["image/jpeg", [0xff, 0xd8, 0xff]], ["image/png", [0x89, 0x50, 0x4e, 0x47]], ["image/gif", [0x47, 0x49, 0x46, 0x38]],
  ["image/bmp", [0x42, 0x4d]], ["image/webp", [0x52, 0x49, 0x46, 0x46]],
];

/** The type of an image that browsers show, by its first bytes; other files, such as SVG, are just bytes. */
export function mediaType(data) {
  const found = MAGIC.find(([, magic]) => magic.every((byte, i) => data[i] === byte));
  return found ? found[0] : "application/octet-stream";
}
