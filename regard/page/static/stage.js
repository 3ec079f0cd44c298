// An image with its patches: weights drawn over it, a patch to point at, windows, and the tokens that are no patches.

import { el, number } from "./ui.js";
import { css, cssSigned, dark, fit, largest, shade } from "./colour.js";

// the largest share of the window's height that an image takes
const TALLEST = 0.57;

// pixels [h, w, 3] as a canvas
export function toImage({ values, shape: [height, width] }, from = 0) {
  const data = new ImageData(width, height);
  for (let i = 0; i < width * height; i += 1) {
    for (let c = 0; c < 3; c += 1) data.data[4 * i + c] = values[from + 3 * i + c];
    data.data[4 * i + 3] = 255;
  }
  const canvas = el("canvas", { width, height });
  canvas.getContext("2d").putImageData(data, 0, 0);
  return canvas;
}

// the name of a token: patches by row and column from 1, others by what they are
export function nameOf(grid, at) {
  if (at < grid.leading) return grid.leading === 1 || at === 0 ? "class token" : `token ${at + 1}`;
  const patch = at - grid.leading;
  return `row ${Math.floor(patch / grid.columns) + 1}, column ${patch % grid.columns + 1}`;
}

// Draws an image and the weights [T] of its tokens over it, the stronger the larger. `light`: bright where the weight is,
// in place of colours; `hidden(value)`: whether a patch cannot be seen; `spread`: from the least to the largest weight,
// in place of from zero.
export function paint(context, width, height, picture, grid, weights, { top = null, light = false, hidden = null, spread = false } = {}) {
  context.imageSmoothingEnabled = true;
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, width, height);
  if (!weights) return;
  const values = weights.subarray(grid.leading);
  const most = top ?? largest(values);
  const signed = values.some((value) => value < 0);
  const least = spread && !signed ? leastOf(values, hidden) : null;
  const paper = dark() ? "#14161b" : "#fbfbf9";
  context.save();
  for (let row = 0; row < grid.rows; row += 1) {
    // whole pixels, so that no seams are left
    const [above, below] = [Math.round(row * height / grid.rows), Math.round((row + 1) * height / grid.rows)];
    for (let column = 0; column < grid.columns; column += 1) {
      const value = values[row * grid.columns + column];
      const [left, right] = [Math.round(column * width / grid.columns), Math.round((column + 1) * width / grid.columns)];
      const unseen = hidden && hidden(value);
      const at = unseen || least === null ? shade(value, most, false) : Math.max(0, (value - least) / (most - least || 1));
      context.globalAlpha = light ? 0.92 * (1 - at) : unseen ? 0.7 : signed ? 0.45 + 0.4 * at : 0.5 + 0.32 * at;
      context.fillStyle = light ? "#000000" : unseen ? paper : signed ? cssSigned(at * Math.sign(value)) : css(at);
      context.fillRect(left, above, right - left, below - above);
    }
  }
  context.restore();
}

// the least weight of patches that can be seen
export function leastOf(values, hidden = null) {
  let least = Infinity;
  for (const value of values) if (!hidden || !hidden(value)) least = Math.min(least, value);
  return Number.isFinite(least) ? least : 0;
}

export class Stage {
  // `onpoint` is called with a token, or null, and whether Shift is held; `onpin` with a token that was clicked
  constructor(host, onpoint, onpin) {
    Object.assign(this, { onpoint, onpin, picture: null, hover: null });
    this.canvas = el("canvas", { className: "stage", tabIndex: 0, role: "application", "aria-label": "image with its patches: arrow keys move from patch to patch" });
    this.leads = el("div", { className: "leads" });
    this.box = el("div", { className: "stage-box" }, this.leads, this.canvas);
    host.append(this.box);
    new ResizeObserver(() => this.draw()).observe(host);
    const point = (event) => {
      if (event.pointerType === "touch" && event.type === "pointermove") return;
      this.hover = this.tokenAt(event);
      onpoint(this.hover, event.shiftKey);
    };
    this.canvas.addEventListener("pointermove", point);
    this.canvas.addEventListener("click", (event) => { const at = this.tokenAt(event); if (at !== null) onpin(at); });
    this.canvas.addEventListener("pointerleave", () => { this.hover = null; onpoint(null, false); });
    // Shift pressed or released over a patch
    for (const name of ["keydown", "keyup"]) addEventListener(name, (event) => { if (event.key === "Shift" && this.hover !== null && this.canvas.isConnected) onpoint(this.hover, name === "keydown"); });
  }

