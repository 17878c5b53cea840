// The filter: classes, values of a column, ranges of sizes or groups of duplicates, as a searchable list. They are the
// runs of an order, which may differ from the shown order.

import { clean, count, find, foreign, make } from "./dom.js";

const MOST_SHOWN = 200, WITHOUT_RUNS = ["stored", "key", "unlabelled", "damaged"];

export class RunList {
  #element = find("runs");
  #by = find("runs-by");
  #search = find("runs-find");
  #list = find("runs-list");
  #shown = null;
  #order = null;
  #chosen = null;
  #on;

  /** on: called with the name of an order and the number of one of its runs, or null for all. */
  constructor(on) {
    this.#on = on;
    this.#search.addEventListener("input", () => this.#draw());
    this.#by.addEventListener("change", () => this.list(this.#by.value));
    this.#element.addEventListener("keydown", (event) => this.#key(event));
    this.#element.open = matchMedia("(min-width: 60rem)").matches;
  }

  /** List the runs of the shown order, or of the order listed before, for the same samples. orderOf: makes an order of them. */
  show(split, order, chosen, orderOf) {
    this.#shown = { split, order, chosen, orderOf };
    const names = split.orderNames.filter(({ name }) => !WITHOUT_RUNS.includes(name));
    const known = names.map(({ name }) => name), current = this.#by.value;
    this.#by.replaceChildren(...names.map(({ name, title }) => make("option", { value: name, text: capital(clean(title, 40)) })));
    this.#element.hidden = !names.length;
    const first = known.find((name) => name === "class" || name.startsWith("column-")) ?? "";
    this.list(order.runs?.length && known.includes(order.name) ? order.name : known.includes(current) ? current : first);
  }

  /** List the runs of an order. */
  async list(name) {
    const { order, chosen, orderOf } = this.#shown, asked = this.#shown;
    if (name !== this.#order?.name) this.#search.value = "";
    this.#by.value = name;
    this.#chosen = name === order.name ? chosen : null;
    find("runs-chosen").replaceChildren(...(this.#chosen === null ? [] : [foreign(runName(order, chosen), 60)]));
    this.#order = name === order.name ? order : null;
    this.#draw();
    if (this.#order || !name) return;
    try {
      const listed = await orderOf(name);
      if (asked !== this.#shown || this.#by.value !== name) return;
      this.#order = listed;
      this.#draw();
    } catch (error) {
      find("runs-more").hidden = false;
      find("runs-more").textContent = clean(error.message, 200);
    }
  }

  focus() {
    if (this.#element.hidden) return;
    this.#element.open = true;
    this.#search.focus();
  }

  #draw() {
    const runs = this.#order?.runs ?? [], wanted = this.#search.value.trim().toLowerCase();
    const most = runs.reduce((most, [, , number]) => Math.max(most, number), 1);
    const found = [...runs.keys()].filter((i) => runs[i][2] > 0 && (!wanted || runName(this.#order, i).toLowerCase().includes(wanted)));
    const shown = found.slice(0, MOST_SHOWN);
    if (this.#chosen !== null && !shown.includes(this.#chosen) && found.includes(this.#chosen)) shown.unshift(this.#chosen);
    const item = (name, number, share, run) => {
      const bar = make("span", { class: "share" });
      bar.style.width = `${100 * share}%`;
      return make("li", {}, make("button", { type: "button", "aria-pressed": String(run === this.#chosen), click: () => this.#on(this.#by.value, run) },
        bar, name, make("span", { class: "count", text: count(number) })));
    };
    const all = wanted || !this.#order ? [] : [item("All", this.#order.count, 0, null)];
    this.#list.replaceChildren(...all, ...shown.map((i) => item(make("bdi", { text: clean(runName(this.#order, i), 100), title: clean(runName(this.#order, i), 300) }), runs[i][2], runs[i][2] / most, i)));
    const more = find("runs-more");
    more.hidden = found.length > 0 && found.length <= MOST_SHOWN;
    more.textContent = !this.#order ? (this.#by.value ? "sorting …" : "choose a column above") : found.length ? `${count(found.length - MOST_SHOWN)} more: search to see them` : "nothing found";
  }

  /** Up and down move through the list; Enter in the search chooses the first match. */
  #key(event) {
    const stops = [this.#search, ...this.#list.querySelectorAll("button")], at = stops.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1 }[event.key];
    if (event.key === "Enter" && at === 0) stops[1]?.click();
    else if (to === undefined || at < 0) return;
    else stops[Math.min(Math.max(to, 0), stops.length - 1)].focus();
    event.preventDefault();
  }
}

/** The name of a run; classes may have no name. */
export function runName(order, number) {
  const name = String(order.runs[number][0]);
  return name || (order.name === "class" ? "(no class)" : "(none)");
}

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
