// The panel of a sample: its image with overlays, its texts, its bytes and their place, and code that reads it.

import { hexDump, parseNpy } from "./bytes.js";
import { bytes, clean, cleanLines, count, foreign, make, plural } from "./dom.js";
import { checksum, mediaType } from "./data.js";
import { predictedTexts } from "./grid.js";
import { boxLayer, cropLayer, maskLayer, pointLayer } from "./overlays.js";
import { Stage } from "./stage.js";

const HEAD_BYTES = 256, MOST_TEXT_BYTES = 1 << 20, MOST_FIELD_BYTES = 64 << 20, MOST_ALIKE = 2000, WIDE_DUMP = 560;
const SHOWN_BY_BROWSERS = ["image/jpeg", "image/png", "image/gif", "image/bmp", "image/webp"];

export class Panel {
  #element;
  #on;
  #loading = new AbortController();
  #free = [];
  #stage = null;
  #isHidden = new Set(); // names of hidden layers, for all samples

  /** on: {closed(), stepped(by)}. */
  constructor(element, on) {
    this.#element = element;
    this.#on = on;
    element.addEventListener("keydown", (event) => this.key(event));
  }

  get isOpen() {
    return !this.#element.hidden;
  }

  focus() {
    this.#element.focus({ preventScroll: true });
  }

  /** Show the position of the sample among the shown samples. */
  place(text) {
    const note = this.#element.querySelector(".top > .note");
    if (note) note.textContent = text;
  }

  close() {
    this.#stop();
    this.#element.hidden = true;
    this.#element.replaceChildren();
  }

