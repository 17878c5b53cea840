// The page of `packer view` and of its exports: what is shown is in the fragment of the address, so that it can be linked.

import { Batches } from "./batches.js";
import { keyHas, openSet } from "./data.js";
import { bytes, clean, count, find, foreign, make, plural, settled } from "./dom.js";
import { Grid } from "./grid.js";
import { showHistograms } from "./histograms.js";
import { Panel } from "./panel.js";
import { capital, RunList, runName } from "./runs.js";

const VIEWS = ["samples", "histograms", "batches"], MOST_NAME = 100, SAVED_AT_ONCE = 20_000;
const state = { view: "samples", split: "", order: "stored", run: null, where: "", sample: null, at: 0, batch: new URLSearchParams() };
let set, split, order, crop = null; // crop: what a batch took of a sample

const grid = new Grid(find("grid"), {
  opened: async (position) => openSample(await grid.sample(position), position, true),
  moved: (position) => {
    state.at = position;
    if (panel.isOpen) follow(position);
    else writeSoon();
  },
  failed: (error) => problem(error.message),
});
const panel = new Panel(find("panel"), { closed: () => closeSample(), stepped: (by) => step(by) });
const runs = new RunList((run) => go({ run, at: 0, sample: null }).then(() => grid.focus()));
const batches = new Batches(find("batches-view"), {
  asked: (batch) => go({ batch }),
  opened: (index, box) => {
    crop = box && { index, box };
    go({ view: "samples", order: "stored", run: null, where: "", at: index, sample: index }).then(() => panel.focus());
  },
});
const follow = settled(async (position) => openSample(await grid.sample(position), position, false), 60);
const writeSoon = settled(() => write(false), 200);

// --- the address ----------------------------------------------------------------------------------------------------
function write(isNew) {
  const query = new URLSearchParams({ split: state.split });
  if (state.view !== "samples") query.set("view", state.view);
  if (state.where) query.set("where", state.where);
  else if (state.order !== "stored") query.set("order", state.order);
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
  for (const [key, value] of query) if (!["split", "view", "where", "order", "run", "range", "at", "sample"].includes(key)) batch.append(key, value);
  return { view: VIEWS.includes(query.get("view")) ? query.get("view") : "samples", split: set.splits.has(name) ? name : [...set.splits.keys()][0],
           where: query.get("where") ?? "", order: query.get("order") ?? "stored", run: number("range") ?? query.get("run"), at: number("at") ?? 0,
           sample: number("sample"), batch };
}

// --- going somewhere ------------------------------------------------------------------------------------------------
let going = 0;

/** Change what is shown. Nothing is changed where it cannot be: the reason is shown. */
async function go(change, { isNew = true } = {}) {
  const next = { ...state, ...change }, mine = ++going;
  const isOther = !split || next.split !== state.split || next.order !== state.order || next.where !== state.where;
  problem("");
  try {
    if (isOther) {
      find("status").textContent = next.where ? "choosing …" : "sorting …";
      if (next.split !== split?.name && !("where" in change)) next.where = "";
      const nextSplit = set.splits.get(next.split);
      const progress = (done, total) => mine === going && (find("status").textContent = `reading every sample: ${count(done)} of ${count(total)} …`);
      const nextOrder = next.where ? await nextSplit.where(next.where, progress) : await nextSplit.order(next.order, progress);
      if (mine !== going) return;
      [split, order] = [nextSplit, nextOrder];
    }
  } catch (error) {
    if (mine !== going) return;
    problem(error.message);
    if (!split) return go({ ...next, order: "stored", where: "", run: null }, { isNew: false });
    status();
    find("order").value = state.order;
    return;
  }
  if (typeof next.run === "string") next.run = Math.max(order.runs?.findIndex(([name]) => name === next.run) ?? -1, -1);
  if (next.run === -1 || !order.runs?.[next.run]) next.run = null;
  if (change.view && change.view !== state.view) scrollTo(0, 0);
  const isElsewhere = isOther || next.run !== state.run, isMoved = next.at !== grid.active, wasSample = panel.isOpen ? state.sample : null;
  Object.assign(state, next);
  controls();
  views(); // before the grid is measured
  if (isElsewhere) {
    const [first, number] = state.run === null ? [0, order.count] : order.runs[state.run].slice(1);
    grid.show(split, order, first, number, state.at);
  } else if (isMoved) grid.reveal(state.at);
  state.at = grid.active;
  write(isNew);
  if (state.sample === null) panel.close();
  else if (state.sample !== wasSample || isElsewhere) await showSample();
}

