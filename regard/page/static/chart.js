// Charts: lines and words that are drawn on a canvas and written as vectors when a view is saved; maps with axes; colour
// bars.

import { el, numbering, tokenNode, word } from "./ui.js";
import { cssSigned, css, evenImage, fit, image, largest, shade } from "./colour.js";

export const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Draws paths {d, stroke, fill, width, alpha, dash} and words {text, x, y, anchor, fill, size, turn}, and keeps them.
export function sketch(canvas, width, height, shapes) {
  const context = fit(canvas, width, height);
  canvas.shapes = shapes;
  draw(context, shapes);
  return canvas;
}

export function draw(context, shapes) {
  for (const shape of shapes) {
    context.save();
    context.globalAlpha = shape.alpha ?? 1;
    if (shape.text !== undefined) {
      context.font = `${shape.size || 11}px system-ui, sans-serif`;
      context.fillStyle = shape.fill;
      context.textAlign = { start: "left", middle: "center", end: "right" }[shape.anchor || "start"];
      context.textBaseline = "middle";
      context.translate(shape.x, shape.y);
      if (shape.turn) context.rotate(shape.turn * Math.PI / 180);
      context.fillText(shape.text, 0, 0);
    } else {
      const path = new Path2D(shape.d);
      context.lineCap = "round";
      context.lineJoin = "round";
      context.setLineDash(shape.dash || []);
      if (shape.fill) { context.fillStyle = shape.fill; context.fill(path); }
      if (shape.stroke) { context.strokeStyle = shape.stroke; context.lineWidth = shape.width || 1; context.stroke(path); }
    }
    context.restore();
  }
}

export const line = (points) => points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(2)} ${y.toFixed(2)}`).join("");

// a number in short form, for an axis
export function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e4 || size < 1e-3 ? value.toExponential(1).replace("e+", "e").replace("-", "−") : String(Number(value.toPrecision(3))).replace("-", "−");
}

// Lines of numbers over places, with axes: `lines` of [x, y] points each, colours by line.
export function chart({ lines, colours, dashes = [], width = 440, height = 220, x: across, y: down, log = false, ticks = null, mark = null, ring = null, bounds = null, label }) {
  const canvas = el("canvas", { className: "chart", role: "img", "aria-label": label });
  const points = lines.flat();
  const scaled = (value) => (log ? Math.log2(value) : value);
  const [left, right] = [Math.min(...points.map(([x]) => scaled(x))), Math.max(...points.map(([x]) => scaled(x)))];
  const [low, high] = bounds || [Math.min(...points.map(([, y]) => scaled(y))), Math.max(...points.map(([, y]) => scaled(y)))];
  const edge = { left: 72, right: 14, top: 12, bottom: 40 };
  const x = (value) => edge.left + (scaled(value) - left) / (right - left || 1) * (width - edge.left - edge.right);
  const y = (value) => height - edge.bottom - (scaled(value) - low) / (high - low || 1) * (height - edge.top - edge.bottom);
  const [quiet, rule] = [style("--quiet"), style("--line")];
  const raised = (value) => (log ? 2 ** value : value);
  const shapes = [];
  const levels = [low, low + (high - low) / 2, high].map(raised);
  for (const value of low === high ? [levels[0]] : levels) {
    shapes.push({ d: line([[edge.left, y(value)], [width - edge.right, y(value)]]), stroke: rule });
    shapes.push({ text: log ? compact(value) : short(value), x: edge.left - 6, y: y(value), anchor: "end", fill: quiet });
  }
  const places = ticks || [left, right].map(raised);
  for (const value of places) shapes.push({ text: String(value), x: x(value), y: height - edge.bottom + 12, anchor: "middle", fill: quiet });
  if (mark !== null) shapes.push({ d: line([[x(mark), edge.top], [x(mark), height - edge.bottom]]), stroke: rule, width: 1.5 });
  shapes.push({ text: across, x: (edge.left + width - edge.right) / 2, y: height - 8, anchor: "middle", fill: quiet });
  shapes.push({ text: down, x: 9, y: (edge.top + height - edge.bottom) / 2, anchor: "middle", fill: quiet, turn: -90 });
  lines.forEach((one, at) => shapes.push({ d: line(one.map(([a, b]) => [x(a), y(b)])), stroke: colours[at], width: 2, dash: dashes[at] || [] }));
  if (ring) shapes.push({ d: circle(x(ring[0]), y(ring[1]), 6), stroke: "#E69F00", width: 3 });
  return sketch(canvas, width, height, shapes);
}

const circle = (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`;

export const compact = (count) => new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(count);