  #stop() {
    this.#loading.abort();
    this.#loading = new AbortController();
    this.#free.splice(0).forEach((free) => free());
  }

  /** Show a sample: known facts at once, the rest when it arrives. crop: a box to mark in the image. */
  async open(split, index, crop = null) {
    this.#stop();
    const { signal } = this.#loading, stage = (this.#stage = new Stage("Image"));
    const title = make("h2", {}, `Sample ${count(index)}`), body = make("div", { class: "parts" });
    const button = (text, name, work, label) => make("button", { type: "button", "aria-label": name, title: label ?? name, text, click: work });
    const bar = make("div", { class: "bar top" },
      button("←", "Previous sample", () => this.#on.stepped(-1)), button("→", "Next sample", () => this.#on.stepped(1)),
      make("span", { class: "note" }), button("Close", "Close", () => this.#on.closed(), "Close (Escape)"));
    const focused = this.#element.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    this.#element.hidden = false;
    this.#element.replaceChildren(bar, title, stage.element, body);
    if (focused) ([...bar.children].find((child) => child.getAttribute("aria-label") === focused) ?? this.#element).focus();
    this.#element.scrollTop = 0;
    try {
      const [sample, predictions] = await Promise.all([split.sample(index), split.predictions([index])]), predicted = predictions?.[0];
      if (signal.aborted) return;
      title.replaceChildren(foreign(sample.key, 400));
      const layers = make("div", { class: "bar layers" }), texts = make("div", { class: "texts" });
      const checks = new Map();
      body.append(layers, texts, this.#facts(split, sample, predicted, checks), this.#reading(split, sample), this.#bytes(split, sample, signal));
      await this.#picture(split, sample, stage, checks, signal);
      if (crop && stage.size[0] && !signal.aborted) this.#crop(crop, stage, layers);
      await this.#layers(split, sample, stage, layers, signal);
      await this.#texts(split, sample, texts, signal);
    } catch (error) {
      if (!signal.aborted) body.append(make("p", { class: "problem", text: clean(error.message, 500) }));
    }
  }

  // --- the picture and its overlays -------------------------------------------------------------------------------
  async #picture(split, sample, stage, checks, signal) {
    const field = sample.fields.find(({ name, kind }) => name === "image" && (kind === "image" || kind === "pixels")) ??
                  sample.fields.find(({ kind }) => kind === "image" || kind === "pixels") ??
                  (split.view.live ? sample.fields.find(({ kind }) => kind === "array") : undefined); // its middle slice
    if (sample.error) this.#element.querySelector(".parts").prepend(make("p", { class: "problem", text: clean(sample.error.message ?? sample.error, 500) }));
    if (!field) return stage.say("This sample has no image.");
    stage.say("loading …");
    try {
      const picture = await this.#image(split, sample, field, checks, signal);
      if (!signal.aborted) stage.show(picture, [picture.naturalWidth || picture.width, picture.naturalHeight || picture.height], clean(sample.key, 200));
    } catch (error) {
      if (!signal.aborted) stage.say(clean(error.message || "The browser cannot show this image.", 300));
    }
  }

  /** A loaded image element: from the bytes, or converted by the server if browsers do not show the format. */
  async #image(split, sample, field, checks, signal) {
    const show = async (url) => {
      const image = make("img", { alt: "", draggable: "false" });
      image.src = url;
      await image.decode();
      return image;
    };
    if (split.view.live && field.bytes > MOST_FIELD_BYTES) throw new Error(`${bytes(field.bytes)} are more than this page shows; download it.`);
    const data = field.kind === "image" || !split.view.live ? await split.fieldBytes(sample.index, field.name, { signal, size: field.bytes }) : null;
    if (data) checks.get(field.name)?.(checksum(data));
    if (field.kind === "pixels" && data) return rawPixels(data, sample.header);
    try {
      if (!data || !SHOWN_BY_BROWSERS.includes(mediaType(data))) throw new Error("browsers cannot show this format");
      return await show(this.#blobUrl(data, mediaType(data)));
    } catch {
      if (!split.view.live) throw new Error("A browser cannot show this image. Download it, or look at the set with packer view.");
      const converted = await split.fieldBytes(sample.index, field.name, { signal, as: "png" });
      return show(this.#blobUrl(converted, "image/png"));
    }
  }

  #blobUrl(data, type) {
    const url = URL.createObjectURL(new Blob([data], { type }));
    this.#free.push(() => URL.revokeObjectURL(url));
    return url;
  }

  #crop(crop, stage, bar) {
    stage.add(cropLayer(crop, stage.size).element);
    this.#switch("crop of the batch", stage.layers[0], bar);
  }

  /** A check box that hides and shows a layer. */
  #switch(name, layer, bar) {
    const box = make("input", { type: "checkbox" }), note = make("span", { class: "note" });
    box.checked = !this.#isHidden.has(name);
    layer?.classList.toggle("off", !box.checked);
    bar.append(make("label", {}, box, " ", foreign(name, 60), " ", note));
    box.addEventListener("change", () => {
      layer?.classList.toggle("off", !box.checked);
      this.#isHidden[box.checked ? "delete" : "add"](name);
    });
    return { box, note };
  }

  async #layers(split, sample, stage, bar, signal) {
    const fields = sample.fields.filter(({ kind }) => ["mask", "boxes", "points"].includes(kind) && stage.size[0]);
    const labels = sample.fields.find(({ name, kind }) => name === "box_labels" && ["array", "target"].includes(kind));
    for (const { name, kind } of fields) {
      try {
        const data = await split.fieldBytes(sample.index, name, { signal, most: MOST_FIELD_BYTES });
        const layer = kind === "mask" ? await this.#mask(split, sample.index, name, data)
          : kind === "points" ? pointLayer(data, stage.size)
          : boxLayer(data, stage.size, labels && await this.#names(split, sample.index, labels.name, signal));
        if (signal.aborted) return;
        this.#switch(name, layer.element, bar).note.textContent = layer.note ?? "";
        if (layer.legend) bar.after(layer.legend);
        if (kind === "mask") stage.layers.length ? stage.layers[0].before(layer.element) : stage.add(layer.element);
        else stage.add(layer.element);
      } catch (error) {
        if (signal.aborted) return;
        const { box, note } = this.#switch(name, null, bar);
        box.checked = !(box.disabled = true);
        note.textContent = clean(error.message, 200);
      }
    }
  }

  async #mask(split, index, name, data) {
    const isPng = mediaType(data) === "image/png";
    const { element, legend: numbers, more } = await maskLayer(isPng || !split.view.live ? data : await split.fieldBytes(index, name, { as: "png" }));
    const legend = make("ul", { class: "legend" });
    for (const [value, share, css] of numbers) {
      const key = make("span", { class: css ? "swatch" : "swatch nothing" });
      if (css) key.style.backgroundColor = css;
      legend.append(make("li", {}, key, `${value} `, make("span", { class: "note", text: `${(100 * share).toPrecision(share < 0.995 ? 2 : 3)} %` })));
    }
    if (more) legend.append(make("li", { class: "note", text: `and ${plural(more, "value")}` }));
    return { element, legend };
  }

  /** The names of the boxes: class labels, or the numbers. */
  async #names(split, index, field, signal) {
    const { values } = parseNpy(await split.fieldBytes(index, field, { signal, most: MOST_FIELD_BYTES }));
    return values.map((label) => split.className(label) || String(label));
  }

  // --- texts and values -------------------------------------------------------------------------------------------
  async #texts(split, sample, element, signal) {
    for (const { name, kind, bytes: size } of sample.fields) {
      if (!["text", "json", "target", "array"].includes(kind)) continue;
      const part = make("section", {}, make("h3", {}, foreign(name, 60)));
      element.append(part);
      try {
        if (size > MOST_TEXT_BYTES) throw new Error(`${bytes(size)}: download it`);
        const data = await split.fieldBytes(sample.index, name, { signal, most: MOST_TEXT_BYTES });
        if (signal.aborted) return;
        part.append(value(kind, data));
      } catch (error) {
        part.append(make("p", { class: "note", text: clean(error.message, 200) }));
      }
    }
  }

  #facts(split, sample, predicted, checks) {
    const list = make("dl", { class: "facts" });
    const fact = (name, ...values) => list.append(make("dt", { text: name }), make("dd", {}, ...values));
    const { header = {} } = sample;
    fact("Number", count(sample.index), make("span", { class: "note", text: ` of ${split.name}` }));
    fact("Class", ...(sample.label >= 0 ? [foreign(sample.class ?? split.className(sample.label), 300), make("span", { class: "note", text: ` label ${sample.label}` })] : ["none"]));
    if (predicted) fact("Predicted", make("span", { class: predicted.label === sample.label ? "" : "bad" }, predictedTexts(split, predicted).join(" ") || "none"));
    if (header.width) fact("Pixels", `${count(header.width)} × ${count(header.height)}${header.components ? `, ${plural(header.components, "component")}` : ""}`);
    if (header.media) fact("File format", [header.media, header.process].filter(Boolean).join(", "));
    if (header.orientation > 1) fact("EXIF orientation", String(header.orientation));
    const fields = make("div", { class: "fields" });
    for (const field of sample.fields) {
      const check = make("span", { class: "check" });
      const set = (found) => {
        const isSame = found === field.crc32c;
        check.className = isSame ? "check good" : "check bad";
        check.textContent = isSame ? "✓ as stored" : `✗ computed ${found}`;
      };
      if (field.computed) set(field.computed);
      else checks.set(field.name, (found) => field.crc32c && set(found));
      const facts = make("dl", { class: "facts" });
      const add = (name, ...values) => facts.append(make("dt", { text: name }), make("dd", {}, ...values));
      if (field.file) add("File", foreign(field.file, 300));
      if (field.array) add("Array", foreign(field.array, 300));
      add("Size", bytes(field.bytes), make("span", { class: "note", text: field.bytes > 999 ? ` ${plural(field.bytes, "byte")}` : "" }));
      if (field.shard) add("Location", foreign(field.shard, 300), make("span", { class: "note", text: ` bytes ${count(field.offset)} – ${count(field.offset + field.bytes)}` }));
      if (field.crc32c) add("CRC32C", make("code", { text: field.crc32c }), " ", check);
      fields.append(make("section", {}, make("h3", {}, foreign(field.name, 60), " ", make("span", { class: "note", text: field.kind }), " ", this.#download(split, sample, field)), facts));
    }
    return make("div", {}, list, fields);
  }

  /** A link that saves the bytes of a field. */
  #download(split, sample, field) {
    const name = (field.file || `${sample.key.split("/").at(-1)}.${field.name}`).split("/").at(-1).slice(-120);
    const link = make("a", { class: "download", text: "Download", download: name, href: split.view.live ? split.fieldUrl(sample.index, field.name) : "#" });
    if (!split.view.live)
      link.addEventListener("click", async (event) => {
        if (link.href.startsWith("blob:")) return;
        event.preventDefault();
        try {
          link.href = this.#blobUrl(await split.fieldBytes(sample.index, field.name), "application/octet-stream");
          link.click();
        } catch (error) {
          link.replaceWith(make("span", { class: "note", text: clean(error.message, 200) }));
        }
      });
    return link;
  }

  #reading(split, sample) {
    const { address, read } = split.view;
    if (!address && !read) return null;
    const python = `import readers\n\nreader = ${read ?? `readers.open(${JSON.stringify(address)}, split=${JSON.stringify(split.name)})`}\nsample = reader[${sample.index}]`;
    const part = make("section", {}, make("h3", { text: "Read it" }), copyable(python, "Python"));
    if (address && !read && clean(sample.key, 1000) === sample.key)
      part.append(copyable(`packer extract ${quoted(address)} -o files --split ${quoted(split.name)} --keys ${quoted(sample.key.replace(/[*?[]/g, "[$&]"))}`, "command"));
    return part;
  }

  #bytes(split, sample, signal) {
    const dump = make("pre", { class: "hex", tabindex: "0", "aria-label": "The first bytes in hexadecimal" });
    const select = make("select", { "aria-label": "Field" }, ...sample.fields.map(({ name }) => make("option", { value: name, text: clean(name, 60) })));
    const details = make("details", {}, make("summary", {}, make("h3", { text: "First bytes" })), sample.fields.length > 1 ? select : null, dump);
    const show = async () => {
      try {
        const head = await split.head(sample.index, select.value, HEAD_BYTES, signal);
        dump.textContent = head?.length ? hexDump(head, dump.clientWidth < WIDE_DUMP ? 8 : 16) : "no bytes";
      } catch (error) {
        dump.textContent = clean(error.message, 300);
      }
    };
    details.addEventListener("toggle", () => details.open && show());
    select.addEventListener("change", show);
    return details;
  }

  /** Keys that change the view of the sample, wherever the focus is; inside the panel also keys that step. */
  key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target.closest("input, select, summary, pre")) return;
    const steps = this.#element.contains(event.target) && !event.target.closest(".stage");
    const work = {
      "+": () => this.#stage.zoom(1.5), "=": () => this.#stage.zoom(1.5), "-": () => this.#stage.zoom(1 / 1.5), 0: () => this.#stage.fit(),
      1: () => this.#stage.natural(), o: () => this.#toggleAll(),
      ArrowLeft: steps && (() => this.#on.stepped(-1)), ArrowRight: steps && (() => this.#on.stepped(1)),
    }[event.key];
    if (!work) return;
    event.preventDefault();
    event.stopPropagation();
    work();
  }

  #toggleAll() {
    const boxes = [...this.#element.querySelectorAll(".layers input:not(:disabled)")], isOn = !boxes.some((box) => box.checked);
    for (const box of boxes) if (box.checked !== isOn) box.click();
  }
}

