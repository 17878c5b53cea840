// Decoding of bytes: NumPy arrays, the numbers of PNG masks, checksums, and a hexadecimal dump. Bytes are not trusted:
// lengths are compared with the available bytes before use.

const NUMBERS = {
  b1: [1, "getUint8"], u1: [1, "getUint8"], i1: [1, "getInt8"], u2: [2, "getUint16"], i2: [2, "getInt16"], u4: [4, "getUint32"],
  i4: [4, "getInt32"], u8: [8, "getBigUint64"], i8: [8, "getBigInt64"], f4: [4, "getFloat32"], f8: [8, "getFloat64"],
};
const MOST_PIXELS = 50_000_000;
const TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  for (let bit = 0; bit < 8; bit++) byte = byte & 1 ? (byte >>> 1) ^ 0x82f63b78 : byte >>> 1;
  return byte;
});

/** CRC32C (Castagnoli), as in the index for each field. */
export function crc32c(data) {
  let crc = 0xffffffff;
  for (const byte of data) crc = TABLE[(crc ^ byte) & 255] ^ (crc >>> 8);
  return (crc ^ 0xffffffff) >>> 0;
}

/** The array of .npy bytes: {dtype, shape, values}, of at most `most` values in C order. Throws for other bytes. */
export function parseNpy(data, most = 100_000) {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  if (data.length < 12 || new TextDecoder("latin1").decode(data.subarray(1, 6)) !== "NUMPY") throw new Error("not in .npy form");
  const wide = data[6] > 1, start = wide ? 12 : 10, end = start + (wide ? view.getUint32(8, true) : view.getUint16(8, true));
  const header = new TextDecoder("latin1").decode(data.subarray(start, end));
  const dtype = /'descr': *'([<>|=]?)([a-z]\d+)'/.exec(header), shape = /'shape': *\(([\d, ]*)\)/.exec(header);
  if (!dtype || !shape || !NUMBERS[dtype[2]] || /'fortran_order': *True/.test(header)) throw new Error("an array of an unusual kind");
  const sides = (shape[1].match(/\d+/g) ?? []).map(Number), [size, get] = NUMBERS[dtype[2]];
  const total = sides.reduce((product, side) => product * side, 1);
  if (total * size !== data.length - end) throw new Error(`${data.length - end} bytes of values, expected ${total * size}`);
  const values = Array.from({ length: Math.min(total, most) }, (_, i) => Number(view[get](end + i * size, dtype[1] !== ">")));
  return { dtype: dtype[2], shape: sides, values };
}

/** The numbers in a PNG of one channel: {width, height, values, palette}; null for a PNG that only a browser decodes. */
export async function parsePng(data) {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength), parts = [];
  let header = null, palette = null;
  for (let at = 8; at + 12 <= data.length;) {
    const length = view.getUint32(at), type = String.fromCharCode(...data.subarray(at + 4, at + 8)), body = data.subarray(at + 8, at + 8 + length);
    if (type === "IHDR" && length === 13)
      header = { width: view.getUint32(at + 8), height: view.getUint32(at + 12), bits: body[8], colour: body[9], interlaced: body[12] };
    else if (type === "PLTE") palette = body;
    else if (type === "IDAT") parts.push(body);
    at += 12 + length;
  }
  if (!header || ![0, 3].includes(header.colour) || header.interlaced || ![1, 2, 4, 8, 16].includes(header.bits)) return null;
  const { width, height, bits } = header, stride = Math.ceil((width * bits) / 8);
  if (width * height > MOST_PIXELS || !width || !height) throw new Error(`a mask of ${width} × ${height} pixels is too large to draw`);
  const lines = await inflated(new Blob(parts), height * (stride + 1));
  return { width, height, palette: header.colour === 3 ? palette : null, values: unpacked(unfiltered(lines, height, stride, Math.max(1, bits >> 3)), header, stride) };
}

async function inflated(blob, most) {
  const reader = blob.stream().pipeThrough(new DecompressionStream("deflate")).getReader(), whole = new Uint8Array(most);
  for (let at = 0; at < most;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the mask is cut off");
    whole.set(value.subarray(0, most - at), at);
    at += value.length;
  }
  reader.cancel().catch(() => {});
  return whole;
}

/** Undo the filters of PNG (PNG specification, 9.2); a pixel has `step` bytes. */
function unfiltered(lines, height, stride, step) {
  const pixels = new Uint8Array(height * stride);
  for (let y = 0; y < height; y++) {
    const kind = lines[y * (stride + 1)], from = y * (stride + 1) + 1, to = y * stride;
    for (let x = 0; x < stride; x++) {
      const left = x >= step ? pixels[to + x - step] : 0, up = y ? pixels[to + x - stride] : 0;
      let guess = 0;
      if (kind === 1) guess = left;
      else if (kind === 2) guess = up;
      else if (kind === 3) guess = (left + up) >> 1;
      else if (kind === 4) guess = nearest(left, up, y && x >= step ? pixels[to + x - stride - step] : 0);
      pixels[to + x] = lines[from + x] + guess;
    }
  }
  return pixels;
}

function nearest(left, up, corner) {
  const whole = left + up - corner, a = Math.abs(whole - left), b = Math.abs(whole - up), c = Math.abs(whole - corner);
  return a <= b && a <= c ? left : b <= c ? up : corner;
}

function unpacked(bytes, { width, height, bits }, stride) {
  if (bits === 8) return bytes;
  const values = new Uint16Array(width * height);
  for (let y = 0, i = 0; y < height; y++)
    for (let x = 0; x < width; x++, i++) {
      const at = y * stride + ((x * bits) >> 3);
      values[i] = bits === 16 ? (bytes[at] << 8) | bytes[at + 1] : (bytes[at] >> (8 - bits - ((x * bits) & 7))) & ((1 << bits) - 1);
    }
  return values;
}

/** Bytes as lines: the position, about sixteen bytes in hexadecimal, and the same bytes as text. */
export function hexDump(data, width = 16) {
  const lines = [];
  for (let at = 0; at < data.length; at += width) {
    const part = Array.from(data.subarray(at, at + width));
    const numbers = part.map((byte) => byte.toString(16).padStart(2, "0")).join(" ").padEnd(3 * width - 1);
    lines.push(`${at.toString(16).padStart(4, "0")}  ${numbers}  ${part.map((byte) => (byte > 31 && byte < 127 ? String.fromCharCode(byte) : "·")).join("")}`);
  }
  return lines.join("\n");
}
