// The runs of an order as a list to search and choose from: classes, ranges of sizes, groups of duplicates.

import { clean, count, find, foreign, make } from "./dom.js";

const MOST_SHOWN = 200;

export class RunList {
  #element = find("runs");
  #search = find("runs-find");
  #list = find("runs-list");
  #order = null;
  #chosen = null;
  #on;

  /** on: called with the number of a run, or null for all. */
  constructor(on) {
    this.#on = on;
    this.#search.addEventListener("input", () => this.#draw());
    this.#element.addEventListener("keydown", (event) => this.#key(event));
    this.#element.open = matchMedia("(min-width: 60rem)").matches;
  }

  /** Show the runs of an order; nothing if it has none. */
  show(order, chosen) {
    if (order !== this.#order) this.#search.value = "";
    [this.#order, this.#chosen] = [order, chosen];
    this.#element.hidden = !order.runs?.length || order.name === "where";
    find("runs-title").textContent = order.name === "class" ? "Classes" : capital(clean(order.title, 40));
    find("runs-chosen").replaceChildren(...(chosen === null ? [] : [foreign(runName(order, chosen), 60)]));
    this.#draw();
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
      return make("li", {}, make("button", { type: "button", "aria-pressed": String(run === this.#chosen), click: () => this.#on(run) },
        bar, name, make("span", { class: "count", text: count(number) })));
    };
    const all = wanted ? [] : [item("All", this.#order?.count ?? 0, 0, null)];
    this.#list.replaceChildren(...all, ...shown.map((i) => item(foreign(runName(this.#order, i), 100), runs[i][2], runs[i][2] / most, i)));
    const more = find("runs-more");
    more.hidden = found.length > 0 && found.length <= MOST_SHOWN;
    more.textContent = found.length ? `${count(found.length - MOST_SHOWN)} more: search to see them` : "nothing found";
  }

  /** Up and down walk through the list; Enter in the search takes the first that was found. */
  #key(event) {
    const stops = [this.#search, ...this.#list.querySelectorAll("button")], at = stops.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1 }[event.key];
    if (event.key === "Enter" && at === 0) stops[1]?.click();
    else if (to === undefined || at < 0) return;
    else stops[Math.min(Math.max(to, 0), stops.length - 1)].focus();
    event.preventDefault();
  }
}

/** What a run is called; classes may have no name. */
export function runName(order, number) {
  const name = String(order.runs[number][0]);
  return name || (order.name === "class" ? "(no class)" : "(none)");
}

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