function controls() {
  find("split").value = state.split;
  const names = split.orderNames.map(({ name, title, count: number }) =>
    make("option", { value: name, text: capital(clean(title, 40)) + (number !== null && number !== split.samples ? ` (${count(number)})` : "") }));
  if (state.where) names.push(make("option", { value: "where", text: `Where (${count(order.count)})` }));
  find("order").replaceChildren(...names);
  find("order").value = state.where ? "where" : state.order;
  find("where").value = state.where;
  runs.show(order, state.run);
  find("classes").hidden = !split.orderNames.some(({ name }) => name === "class");
  find("save").hidden = order.count === split.samples && state.run === null;
  status();
}

/** Download the keys of what is shown, one a line, as --keys of packer's commands takes them. */
async function save() {
  const [first, number] = state.run === null ? [0, order.count] : order.runs[state.run].slice(1), lines = [], saved = split;
  find("save").disabled = true;
  try {
    for (let from = first; from < first + number; from += SAVED_AT_ONCE)
      lines.push(...(await saved.keys(await order.numbers(from, Math.min(from + SAVED_AT_ONCE, first + number)))));
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
  if (state.view === "histograms") showHistograms(find("histograms-view"), split, (name, run) => go({ view: "samples", order: name, where: "", run, at: 0, sample: null }).then(() => grid.focus()));
  if (state.view === "batches") batches.show(split, state.batch);
}

// --- one sample -----------------------------------------------------------------------------------------------------
async function openSample(index, position, takesFocus) {
  Object.assign(state, { sample: index, at: position });
  write(false);
  await showSample(takesFocus);
}

/** The panel of the sample of the state; the grid goes to it where its position is known. */
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

// --- what is typed and chosen ---------------------------------------------------------------------------------------
/** A key or its beginning; else the number of a sample; else any part of a key. */
async function jump(text) {
  problem("");
  try {
    const position = split.orderNames.some(({ name }) => name === "key") ? await split.findKey(text) : null;
    if (position !== null) await go({ view: "samples", order: "key", where: "", run: null, at: position, sample: null });
    else if (/^#?\d{1,12}$/.test(text) && Number(text.replace("#", "")) < split.samples)
      await go({ view: "samples", order: "stored", where: "", run: null, at: Number(text.replace("#", "")), sample: null });
    else {
      await go({ view: "samples", where: keyHas(text), order: "stored", run: null, at: 0, sample: null });
      if (state.where === keyHas(text) && !order.count) problem(`no key has ${JSON.stringify(clean(text, 100))} in it, and it is not the number of a sample`);
    }
    grid.focus();
  } catch (error) {
    problem(error.message);
  }
}

function listen() {
  find("split").addEventListener("change", (event) => go({ split: event.target.value, order: "stored", where: "", run: null, at: 0, sample: null }));
  find("order").addEventListener("change", (event) => event.target.value !== "where" && go({ order: event.target.value, where: "", run: null, at: 0, sample: null }));
  find("find-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (find("find").value) jump(find("find").value);
  });
  find("where-form").addEventListener("submit", (event) => {
    event.preventDefault();
    go({ view: "samples", where: find("where").value.trim(), order: "stored", run: null, at: 0, sample: null });
  });
  for (const tab of document.querySelectorAll("[data-view]")) tab.addEventListener("click", () => go({ view: tab.dataset.view }));
  find("classes").addEventListener("click", showClasses);
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
  const work = { "/": () => find("find").focus(), c: () => (order.runs?.length ? runs.focus() : showClasses()), "?": () => find("help").showModal(), s: () => go({ view: "samples" }),
                 h: () => go({ view: "histograms" }), b: () => set.view.can?.batches && go({ view: "batches" }) }[event.key];
  if (!work) return;
  event.preventDefault();
  work();
}

const showClasses = () => (order.name === "class" ? Promise.resolve() : go({ order: "class", where: "", run: null, at: 0, sample: null })).then(() => runs.focus());

/** Out of a text box; then the sample is closed; then the filter is taken away. */
function escape(event) {
  if (event.target.closest("input, select, textarea")) grid.focus();
  else if (panel.isOpen) closeSample();
  else if (state.view !== "samples") go({ view: "samples" }).then(() => grid.focus());
  else if (state.where || state.run !== null) go({ where: "", run: null, at: 0 });
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
                               set.classes.length && `${count(set.classes.length)} ${set.classes.length === 1 ? "class" : "classes"}`].filter(Boolean).join(" · ");
  find("split").append(...[...set.splits.values()].map(({ name, samples }) => make("option", { value: name, text: `${clean(name, 60)} (${count(samples)})` })));
  find("split-field").hidden = set.splits.size < 2;
  find("where-form").hidden = !view.can?.where;
  find("batches-tab").hidden = !view.can?.batches;
  if (!set.splits.size) return problem("The set has no splits.");
  listen();
  const wanted = read();
  await go(wanted, { isNew: false });
  if (state.sample !== null) panel.focus(); // or the keys of a sample that a link opened would do nothing
  else if (state.view === "samples") grid.focus();
}

start();
