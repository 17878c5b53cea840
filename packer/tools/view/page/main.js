// The page of `packer view` and of its exports. The fragment of the address describes the view, so views can be linked.

import { Batches } from "./batches.js";
import { openSet } from "./data.js";
import { bytes, clean, count, find, foreign, make, plural, settled } from "./dom.js";
import { Grid, SIZES } from "./grid.js";
import { showHistograms } from "./histograms.js";
import { Panel } from "./panel.js";
import { capital, RunList, runName } from "./runs.js";

const VIEWS = ["samples", "histograms", "batches"], MOST_NAME = 100, SAVED_AT_ONCE = 20_000;
const state = { view: "samples", split: "", order: "stored", run: null, where: "", search: "", size: 1, sample: null, at: 0, batch: new URLSearchParams() };
let set, split, order, crop = null; // crop: the region of a sample in a batch

const grid = new Grid(find("grid"), {
  opened: async (position) => openSample(await grid.sample(position), position, true),
  moved: (position) => {
    state.at = position;
    if (panel.isOpen) follow(position);
    else writeSoon();
  },
  picked: () => status(),
  failed: (error) => problem(error.message),
});
const panel = new Panel(find("panel"), { closed: () => closeSample(), stepped: (by) => step(by) });
const runs = new RunList((name, run) => go({ ...(run === null ? {} : { order: name }), run, at: 0, sample: null }).then(() => grid.focus()));
const batches = new Batches(find("batches-view"), {
  asked: (batch) => go({ batch }),
  opened: (index, box) => {
    crop = box && { index, box };
    go({ view: "samples", order: "stored", run: null, ...UNFILTERED, at: index, sample: index }).then(() => panel.focus());
  },
});
const UNFILTERED = { where: "", search: "" };
const follow = settled(async (position) => openSample(await grid.sample(position), position, false), 60);
const writeSoon = settled(() => write(false), 200);

// --- the address ----------------------------------------------------------------------------------------------------
function write(isNew) {
  const query = new URLSearchParams({ split: state.split });
  if (state.view !== "samples") query.set("view", state.view);
  if (state.where) query.set("where", state.where);
  if (state.search) query.set("search", state.search);
  if (state.size !== 1) query.set("size", state.size);
  if (state.order !== "stored") query.set("order", state.order);
  if (state.run !== null) {
    const name = order.runs[state.run][0];
    const isPlain = name && name.length <= MOST_NAME && order.runs.filter(([other]) => other === name).length === 1;
    if (isPlain) query.set("run", name);
    else query.set("range", state.run);
  }
  if (state.at) query.set("at", state.at);
  if (state.sample !== null) query.set("sample", state.sample);
  if (state.view === "batches") for (const [name, value] of state.batch) query.append(name, value);
  const hash = `#${query}`;
  if (hash !== location.hash) history[isNew ? "pushState" : "replaceState"](null, "", hash);
}

function read() {
  const query = new URLSearchParams(location.hash.slice(1)), number = (name) => (/^\d{1,12}$/.test(query.get(name) ?? "") ? Number(query.get(name)) : null);
  const name = query.get("split"), batch = new URLSearchParams();
  for (const [key, value] of query) if (!["split", "view", "where", "search", "size", "order", "run", "range", "at", "sample"].includes(key)) batch.append(key, value);
  return { view: VIEWS.includes(query.get("view")) ? query.get("view") : "samples", split: set.splits.has(name) ? name : [...set.splits.keys()][0],
           where: query.get("where") ?? "", search: query.get("search") ?? "", size: Math.min(number("size") ?? 1, SIZES - 1), order: query.get("order") ?? "stored", run: number("range") ?? query.get("run"), at: number("at") ?? 0,
           sample: number("sample"), batch };
}

// --- going somewhere ------------------------------------------------------------------------------------------------
let going = 0;

