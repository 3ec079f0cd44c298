// Colours: cividis for weights, Okabe and Ito for heads and reasons. None needs red and green to be told apart.

export const HEADS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A200", "#8C510A"];
export const REASONS = {
  local: "#0072B2", global: "#E69F00", stride: "#009E73", fixed: "#B8A200", random: "#CC79A7", content: "#D55E00", all: "#56B4E9",
};
const CIVIDIS = [
  [0, 34, 78], [8, 51, 112], [53, 69, 108], [79, 87, 108], [102, 105, 112], [125, 124, 120], [148, 143, 120],
  [174, 163, 113], [200, 184, 102], [229, 207, 82], [253, 231, 55],
];
// zero is close to the background
const SIGNED = [[33, 102, 172], [103, 169, 207], [209, 229, 240], [247, 247, 247], [253, 219, 199], [239, 138, 98], [178, 24, 43]];
const SIGNED_DARK = [[140, 200, 255], [72, 140, 204], [44, 78, 112], [42, 46, 56], [110, 68, 48], [214, 118, 72], [255, 180, 140]];

function blend(stops, at) {
  const place = Math.min(Math.max(at, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  return stops[low].map((part, i) => Math.round(part + (stops[low + 1][i] - part) * (place - low)));
}

const packed = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0;
const ramp = (stops) => Uint32Array.from({ length: 256 }, (_, i) => packed(blend(stops, i / 255)));
const SEQUENTIAL = ramp(CIVIDIS);
const TWO_SIDED = { light: ramp(SIGNED), dark: ramp(SIGNED_DARK) };

export const dark = () => getComputedStyle(document.documentElement).colorScheme === "dark";
const twoSidedRamp = () => TWO_SIDED[dark() ? "dark" : "light"];

export const css = (at) => `rgb(${blend(CIVIDIS, at)})`;
export const cssSigned = (at) => `rgb(${blend(dark() ? SIGNED_DARK : SIGNED, (at + 1) / 2)})`;

// how bright a weight is, 0 to 1: by its root, or by its logarithm over four decades
export function shade(weight, top, log) {
  const share = Math.min(Math.abs(weight) / top, 1);
  return log ? Math.max(0, 1 + Math.log10(Math.max(share, 1e-9)) / 4) : Math.sqrt(share);
}

// an image of numbers, two-sided if some are negative; hidden cells are empty
export function image(values, width, height, top, log = false, hidden = null) {
  const signed = values.some((value) => value < 0);
  const sides = twoSidedRamp();
  const pixels = new Uint32Array(width * height);
  for (let i = 0; i < pixels.length; i += 1) {
    if (hidden && hidden(Math.floor(i / width), i % width, values[i])) continue;
    const at = shade(values[i], top, log);
    pixels[i] = signed ? sides[Math.round(127.5 + 127.5 * at * Math.sign(values[i]))] : SEQUENTIAL[Math.round(255 * at)];
  }
  return toCanvas(pixels, width, height);
}

// an image of numbers on a linear scale between two bounds, two-sided around zero if `signed`
export function evenImage(values, width, height, [low, high], signed, hidden = null) {
  const [table, most] = [signed ? twoSidedRamp() : SEQUENTIAL, Math.max(Math.abs(low), Math.abs(high)) || 1];
  const pixels = new Uint32Array(width * height);
  for (let i = 0; i < pixels.length; i += 1) {
    if (hidden && hidden(Math.floor(i / width), i % width, values[i])) continue;
    const at = signed ? 0.5 + 0.5 * values[i] / most : (values[i] - low) / (high - low || 1);
    pixels[i] = table[Math.round(255 * Math.min(Math.max(at, 0), 1))];
  }
  return toCanvas(pixels, width, height);
}

// an image of the 8-bit codes of a tile, which are roots of weights; two-sided if some weights of the map are negative
export function codedImage(codes, width, height, { scale, signed }, top, twoSided, log, hidden = null) {
  const table = new Uint32Array(256);
  const sides = twoSidedRamp();
  for (let code = 0; code < 256; code += 1) {
    const number = signed ? (code << 24 >> 24) / 127 : code / 255;
    const weight = Math.sign(number) * number * number * scale;
    const at = shade(weight, top, log);
    table[code] = twoSided ? sides[Math.round(127.5 + 127.5 * at * Math.sign(weight))] : SEQUENTIAL[Math.round(255 * at)];
  }
  const pixels = new Uint32Array(width * height);
  for (let i = 0; i < pixels.length; i += 1) {
    if (!hidden || !hidden(Math.floor(i / width), i % width)) pixels[i] = table[codes[i] & 255];
  }
  return toCanvas(pixels, width, height);
}

function toCanvas(pixels, width, height) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const data = new ImageData(new Uint8ClampedArray(pixels.buffer), width, height);
  canvas.getContext("2d").putImageData(data, 0, 0);
  return canvas;
}

export function largest(values) {
  let top = 0;
  for (let i = 0; i < values.length; i += 1) top = Math.max(top, Math.abs(values[i]));
  return top || 1;
}

// a canvas as large as its element, in device pixels
export function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const sizes = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== sizes[0] || canvas.height !== sizes[1]) [canvas.width, canvas.height] = sizes;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
