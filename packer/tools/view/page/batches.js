// The content of a training batch: its samples by the order, as pixels after augmentation, with the random draws of
// each. Orders and draws are functions of seed, epoch and position, so training gets the same batch.

import { clean, count, foreign, make, plural } from "./dom.js";
import { failure } from "./ranges.js";

const NUMBERS = [["seed", "Seed", 0], ["epoch", "Epoch", 0], ["batch", "Batch", 0], ["batch_size", "Batch size", 32], ["ranks", "Ranks", 1], ["rank", "Rank", 0]];

export class Batches {
  #element;
  #on;
  #split = null;
  #form = null;
  #asked = 0;

  /** on: {asked(parameters), opened(index, box)}: box is the region of the image's crop, if any. */
  constructor(element, on) {
    this.#element = element;
    this.#on = on;
  }

  /** Show the batch of these parameters (URLSearchParams; missing ones have defaults). */
  show(split, given) {
    if (split !== this.#split) this.#build(split);
    for (const [name, , value] of NUMBERS) this.#form.elements[name].value = given.get(name) ?? value;
    const { orders, default_ops: ops } = this.#can;
    this.#form.elements.batch_order.value = given.get("batch_order") ?? orders[0];
    this.#form.elements.ops.value = (given.has("op") ? given.getAll("op") : given.has("batch_order") ? [] : ops ?? []).join(" ");
    this.#ask();
  }

  get #can() {
    return { orders: ["shuffled"], ops: [], ...this.#split.view.can.batches };
  }

  #build(split) {
    this.#split = split;
    const number = ([name, label, value]) => make("label", { class: "field" }, label,
      make("input", { type: "number", name, min: ["batch_size", "ranks"].includes(name) ? 1 : 0, value, required: true, inputmode: "numeric" }));
    const ops = make("input", { name: "ops", list: "op-names", title: "ops, separated by spaces", autocomplete: "off", spellcheck: "false" });
    const step = (by, text, name) => make("button", { type: "button", text, "aria-label": name, title: name, click: () => this.#step(by) });
    this.#form = make("form", { class: "tools" }, ...NUMBERS.map(number),
      make("label", { class: "field" }, "Order", make("select", { name: "batch_order" }, ...this.#can.orders.map((name) => make("option", { value: name, text: name })))),
      make("label", { class: "field grow augmentations" }, "Augmentations", ops),
      make("datalist", { id: "op-names" }, ...this.#can.ops.map((name) => make("option", { value: name }))),
      make("div", { class: "bar" }, make("button", { class: "main", text: "Show" }), step(-1, "←", "Previous batch"), step(1, "→", "Next batch")));
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#on.asked(this.#parameters());
    });
    this.#element.replaceChildren(this.#form, make("p", { class: "status", role: "status" }), make("ol", { class: "batch" }));
  }

  #step(by) {
    const box = this.#form.elements.batch;
    box.value = Math.max(0, Number(box.value) + by);
    this.#on.asked(this.#parameters());
  }

  #parameters() {
    const values = new URLSearchParams(), { elements } = this.#form;
    for (const [name] of NUMBERS) values.set(name, elements[name].value);
    values.set("batch_order", elements.batch_order.value);
    for (const op of elements.ops.value.split(/\s+/).filter(Boolean)) values.append("op", op);
    return values;
  }

  async #ask() {
    const [, status, list] = this.#element.children, asked = ++this.#asked, query = this.#parameters();
    query.set("split", this.#split.name);
    query.set("order", query.get("batch_order"));
    query.delete("batch_order");
    status.textContent = "computing …";
    status.classList.remove("problem");
    try {
      const response = await fetch(`batches.json?${query}`);
      if (!response.ok) throw await failure(response);
      const batch = await response.json();
      if (asked !== this.#asked) return;
      const all = batch.batches === undefined ? "" : ` (batches 0 to ${count(batch.batches - 1)})`;
      status.textContent = `Batch ${count(query.get("batch"))} of epoch ${count(query.get("epoch"))}${all}: ${plural(batch.samples.length, "sample")}`;
      list.replaceChildren(...batch.samples.map((sample) => this.#item(sample)));
    } catch (error) {
      if (asked !== this.#asked) return;
      list.replaceChildren();
      status.textContent = clean(error.message, 500);
      status.classList.add("problem");
    }
  }

  #item({ index, key, label, position, draws, image, box, error }) {
    const className = label === undefined ? "" : this.#split.className(label);
    const picture = make("div", { class: "picture" });
    if (error) picture.append(make("span", { class: "none", text: clean(error.message ?? error, 200) }));
    else if (image)
      picture.append(make("img", { src: image, alt: "", loading: "lazy", draggable: "false", load: (event) => event.target.classList.add("shown"),
                                   error: () => picture.replaceChildren(make("span", { class: "none", text: "cannot be shown" })) }));
    return make("li", {}, make("button", { type: "button", class: "open", "aria-label": `${clean(key, 200)}: open the sample`, click: () => this.#on.opened(index, box) }, picture),
      make("div", { class: "caption" }, make("bdi", { class: "key", text: clean(key, 120) }),
        make("span", { class: "note" }, className ? foreign(className, 60) : "", className ? " · " : "", position === undefined ? `sample ${count(index)}` : `position ${count(position)}`)),
      make("ul", { class: "draws" }, ...(draws ?? []).map((text) => make("li", { text: clean(text, 200) }))));
  }
}
