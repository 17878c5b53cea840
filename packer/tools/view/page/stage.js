// An image with its overlays, at its natural size, fitted, or larger.

import { make } from "./dom.js";

const STEP = 1.5, MOST = 32, LEAST = 0.02, FIT_MOST = 8, PIXELS_FROM = 3;

export class Stage {
  element;
  size = [0, 0];
  #frame = make("div", { class: "frame" });
  #view;
  #zoom = null; // null: fitted
  #shown;

  constructor(label) {
    this.#view = make("div", { class: "stage", tabindex: "0", role: "group", "aria-label": `${label}; + and − zoom, arrow keys move` }, this.#frame);
    this.#shown = make("output", { class: "zoom" });
    const button = (text, name, work) => make("button", { type: "button", "aria-label": name, title: name, text, click: work });
    this.element = make("div", { class: "viewer" }, this.#view, make("div", { class: "bar" },
      button("−", "Smaller (−)", () => this.zoom(1 / STEP)), this.#shown, button("+", "Larger (+)", () => this.zoom(STEP)),
      button("Fit", "Fit (0)", () => this.fit()), button("1:1", "Actual size (1)", () => this.natural())));
    this.#view.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return; // a plain wheel scrolls
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 1.2 : 1 / 1.2);
    }, { passive: false });
    new ResizeObserver(() => this.#lay()).observe(this.#view);
  }

  /** Show a loaded picture: an element and its size in pixels. */
  show(picture, size, alt) {
    this.size = size;
    picture.classList.add("picture");
    if (alt) picture.setAttribute("alt", alt);
    this.#frame.replaceChildren(picture);
    this.#lay();
  }

  say(text) {
    this.#frame.replaceChildren(make("p", { class: "none", text }));
    this.#shown.textContent = "";
    this.size = [0, 0];
  }

  add(layer) {
    this.#frame.append(layer);
  }

  get layers() {
    return this.#frame.querySelectorAll(".layer");
  }

  zoom(by) {
    this.#zoom = Math.min(Math.max(this.#scale * by, LEAST), MOST);
    this.#lay();
  }

  fit() {
    this.#zoom = null;
    this.#lay();
  }

  natural() {
    this.#zoom = 1;
    this.#lay();
  }

  get #scale() {
    const [width, height] = this.size;
    const fitted = Math.min((this.#view.clientWidth - 2) / width, (this.#view.clientHeight - 2) / height, FIT_MOST);
    return this.#zoom ?? Math.max(fitted, LEAST);
  }

  #lay() {
    const [width, height] = this.size;
    if (!width) return;
    this.#view.classList.toggle("fitted", this.#zoom === null); // without scroll bars, which would change the measured size
    const view = this.#view, scale = this.#scale, before = this.#frame.offsetWidth || 1;
    const [x, y] = [(view.scrollLeft + view.clientWidth / 2) / before, (view.scrollTop + view.clientHeight / 2) / before];
    this.#frame.style.width = `${width * scale}px`;
    this.#frame.style.height = `${height * scale}px`;
    this.#frame.classList.toggle("pixels", scale >= PIXELS_FROM);
    this.#shown.textContent = `${Math.round(100 * scale)} %`;
    view.scrollLeft = x * width * scale - view.clientWidth / 2; // the middle stays in the middle
    view.scrollTop = y * width * scale - view.clientHeight / 2;
  }
}