/** Change the view. If that is impossible, keep the view and show the reason. */
async function go(change, { isNew = true } = {}) {
  const next = { ...state, ...change }, mine = ++going;
  const isOther = !split || next.split !== state.split || next.order !== state.order || next.where !== state.where || next.search !== state.search;
  problem("");
  try {
    if (isOther) {
      find("status").textContent = next.where || next.search ? "searching …" : "sorting …";
      const nextSplit = set.splits.get(next.split);
      const progress = (done, total) => mine === going && (find("status").textContent = `reading all samples: ${count(done)} of ${count(total)} …`);
      const nextOrder = await orderOf(nextSplit, next, next.order, progress);
      if (mine !== going) return;
      [split, order] = [nextSplit, nextOrder];
    }
  } catch (error) {
    if (mine !== going) return;
    problem(error.message);
    if (!split) return go({ ...next, order: "stored", ...UNFILTERED, run: null }, { isNew: false });
    status();
    find("order").value = state.order;
    return;
  }
  if (typeof next.run === "string") next.run = Math.max(order.runs?.findIndex(([name]) => name === next.run) ?? -1, -1);
  if (next.run === -1 || !order.runs?.[next.run]) next.run = null;
  if (change.view && change.view !== state.view) scrollTo(0, 0);
  if (split.name !== state.split) grid.unpick();
  const isElsewhere = isOther || next.run !== state.run, isMoved = next.at !== grid.active, wasSample = panel.isOpen ? state.sample : null;
  Object.assign(state, next);
  grid.size = state.size;
  controls();
  views(); // before the grid is measured
  if (isElsewhere) {
    const [first, number] = state.run === null ? [0, order.count] : order.runs[state.run].slice(1);
    grid.show(split, order, first, number, state.at);
  } else if (isMoved) grid.reveal(state.at);
  state.at = grid.active;
  write(isNew);
  if (state.sample === null) document.body.classList.remove("with-panel");
  if (state.sample === null) panel.close();
  else if (state.sample !== wasSample || isElsewhere) await showSample();
}

/** The chosen samples in an order. */
const orderOf = (split, { where, search }, order, progress) => (where || search ? split.select({ where, search, order }, progress) : split.order(order, progress));

function controls() {
  find("split").value = state.split;
  const names = split.orderNames.map(({ name, title, count: number }) =>
    make("option", { value: name, text: capital(clean(title, 40)) + (number !== null && number !== split.samples ? ` (${count(number)})` : "") }));
  find("order").replaceChildren(...names);
  find("order").value = state.order;
  find("where").value = state.where;
  find("find").value = state.search;
  const shown = { ...state }, of = split;
  runs.show(split, order, state.run, (name) => orderOf(of, shown, name));
  status();
}