  tokenAt(event) {
    if (!this.picture) return null;
    const { rows, columns, leading } = this.grid;
    const row = Math.floor(event.offsetY / this.canvas.clientHeight * rows);
    const column = Math.floor(event.offsetX / this.canvas.clientWidth * columns);
    return row < 0 || column < 0 || row >= rows || column >= columns ? null : leading + row * columns + column;
  }

  // `weights` [T] or null; `focus`: the token that they are about; `hidden(value)`: whether it cannot be seen
  show(picture, grid, weights, { focus = null, windows = [], light = false, hidden = null, top = null, spread = false } = {}) {
    Object.assign(this, { picture, grid, weights, focus, windows, light, hidden, top, spread });
    this.draw();
  }

  draw() {
    if (!this.picture || !this.box.isConnected) return;
    const { picture, grid, weights, focus, windows, light, hidden } = this;
    const room = this.box.parentElement.clientWidth;
    const width = Math.round(Math.min(room, TALLEST * innerHeight * picture.width / picture.height));
    const height = Math.round(width * picture.height / picture.width);
    if (width < 8) return;
    const context = fit(this.canvas, width, height);
    paint(context, width, height, picture, grid, weights, { light, hidden, top: this.top, spread: this.spread });
    const [tall, wide] = [height / grid.rows, width / grid.columns];
    // the borders of patches, if there is room for them
    if (Math.min(tall, wide) >= 7) {
      context.strokeStyle = "rgb(255 255 255 / 26%)";
      context.lineWidth = 1;
      context.beginPath();
      for (let row = 1; row < grid.rows; row += 1) { context.moveTo(0, Math.round(row * tall) + 0.5); context.lineTo(width, Math.round(row * tall) + 0.5); }
      for (let column = 1; column < grid.columns; column += 1) { context.moveTo(Math.round(column * wide) + 0.5, 0); context.lineTo(Math.round(column * wide) + 0.5, height); }
      context.stroke();
    }
    for (const [stroke, line] of windows.length ? [["rgb(0 0 0 / 75%)", 5], ["#ffffff", 2.5]] : []) {
      context.strokeStyle = stroke;
      context.lineWidth = line;
      for (const [top, left, bottom, right] of windows) context.strokeRect(left * wide, top * tall, (right - left) * wide, (bottom - top) * tall);
    }
    if (focus !== null && focus >= grid.leading) {
      const at = focus - grid.leading;
      this.frame(context, at % grid.columns * wide, Math.floor(at / grid.columns) * tall, wide, tall, "#FF7A1A", 3);
    }
    this.lead();
  }

  // a line that stands out on bright and on dark
  frame(context, x, y, width, height, colour, thick) {
    for (const [stroke, line] of [["rgb(0 0 0 / 70%)", thick + 2], [colour, thick]]) {
      context.strokeStyle = stroke;
      context.lineWidth = line;
      context.strokeRect(x + thick / 2, y + thick / 2, width - thick, height - thick);
    }
  }

  // tokens that are no patches, each as a button with its weight
  lead() {
    const { grid, weights, focus } = this;
    const most = weights ? this.top ?? largest(weights.subarray(grid.leading)) : 1;
    const stamp = `${grid.leading}`;
    if (this.leads.stamp !== stamp) {
      this.leads.stamp = stamp;
      this.leads.replaceChildren(...Array.from({ length: grid.leading }, (_, at) => {
        const button = el("button", { type: "button", className: "lead", onclick: () => this.onpin(at) }, el("span", { className: "swatch" }), el("span", {}, nameOf(grid, at)), el("span", { className: "share" }));
        button.addEventListener("pointerenter", (event) => { if (event.pointerType !== "touch") this.onpoint(at, event.shiftKey); });
        button.addEventListener("pointerleave", () => this.onpoint(null, false));
        return button;
      }));
    }
    [...this.leads.children].forEach((button, at) => {
      button.setAttribute("aria-pressed", String(focus === at));
      const [swatch, , share] = button.children;
      swatch.style.background = weights ? css(shade(weights[at], most, false)) : "";
      share.replaceChildren(weights ? number(weights[at]) : "");
    });
  }
}
