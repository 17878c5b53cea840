// Distributions of sizes, media, shapes and classes: bars that show their samples on a click.

import { bytes, clean, count, foreign, make, plural } from "./dom.js";
import { capital, runName } from "./runs.js";

const MOST_CLASSES = 40;
const plain = (value, unit) => (unit === "bytes" ? bytes(value) : `${Number(value.toPrecision(3)).toLocaleString("en-GB")}${unit ? ` ${unit}` : ""}`);
const SHORT = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });

/** on(order, run): a bar was chosen. */
export async function showHistograms(element, split, on) {
  element.replaceChildren();
  for (const [name, histogram] of Object.entries(split.document.histograms ?? {})) {
    const bars = histogram.names ? byName(histogram) : byRange(histogram);
    const choose = histogram.order && ((bar) => on(histogram.order, bar));
    element.append(figure(capital(clean(histogram.title ?? name, 60)), histogram.names ? rows(bars, choose) : columns(bars, choose)));
  }
  if (split.document.histograms?.class || !split.orderNames.some(({ name }) => name === "class")) return;
  const place = figure("Classes", make("p", { class: "note", text: "counting …" }));
  element.append(place);
  try {
    const order = await split.order("class");
    const bars = (order.runs ?? []).map(([, , number], i) => ({ name: runName(order, i), number, run: i }));
    const most = bars.filter(({ number }) => number).sort((a, b) => b.number - a.number).slice(0, MOST_CLASSES);
    const left = bars.length - most.length;
    place.lastChild.replaceWith(make("div", {}, rows(most, (run) => on("class", run)),
      left > 0 ? make("p", { class: "note", text: `the largest ${most.length} of ${plural(bars.length, "class").replace("classs", "classes")}` }) : null));
  } catch (error) {
    place.lastChild.textContent = clean(error.message, 300);
  }
}

const figure = (title, ...content) => make("figure", {}, make("figcaption", { text: title }), ...content);

const byName = ({ names, counts }) => names.map((name, i) => ({ name, number: counts[i], run: i }));

function byRange({ edges, counts, unit }) {
  return counts.map((number, i) => ({ name: `${plain(edges[i], unit)} – ${plain(edges[i + 1], unit)}`, from: plain(edges[i], unit), to: plain(edges[i + 1], unit), number, run: i }));
}

/** Horizontal bars with names. */
function rows(bars, choose) {
  const most = Math.max(1, ...bars.map(({ number }) => number));
  return make("ul", { class: "rows" }, ...bars.map(({ name, number, run }) => {
    const bar = make("span", { class: "share" });
    bar.style.width = `${(100 * number) / most}%`;
    const parts = [make("span", { class: "track" }, bar), foreign(name, 60), make("span", { class: "count", text: count(number) })];
    return make("li", {}, choose && number ? make("button", { type: "button", click: () => choose(run) }, ...parts) : make("span", { class: "line" }, ...parts));
  }));
}

/** Vertical bars for ranges of a number. Tab reaches one of them, arrow keys the others. */
function columns(bars, choose) {
  const most = Math.max(1, ...bars.map(({ number }) => number)), none = `the largest bar: ${plural(most, "sample")}`;
  const said = make("p", { class: "said", "aria-hidden": "true", text: none });
  const chart = make("div", { class: "columns", role: "group", "aria-label": "Bars; arrow keys go from one to the next" });
  const buttons = bars.map(({ name, number, run }) => {
    const bar = make("span", { class: "bar" }), text = `${name}: ${plural(number, "sample")}`;
    bar.style.height = `${number ? Math.max(1.5, (100 * number) / most) : 0}%`;
    const tell = () => (said.textContent = text);
    return make("button", { type: "button", tabindex: "-1", "aria-label": text, "aria-disabled": String(!number || !choose), focus: tell,
                            pointerenter: tell, pointerleave: () => (said.textContent = none), blur: () => (said.textContent = none),
                            click: () => number && choose?.(run) }, make("span", { class: "number", "aria-hidden": "true", text: number ? SHORT.format(number) : "" }), bar);
  });
  chart.append(...buttons);
  if (buttons.length) buttons[0].tabIndex = 0;
  chart.addEventListener("keydown", (event) => {
    const at = buttons.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (at < 0 || !buttons[to]) return;
    event.preventDefault();
    buttons[at].tabIndex = -1;
    buttons[to].tabIndex = 0;
    buttons[to].focus();
  });
  const middle = bars[Math.floor(bars.length / 2)];
  return make("div", {}, said, chart, make("div", { class: "axis", "aria-hidden": "true" }, ...(bars.length
    ? [make("span", { text: bars[0].from }), bars.length > 2 ? make("span", { text: middle.from }) : null, make("span", { text: bars.at(-1).to })] : [])));
}
