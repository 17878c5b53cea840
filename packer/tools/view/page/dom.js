// Elements and texts. Names, keys and captions come from data sets and are never markup: they become text nodes here.

const CONTROLS = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

/** An element. `properties` are attributes, except `text` and those that are functions, which listen to events. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "text") element.textContent = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** An element of SVG. */
export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const find = (id) => document.getElementById(id);

/** Foreign text made safe: control and direction characters become escapes, and the middle of long texts is left out. */
export function clean(text, most = 300) {
  return shortened(String(text).slice(0, 8 * most).replace(CONTROLS, escaped), most);
}

/** As `clean`, with its lines and tabs kept. */
export function cleanLines(text, most = 20_000) {
  return shortened(String(text).slice(0, 8 * most).replace(CONTROLS, (c) => ("\n\t".includes(c) ? c : escaped(c))), most);
}

const escaped = (character) => {
  const code = character.charCodeAt(0);
  return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
};

function shortened(text, most) {
  if (text.length <= most) return text;
  const characters = Array.from(text), end = Math.floor(most / 4);
  if (characters.length <= most) return text;
  return `${characters.slice(0, most - end - 1).join("")}…${characters.slice(-end).join("")}`;
}

/** Foreign text in its own direction, isolated from the surrounding text. */
export const foreign = (text, most) => make("bdi", { text: clean(text, most) });

export const count = (number) => Number(number).toLocaleString("en-GB");

export const plural = (number, word) => `${count(number)} ${word}${Number(number) === 1 ? "" : "s"}`;

export function bytes(number) {
  const units = ["bytes", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0, value = Number(number);
  for (; value >= 999.5 && unit + 1 < units.length; unit++) value /= 1000;
  return unit ? `${Number(value.toPrecision(3))} ${units[unit]}` : plural(value, "byte");
}

/** A function that calls `work` once, `ms` after its last call. */
export function settled(work, ms) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...given), ms);
  };
}