/** Download the keys of the selected samples, or else of all shown samples, one per line, for --keys of packer's commands. */
async function save() {
  const [first, number] = grid.picked.size ? [0, grid.picked.size] : state.run === null ? [0, order.count] : order.runs[state.run].slice(1);
  const lines = [], saved = split, picked = [...grid.picked].sort((a, b) => a - b);
  const numbers = (from, end) => (picked.length ? picked.slice(from, end) : order.numbers(from, end));
  find("save").disabled = true;
  try {
    for (let from = first; from < first + number; from += SAVED_AT_ONCE)
      lines.push(...(await saved.keys(await numbers(from, Math.min(from + SAVED_AT_ONCE, first + number)))));
    if (lines.some((key) => /[\n\r]/.test(key))) throw new Error("a key with a line break in it cannot be in a list of keys");
    const url = URL.createObjectURL(new Blob([lines.map((key) => `${key}\n`).join("")], { type: "text/plain" }));
    make("a", { href: url, download: `keys-${saved.name}.txt` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  } catch (error) {
    problem(error.message);
  }
  find("save").disabled = false;
}

function status() {
  const all = plural(split.samples, "sample"), line = find("status");
  if (state.run !== null) line.replaceChildren(foreign(runName(order, state.run), 200), `: ${count(order.runs[state.run][2])} of ${all}`);
  else line.textContent = order.count === split.samples ? all : `${count(order.count)} of ${all}`;
  if (!(state.run === null ? order.count : order.runs[state.run][2])) line.append(": nothing to show");
  const picked = grid.picked.size;
  find("save").hidden = !picked && order.count === split.samples && state.run === null;
  find("save").textContent = picked ? `Save ${plural(picked, "key")}` : "Save keys";
  find("unpick").hidden = !picked;
}

function problem(message) {
  find("problem").hidden = !message;
  find("problem").textContent = clean(message, 600);
}

function views() {
  for (const name of VIEWS) find(`${name}-view`).hidden = name !== state.view;
  for (const tab of document.querySelectorAll("[data-view]")) {
    if (tab.dataset.view === state.view) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  document.body.dataset.view = state.view;
  if (state.view === "histograms") showHistograms(find("histograms-view"), split, (name, run) => go({ view: "samples", order: name, ...UNFILTERED, run, at: 0, sample: null }).then(() => grid.focus()));
  if (state.view === "batches") batches.show(split, state.batch);
}

// --- one sample -----------------------------------------------------------------------------------------------------
async function openSample(index, position, takesFocus) {
  Object.assign(state, { sample: index, at: position });
  write(false);
  await showSample(takesFocus);
}

/** Show the panel of the state's sample; the grid moves to it if its position is known. */
async function showSample(takesFocus = false) {
  const index = state.sample;
  if (!(index < split.samples)) {
    problem(`there is no sample ${count(index)} in ${split.name}: it has ${plural(split.samples, "sample")}`);
    return closeSample();
  }
  const [first, number] = state.run === null ? [0, order.count] : order.runs[state.run].slice(1);
  const shown = panel.open(split, index, crop?.index === index ? crop.box : null);
  document.body.classList.add("with-panel");
  if (takesFocus) panel.focus();
  try {
    let position = number && (await grid.sample(state.at)) === index ? state.at : null;
    if (position === null) {
      const found = await order.position(index, first, first + number);
      if (found !== null) position = found - first;
    }
    if (state.sample !== index) return;
    panel.place(position === null ? "" : `${count(position + 1)} of ${count(number)}`);
    if (position !== null) {
      grid.reveal(position);
      state.at = grid.active;
      write(false);
    }
  } catch (error) {
    problem(error.message);
  }
  await shown;
}

function closeSample() {
  state.sample = null;
  panel.close();
  document.body.classList.remove("with-panel");
  write(false);
  grid.reveal(state.at);
  grid.focus();
}

async function step(by) {
  const position = Math.min(Math.max(grid.active + by, 0), grid.count - 1);
  if (position === grid.active) return;
  grid.reveal(position);
  await openSample(await grid.sample(position), position, false);
}

// --- input ----------------------------------------------------------------------------------------------------------
/** Go to a sample number; or else filter by a text in key, class or texts; in very large sets, go to the first such key. */
async function jump(text) {
  const number = /^#?\d{1,12}$/.test(text) && Number(text.replace("#", "")) < split.samples ? Number(text.replace("#", "")) : null;
  const toNumber = () => go({ view: "samples", order: "stored", ...UNFILTERED, run: null, at: number, sample: null });
  problem("");
  try {
    if (number !== null && text.startsWith("#")) await toNumber();
    else if (text && !split.isSearchable) {
      const position = await split.findKey(text);
      if (position !== null) await go({ view: "samples", order: "key", ...UNFILTERED, run: null, at: position, sample: null });
      else if (number !== null) await toNumber();
      else problem(`no key begins with ${JSON.stringify(clean(text, 100))}`);
    } else {
      await go({ view: "samples", search: text, run: null, at: 0, sample: null });
      if (text && state.search === text && !order.count) {
        if (number !== null) await toNumber();
        else problem(`no key, class or text of these samples contains ${JSON.stringify(clean(text, 100))}`);
      }
    }
    grid.focus();
  } catch (error) {
    problem(error.message);
  }
}

function listen() {
  find("split").addEventListener("change", (event) => go({ split: event.target.value, order: "stored", ...UNFILTERED, run: null, at: 0, sample: null }));
  find("order").addEventListener("change", (event) => go({ order: event.target.value, run: null, at: 0, sample: null }));
  find("find-form").addEventListener("submit", (event) => {
    event.preventDefault();
    jump(find("find").value.trim());
  });
  find("where-form").addEventListener("submit", (event) => {
    event.preventDefault();
    go({ view: "samples", where: find("where").value.trim(), run: null, at: 0, sample: null });
  });
  for (const tab of document.querySelectorAll("[data-view]")) tab.addEventListener("click", () => go({ view: tab.dataset.view }));
  find("unpick").addEventListener("click", () => grid.unpick());
  find("larger").addEventListener("click", () => resize(1));
  find("smaller").addEventListener("click", () => resize(-1));
  find("save").addEventListener("click", save);
  find("help-button").addEventListener("click", () => find("help").showModal());
  find("skip").addEventListener("click", (event) => {
    event.preventDefault();
    grid.focus();
  });
  addEventListener("popstate", () => go(read(), { isNew: false }));
  document.addEventListener("keydown", keys);
}

function keys(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || event.defaultPrevented || find("help").open) return;
  if (event.key === "Escape") return escape(event);
  if (event.target.closest("input, select, textarea")) return;
  if (panel.isOpen && state.view === "samples") panel.key(event);
  if (event.defaultPrevented) return;
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by && panel.isOpen && state.view === "samples" && event.target === document.body) { // a link opened it
    event.preventDefault();
    return step(by);
  }
  const work = { "/": () => find("find").focus(), c: () => runs.focus(), "+": () => resize(1), "=": () => resize(1), "-": () => resize(-1), "?": () => find("help").showModal(), s: () => go({ view: "samples" }),
                 h: () => go({ view: "histograms" }), b: () => set.view.can?.batches && go({ view: "batches" }) }[event.key];
  if (!work) return;
  event.preventDefault();
  work();
}

const resize = (by) => go({ size: Math.min(Math.max(state.size + by, 0), SIZES - 1) }, { isNew: false });

/** Leave a text box; or else close the sample; or else remove the filter. */
function escape(event) {
  if (event.target.closest("input, select, textarea")) grid.focus();
  else if (panel.isOpen) closeSample();
  else if (state.view !== "samples") go({ view: "samples" }).then(() => grid.focus());
  else if (grid.picked.size) grid.unpick();
  else if (state.where || state.search || state.run !== null) go({ ...UNFILTERED, run: null, at: 0 });
  else return;
  event.preventDefault();
}

async function start() {
  try {
    set = await openSet();
  } catch (error) {
    return problem(`The set cannot be shown: ${error.message}`);
  }
  const { view } = set, documents = [...set.splits.values()].map((split) => split.document);
  const samples = documents.reduce((sum, { samples }) => sum + samples, 0), size = documents.reduce((sum, split) => sum + (split.bytes ?? 0), 0);
  const shards = documents.reduce((sum, split) => sum + (split.shards?.length ?? 0), 0);
  document.title = `${clean(view.name, 100)} – packer view`;
  find("name").replaceChildren(foreign(view.name, 200));
  find("about").textContent = [clean(view.container ?? "", 40), plural(samples, "sample"), size && bytes(size), shards && plural(shards, "shard"),
                               set.classes.length && `${count(set.classes.length)} ${set.classes.length === 1 ? "class" : "classes"}`,
                               view.predictions && `predictions${view.predictions.unknown ? ` (${plural(view.predictions.unknown, "row")} of them for no sample here)` : ""}`].filter(Boolean).join(" · ");
  find("split").append(...[...set.splits.values()].map(({ name, samples }) => make("option", { value: name, text: `${clean(name, 60)} (${count(samples)})` })));
  find("split-field").hidden = set.splits.size < 2;
  find("where-form").hidden = !view.can?.where;
  find("batches-tab").hidden = !view.can?.batches;
  if (!set.splits.size) return problem("The set has no splits.");
  listen();
  const wanted = read();
  await go(wanted, { isNew: false });
  if (state.sample !== null) panel.focus(); // so that keys work after a link opened the sample
  else if (state.view === "samples") grid.focus();
}

start();