/** Lines that one click copies. */
function copyable(text, label) {
  const button = make("button", { type: "button", text: "Copy", "aria-label": `Copy the ${label}` });
  const code = make("code", { text });
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch { // not allowed: select it, to be copied by hand
      getSelection().selectAllChildren(code);
    }
  });
  return make("div", { class: "copy" }, make("pre", { tabindex: "0", "aria-label": label }, code), button);
}

const quoted = (text) => (/^[\w./:@%+=-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** The value of a field as an element. */
function value(kind, data) {
  if (!data) return make("p", { class: "note", text: "not in this sample" });
  if (kind === "text") return make("p", { class: "caption-text", dir: "auto", text: cleanLines(new TextDecoder().decode(data)) });
  if (kind === "json") {
    let text = new TextDecoder().decode(data);
    try {
      text = JSON.stringify(JSON.parse(text), null, 2);
    } catch { /* shown unchanged */ }
    return make("pre", { class: "json", tabindex: "0" }, make("code", { text: cleanLines(text) }));
  }
  const { dtype, shape, values } = parseNpy(data, MOST_ALIKE), shown = values.slice(0, 64);
  const text = shape.length ? `[${shown.map((number) => (Number.isInteger(number) ? number : number.toPrecision(5))).join(", ")}${values.length > 64 ? ", …" : ""}]` : String(values[0]);
  return make("p", {}, make("code", { text }), make("span", { class: "note", text: ` ${dtype} [${shape.join(", ")}]` }));
}

/** Raw pixels, uint8 [height, width, 3], as a canvas. */
function rawPixels(data, { width, height }) {
  if (data.length !== width * height * 3) throw new Error(`${data.length} bytes, expected ${width} × ${height} × 3`);
  const canvas = make("canvas", { width, height }), context = canvas.getContext("2d"), picture = context.createImageData(width, height);
  for (let i = 0, j = 0; i < data.length; i += 3, j += 4) {
    picture.data.set(data.subarray(i, i + 3), j);
    picture.data[j + 3] = 255;
  }
  context.putImageData(picture, 0, 0);
  return canvas;
}
