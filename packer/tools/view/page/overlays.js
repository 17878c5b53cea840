// Overlays of an image: masks, boxes and points, in pixels of the displayed image, after its EXIF orientation.

import { parseNpy, parsePng } from "./bytes.js";
import { clean, count, draw, make } from "./dom.js";

const MOST_BOXES = 1000, MOST_POINTS = 20_000, SERIES = 7, IGNORED = 255, MOST_VALUES = 12;

/** Clearly different colours for consecutive numbers: hues a golden angle apart. */
function colour(value) {
  const hue = (value * 137.508) % 360, light = 0.5 + 0.12 * ((value % 3) - 1), reach = 0.75 * Math.min(light, 1 - light);
  return [0, 8, 4].map((n) => {
    const k = (n + hue / 30) % 12;
    return Math.round(255 * (light - reach * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  });
}

/** Whether a palette has colours other than grey. */
const isColoured = (palette) => palette?.some((value, i) => value !== palette[i - (i % 3)]);

/** A mask as a canvas over the image, with a legend of its numbers: {element, legend: [[value, share, css colour]]}. */
export async function maskLayer(data) {
  const mask = (await parsePng(data)) ?? (await decoded(data));
  const { width, height, values, palette } = mask;
  const canvas = make("canvas", { class: "layer mask", width, height });
  const context = canvas.getContext("2d"), picture = context.createImageData(width, height), counts = new Map();
  const words = new Uint32Array(picture.data.buffer), words_of = new Map();
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    let word = words_of.get(value);
    if (word === undefined) {
      const [red, green, blue] = maskColour(value, palette);
      word = value ? ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0 : 0;
      words_of.set(value, word);
    }
    words[i] = word;
    counts.set(value, (counts.get(value) ?? 0) + 1);
  }
  context.putImageData(picture, 0, 0);
  const legend = [...counts].sort((a, b) => b[1] - a[1]).slice(0, MOST_VALUES)
    .map(([value, number]) => [value, number / values.length, value ? `rgb(${maskColour(value, palette).join(" ")})` : null]);
  return { element: canvas, legend, more: Math.max(0, counts.size - MOST_VALUES) };
}

function maskColour(value, palette) {
  if (isColoured(palette) && 3 * value + 2 < palette.length) return palette.subarray(3 * value, 3 * value + 3);
  return value === IGNORED ? [225, 225, 225] : colour(value);
}

/** A mask that is not a plain PNG, decoded by the browser to 8 bits of grey. */
async function decoded(data) {
  const bitmap = await createImageBitmap(new Blob([data]), { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height), context = canvas.getContext("2d");
  context.drawImage(bitmap, 0, 0);
  const { data: pixels, width, height } = context.getImageData(0, 0, bitmap.width, bitmap.height);
  return { width, height, palette: null, values: Uint8Array.from({ length: width * height }, (_, i) => pixels[4 * i]) };
}

function surface(width, height, kind) {
  return draw("svg", { class: kind, viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
}

/** Boxes [k, 4] as x0, y0, x1, y1, with the names of their labels. */
export function boxLayer(data, [width, height], names) {
  const { shape, values } = parseNpy(data, 4 * MOST_BOXES);
  if (shape.length !== 2 || shape[1] !== 4) throw new Error(`boxes of the shape ${shape}, expected [k, 4]`);
  const svg = surface(width, height, "boxes"), element = make("div", { class: "layer" }, svg);
  for (let row = 0; 4 * row < values.length; row++) {
    const [x0, y0, x1, y1] = values.slice(4 * row, 4 * row + 4);
    if (![x0, y0, x1, y1].every(Number.isFinite)) continue;
    svg.append(draw("rect", { x: x0, y: y0, width: Math.max(0, x1 - x0), height: Math.max(0, y1 - y0), class: `s${1 + (row % SERIES)}` }));
    if (names?.[row] === undefined) continue;
    const tag = make("bdi", { class: `tag t${1 + (row % SERIES)}`, text: clean(names[row], 40) });
    tag.style.left = `${(100 * Math.max(0, x0)) / width}%`;
    tag.style.top = `${(100 * Math.max(0, y0)) / height}%`;
    element.append(tag);
  }
  return { element, note: `${count(shape[0])} ${shape[0] === 1 ? "box" : "boxes"}${shape[0] > MOST_BOXES ? `, the first ${count(MOST_BOXES)} drawn` : ""}` };
}

/** Points [..., 2] as x, y; the points of a box have one colour, and NaN is a missing point. */
export function pointLayer(data, [width, height]) {
  const { shape, values } = parseNpy(data, 2 * MOST_POINTS);
  if (shape.at(-1) !== 2) throw new Error(`points of the shape ${shape}, expected [..., 2]`);
  const svg = surface(width, height, "points"), each = shape.length > 2 ? shape.at(-2) : Infinity;
  let drawn = 0;
  for (let i = 0; 2 * i < values.length; i++) {
    const [x, y] = [values[2 * i], values[2 * i + 1]];
    if (!Number.isFinite(x) || !Number.isFinite(y)) continue;
    svg.append(draw("path", { d: `M${x} ${y}h0`, class: `s${1 + (Math.floor(i / each) % SERIES)}` }));
    drawn++;
  }
  return { element: make("div", { class: "layer" }, svg), note: `${count(drawn)} ${drawn === 1 ? "point" : "points"}` };
}

/** The region of an augmentation's draw, on the original image. */
export function cropLayer([x0, y0, x1, y1], [width, height]) {
  const svg = surface(width, height, "crop");
  svg.append(draw("path", { class: "shade", "fill-rule": "evenodd", d: `M0 0H${width}V${height}H0ZM${x0} ${y0}V${y1}H${x1}V${y0}Z` }),
             draw("rect", { x: x0, y: y0, width: x1 - x0, height: y1 - y0, class: "s2" }));
  return { element: make("div", { class: "layer" }, svg) };
}
