// The grid of images: only visible rows are elements. The grid keeps the focus and names the active cell to assistive
// technology, so the element of an active cell may be removed.

import { clean, count, find, make, settled } from "./dom.js";
import { Scroll } from "./scroll.js";

const LEAST_WIDTHS = [5.5, 9.25, 15, 24], CAPTION = 2.6, GAP = 0.5; // rem
export const SIZES = LEAST_WIDTHS.length;
const SETTLED_MS = 80;

export class Grid {
  active = 0; // position among the shown samples, from 0
  picked = new Set(); // numbers of the selected samples
  #least = LEAST_WIDTHS[1];
  #lastPicked = 0;
  #element;
  #spacer = make("div", { class: "spacer", role: "presentation" });
  #scroll;
  #rows = new Map();
  #split = null;
  #order = null;
  #first = 0;
  #count = 0;
  #columns = 1;
  #size = { tile: 160, row: 200, gap: 8, edge: 0 };
  #loading = new AbortController();
  #on;

  /** on: {opened(position), moved(position), picked()}. */
  constructor(element, on) {
    this.#element = element;
    this.#on = on;
    element.append(this.#spacer);
    this.#scroll = new Scroll(element, this.#spacer, () => this.#scrolled());
    element.addEventListener("keydown", (event) => this.#key(event));
    element.addEventListener("click", (event) => this.#click(event));
    new ResizeObserver(() => this.#measure()).observe(element);
  }

  /** The size of pictures: 0 to SIZES - 1. */
  set size(size) {
    if (this.#least === LEAST_WIDTHS[size]) return;
    this.#least = LEAST_WIDTHS[size];
    if (this.#order) this.#measure(true, true);
  }

  unpick() {
    this.picked.clear();
    this.#mark();
    this.#on.picked();
  }

  get count() {
    return this.#count;
  }

  /** Show count positions of an order from `first`. */
  show(split, order, first, number, active = 0) {
    Object.assign(this, { active: Math.min(Math.max(active, 0), Math.max(number - 1, 0)) });
    [this.#split, this.#order, this.#first, this.#count] = [split, order, first, number];
    this.#element.setAttribute("aria-rowcount", Math.ceil(number / this.#columns));
    this.#clear();
    this.#scroll.top = 0;
    this.#measure(true);
    this.reveal(this.active);
  }

  focus() {
    this.#element.focus({ preventScroll: true });
  }

  /** The sample at a position. */
  async sample(position) {
    return (await this.#order.numbers(this.#first + position, this.#first + position + 1))[0];
  }

  /** Make a position active and scroll it into view. */
  reveal(position) {
    this.active = Math.min(Math.max(position, 0), Math.max(this.#count - 1, 0));
    const { row, edge } = this.#size, y = edge + Math.floor(this.active / this.#columns) * row;
    const page = this.#element.clientHeight;
    if (y < this.#scroll.top) this.#scroll.to(y - edge);
    else if (y + row > this.#scroll.top + page) this.#scroll.to(y + row + edge - page);
    this.#draw();
    this.#load();
  }

  #measure(isForced = false, keepsPlace = !isForced) {
    const rem = parseFloat(getComputedStyle(document.documentElement).fontSize), width = this.#element.clientWidth;
    if (!width) return;
    const gap = GAP * rem, columns = Math.max(1, Math.floor((width - gap) / (this.#least * rem + gap)));
    const tile = Math.floor((width - gap) / columns - gap), row = tile + CAPTION * rem + gap;
    const isSame = columns === this.#columns && tile === this.#size.tile && this.#element.clientHeight === this.#size.page;
    if (isSame && !isForced) return;
    const middle = columns !== this.#columns || isForced ? this.active : null;
    this.#columns = columns;
    this.#size = { tile, row, gap, edge: gap, page: this.#element.clientHeight };
    this.#element.style.setProperty("--tile", `${tile}px`);
    this.#element.setAttribute("aria-colcount", columns);
    this.#element.setAttribute("aria-rowcount", Math.ceil(this.#count / columns));
    this.#clear();
    this.#scroll.resize(Math.ceil(this.#count / columns) * row + 2 * gap);
    if (middle !== null && keepsPlace) this.reveal(middle);
    this.#draw();
    this.#load();
  }

  #clear() {
    for (const row of this.#rows.values()) remove(row);
    this.#rows.clear();
  }

  #scrolled() {
    this.#draw();
    this.#loadSoon();
  }

  #loadSoon = settled(() => this.#load(), SETTLED_MS);

  /** Make elements for visible rows, and remove the others. */
  #draw() {
    if (!this.#order) return;
    const { row, edge } = this.#size, top = this.#scroll.top, page = this.#element.clientHeight;
    const last = Math.ceil(this.#count / this.#columns), from = Math.max(0, Math.floor((top - edge) / row) - 1);
    const to = Math.min(last, Math.ceil((top + page - edge) / row) + 1);
    for (const [number, element] of this.#rows)
      if (number < from || number >= to) {
        remove(element);
        this.#rows.delete(number);
      }
    for (let number = from; number < to; number++) {
      let element = this.#rows.get(number);
      if (!element) {
        element = this.#row(number);
        this.#rows.set(number, element);
        this.#element.append(element);
      }
      element.style.transform = `translateY(${this.#scroll.offset(edge + number * row)}px)`;
    }
    this.#mark();
  }

  #row(number) {
    const row = make("div", { class: "row", role: "row", "aria-rowindex": number + 1 });
    const first = number * this.#columns, end = Math.min(first + this.#columns, this.#count);
    for (let position = first; position < end; position++)
      row.append(make("div", { class: "cell", role: "gridcell", id: `cell-${position}`, "aria-colindex": position - first + 1,
                               "data-position": position, "aria-selected": "false" },
                      make("div", { class: "picture" }), make("div", { class: "caption" }), make("span", { class: "pick", "aria-hidden": "true", title: "Select (x); with Shift all up to here" })));
    return row;
  }

  #mark() {
    const id = `cell-${this.active}`;
    for (const cell of this.#element.querySelectorAll('[aria-selected="true"]')) if (cell.id !== id) cell.setAttribute("aria-selected", "false");
    for (const cell of this.#element.querySelectorAll(".cell[data-sample]")) cell.classList.toggle("picked", this.picked.has(Number(cell.dataset.sample)));
    this.#element.classList.toggle("picking", this.picked.size > 0);
    const cell = find(id);
    cell?.setAttribute("aria-selected", "true");
    if (cell) this.#element.setAttribute("aria-activedescendant", id);
    else this.#element.removeAttribute("aria-activedescendant");
  }

  /** Fill the visible rows; rows that were scrolled away are not requested. */
  async #load() {
    this.#loading.abort();
    const { signal } = (this.#loading = new AbortController());
    const rows = [...this.#rows].filter(([, row]) => !row.dataset.filled).sort(([a], [b]) => a - b);
    if (!rows.length) return;
    const split = this.#split, first = rows[0][0] * this.#columns;
    const end = Math.min((rows.at(-1)[0] + 1) * this.#columns, this.#count);
    try {
      const indices = await this.#order.numbers(this.#first + first, this.#first + end);
      const [keys, labels, predictions] = await Promise.all([split.keys(indices), split.labels(indices), split.predictions(indices)]);
      if (signal.aborted) return;
      for (const [number, row] of rows) {
        row.dataset.filled = "true";
        [...row.children].forEach((cell, column) => {
          const at = number * this.#columns + column - first;
          this.#fill(cell, indices[at], keys[at], split.className(labels[at]), predictions && { ...predictions[at], isWrong: predictions[at].label !== labels[at] });
        });
      }
      this.#mark();
      performance.mark("packer-rows"); // for measurements of the page
    } catch (error) {
      if (!signal.aborted) this.#on.failed(error);
    }
  }

  #fill(cell, index, key, className, predicted) {
    cell.dataset.sample = index;
    const picture = cell.firstChild, name = clean(key, 200), loading = (cell.loading = new AbortController());
    const given = className ? clean(className, 60) : "", model = predicted ? predictedTexts(this.#split, predicted) : [];
    const labels = [given, model.length ? `predicted ${model.join(" ")}` : ""].filter(Boolean);
    cell.setAttribute("aria-label", [name, ...labels, `sample ${count(index)}`].join(", "));
    cell.title = [name, ...labels].join("\n");
    cell.children[1].append(make("bdi", { class: "key", text: tail(name) }), make("div", { class: "labels" }, make("bdi", { class: "class", text: given }),
      predicted ? make("div", { class: predicted.isWrong && model.length ? "predicted wrong" : "predicted" }, ...(model.length ? model : ["–"]).map((text, i) => make("bdi", { text: i ? ` ${text}` : text }))) : null));
    const failed = (why) => {
      if (!loading.signal.aborted) picture.replaceChildren(make("span", { class: "none", text: why }));
    };
    const side = Math.ceil((this.#size.tile * Math.min(devicePixelRatio, 2)) / 80) * 80;
    this.#split.thumbnail(index, side, loading.signal).then(({ url, free }) => {
      if (loading.signal.aborted) return free();
      const image = make("img", { alt: "", draggable: "false", decoding: "async", load: () => image.classList.add("shown"),
                                  error: () => failed("cannot be shown") });
      cell.free = free;
      image.src = url;
      picture.replaceChildren(image);
    }).catch((error) => failed(error.bytes ? "large: open to see it" : "cannot be shown"));
  }

  #click(event) {
    const cell = event.target.closest(".cell");
    if (!cell) return;
    this.active = Number(cell.dataset.position);
    if (event.target.closest(".pick") || event.ctrlKey || event.metaKey || event.shiftKey) return this.#pick(event.shiftKey);
    this.#mark();
    this.#on.opened(this.active);
  }

  #key(event) {
    if (event.altKey || event.metaKey || event.target !== this.#element) return;
    const columns = this.#columns, page = Math.max(1, Math.floor(this.#element.clientHeight / this.#size.row)) * columns;
    const start = this.active - (this.active % columns), all = event.ctrlKey;
    const to = {
      ArrowLeft: this.active - 1, ArrowRight: this.active + 1, ArrowUp: this.active - columns, ArrowDown: this.active + columns,
      PageUp: this.active - page, PageDown: this.active + page, Home: all ? 0 : start,
      End: all ? this.#count - 1 : Math.min(start + columns, this.#count) - 1,
    }[event.key];
    if (event.key === "x" || event.key === "X") this.#pick(event.key === "X");
    else if (event.key === "Enter" || event.key === " ") this.#on.opened(this.active);
    else if (to === undefined) return;
    else this.#go(to, columns);
    event.preventDefault();
  }

  /** Select or deselect the active sample. isRange: select all samples from the last selected one on. */
  async #pick(isRange) {
    const at = this.active, [first, end] = isRange ? [Math.min(at, this.#lastPicked), Math.max(at, this.#lastPicked) + 1] : [at, at + 1];
    try {
      const numbers = await this.#order.numbers(this.#first + first, this.#first + end);
      const isPicked = !isRange && this.picked.has(numbers[0]);
      for (const number of numbers) this.picked[isPicked ? "delete" : "add"](number);
    } catch (error) {
      return this.#on.failed(error);
    }
    this.#lastPicked = at;
    this.#mark();
    this.#on.picked();
  }

  /** Up from the first row and down from the last row stay in their column. */
  #go(to, columns) {
    if (!this.#count) return;
    const last = this.#count - 1;
    if (to < 0) to = to === this.active - 1 ? 0 : this.active % columns;
    if (to > last) to = last;
    if (to === this.active) return;
    this.reveal(to);
    this.#on.moved(this.active);
  }
}

function remove(row) {
  for (const cell of row.children) {
    cell.loading?.abort();
    cell.free?.();
    const image = cell.querySelector("img");
    if (image) image.removeAttribute("src"); // cancels its request
  }
  row.remove();
}

/** A prediction as texts: the class, and its score or loss if known. */
export function predictedTexts(split, { label, score }) {
  if (label < 0) return [];
  return [clean(split.className(label), 60), ...(Number.isNaN(score) ? [] : [score.toPrecision(2)])];
}

/** The end of a key, which distinguishes samples. */
const tail = (key) => key.slice(key.lastIndexOf("/") + 1) || key;