// A colour bar from the least to the largest number, and what an empty cell means. `even`: the scale is linear;
// otherwise it is that of `shade`.
export function key({ low = 0, high, signed = false, even = false, log = false, hidden = false, name = "weight" }) {
  const [wide, tall] = [120, 10];
  const bar = el("canvas", { "aria-hidden": "true" });
  const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
  if (signed) [low, high] = [-most, most];
  // four decades of a logarithm
  if (log && !signed) low = high * 1e-4;
  const shapes = [];
  for (let at = 0; at < wide; at += 2) {
    const share = (at + 1) / wide;
    const value = log && !signed ? low * (high / low) ** share : low + (high - low) * share;
    const lit = even ? (signed ? Math.abs(value) / most : share) : shade(value, most, log);
    shapes.push({ d: `M${at} 0h2v${tall}h-2z`, fill: signed ? cssSigned(Math.sign(value) * lit) : css(lit) });
  }
  sketch(bar, wide, tall, shapes);
  const box = el("p", { className: "key quiet" }, el("span", {}, name), el("span", {}, short(low)), bar, el("span", {}, short(high)));
  if (hidden) box.append(el("span", { className: "swatch" }), el("span", {}, "hidden"));
  return box;
}

// A map with names or numbers at its sides, a colour bar, and the value of the cell under the pointer.
// `names`: {down, across} tokens; `axes`: {down, across} what rows and columns are.
export function plate({ values, rows, columns, names = null, axes, hidden = null, even = false, signed = null, log = false, size = 360, say = "weight", label }) {
  const seen = hidden ? values.filter((value, at) => !hidden(Math.floor(at / columns), at % columns, value)) : values;
  const [low, high] = [seen.reduce((a, b) => Math.min(a, b), Infinity), seen.reduce((a, b) => Math.max(a, b), -Infinity)];
  // two-sided if both sides matter
  const sides = signed ?? (even ? Math.min(-low, high) > 0.35 * Math.max(-low, high) : low < 0);
  const cell = Math.min(size / columns, size / rows * 1.2, 22);
  const [wide, tall] = [Math.max(120, Math.round(cell * columns)), Math.max(90, Math.round(Math.min(cell, size / rows) * rows))];
  const canvas = el("canvas", { className: "plate-map", role: "img", "aria-label": label });
  const context = fit(canvas, wide, tall);
  context.imageSmoothingEnabled = false;
  const picture = even ? evenImage(values, columns, rows, [low, high], sides, hidden) : image(values, columns, rows, largest(values), log, hidden);
  context.drawImage(picture, 0, 0, wide, tall);
  const room = { down: tall / rows >= 11 && names, across: wide / columns >= 11 && names };
  const side = (tokens, count, across) => {
    const box = el("div", { className: `ticks ${across ? "across" : "down"}`, "aria-hidden": "true" });
    const named = across ? room.across : room.down;
    const places = named ? [...Array(count).keys()] : [0, Math.floor((count - 1) / 2), count - 1];
    for (const at of new Set(places)) {
      const node = named ? tokenNode(tokens[at], {}, numbering(tokens)[at]) : el("span", { className: "token" }, String(at));
      node.style[across ? "left" : "top"] = `${100 * (at + 0.5) / count}%`;
      box.append(node);
    }
    return box;
  };
  const [down, across] = [side(names?.down, rows, false), side(names?.across, columns, true)];
  const under = el("p", { className: "under", "aria-live": "off" }, `rows: ${axes.down}, columns: ${axes.across}`);
  const called = (tokens, axis, at) => (tokens ? [word(tokens, at)] : [`${axis} ${at}`]);
  canvas.addEventListener("pointermove", (event) => {
    const row = Math.min(rows - 1, Math.floor(event.offsetY / canvas.clientHeight * rows));
    const column = Math.min(columns - 1, Math.floor(event.offsetX / canvas.clientWidth * columns));
    const value = values[row * columns + column];
    const told = hidden && hidden(row, column, value) ? ["hidden"] : [el("data", { value: String(value), title: String(value) }, short(value))];
    under.replaceChildren(...called(names?.down, axes.down, row), names ? " → " : ", ", ...called(names?.across, axes.across, column), ": ", ...told);
  });
  canvas.addEventListener("pointerleave", () => under.replaceChildren(`rows: ${axes.down}, columns: ${axes.across}`));
  const box = el("div", { className: `plate-box${room.across ? " named" : ""}` }, down, canvas, across);
  if (low === 0 && high === 0) return el("div", { className: "plate-with-key" }, box, el("p", { className: "key quiet" }, "all of them are 0"), under);
  return el("div", { className: "plate-with-key" }, box, key({ low: even || sides ? low : 0, high: even ? high : largest(values), signed: sides, even, log, hidden: Boolean(hidden) && seen.length < values.length, name: say }), under);
}
