// A map as a matrix to pan and zoom, and a grid of heads.

import { el, tokenNode, numbering, number, word } from "./ui.js";
import { HEADS, image, codedImage, largest, fit } from "./colour.js";
import { key as colourKey, short } from "./chart.js";
import { ask } from "./client.js";
import { chosen } from "./weights.js";

// cells on the long side of a tile, and the most of a whole picture
const WIDE = 512;
// pixels of a map that always stay in sight
const EDGE = 40;

// a map of any size: drag to pan, wheel or pinch to zoom
export class Matrix {
  constructor(host, onhover, onpin, onmove, onprogress = () => {}) {
    Object.assign(this, { onhover, onpin, onmove, onprogress, at: null });
    this.canvas = el("canvas", { className: "matrix", tabIndex: 0, role: "application", "aria-label": "matrix of weights, queries down, keys across: arrow keys pan, plus and minus zoom" });
    this.rows = el("div", { className: "labels rows", "aria-hidden": "true" });
    this.columns = el("div", { className: "labels columns", "aria-hidden": "true" });
    this.tip = el("div", { className: "tip", hidden: true, "aria-hidden": "true" });
    this.legend = el("div", { className: "legend-line" });
    this.box = el("div", { className: "matrix-box" }, this.columns, this.rows, this.canvas, this.tip);
    host.append(this.box, this.legend);
    this.tiles = new Map();
    this.pointers = new Map();
    this.frames = [];
    new ResizeObserver(() => this.later()).observe(this.box);
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const at = this.place(event);
      this.zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0015)), at.x, at.y);
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => { this.canvas.setPointerCapture(event.pointerId); this.pointers.set(event.pointerId, this.place(event)); this.moved = 0; });
    this.canvas.addEventListener("pointermove", (event) => this.pointer(event));
    this.canvas.addEventListener("pointerup", (event) => {
      this.pointers.delete(event.pointerId);
      if (this.moved < 4) { const cell = this.cell(this.place(event)); if (cell) { this.onpin(cell.query); this.onhover(cell); } }
    });
    this.canvas.addEventListener("pointercancel", (event) => this.pointers.delete(event.pointerId));
    this.canvas.addEventListener("pointerleave", () => { this.over = null; this.tip.hidden = true; this.onhover(null); this.later(); });
    this.canvas.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: [40, 0], ArrowRight: [-40, 0], ArrowUp: [0, 40], ArrowDown: [0, -40] }[event.key];
      if (steps) { this.x += steps[0]; this.y += steps[1]; this.went(); event.preventDefault(); }
      if (event.key === "+" || event.key === "=") this.zoom(1.3, this.width / 2, this.height / 2);
      if (event.key === "-") this.zoom(1 / 1.3, this.width / 2, this.height / 2);
    });
  }

  // `at` gives the middle and the zoom, as told by `onmove`; null: the whole map
  show(weights, { layer, head, log = false, pin = null, pooled = "largest", at = null }) {
    const moved = weights !== this.weights || at !== this.at || (this.weights && weights.S(layer) !== this.weights.S(this.layer));
    const fresh = weights !== this.weights || layer !== this.layer || head !== this.head || log !== this.log || pooled !== this.pooled;
    Object.assign(this, { weights, layer, head, log, pin, pooled, at });
    if (fresh) {
      for (const tile of this.tiles.values()) if (!tile.reply) tile.abort.abort();
      this.tiles.clear();
      this.stopped = false;
      this.top = 0;
      this.twoSided = false;
      this.blank = false;
      if (weights.small) {
        const map = weights.map(layer, head === "all" ? "avg" : head);
        this.top = largest(map);
        this.whole = image(map, weights.S(layer), weights.T, this.top, log, (query, key, weight) => weights.hidden(layer, query, key, weight));
        this.twoSided = map.some((value) => value < 0);
        this.blank = weights.meta.layers[layer].zeros_are_hidden && map.includes(0);
      } else {
        this.whole = null;
      }
    }
    if (moved) { this.scale = null; clearTimeout(this.telling); }
    this.later();
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  pointer(event) {
    const at = this.place(event);
    const old = this.pointers.get(event.pointerId);
    if (!old) { const cell = this.cell(at); this.onhover(cell); this.over = cell; this.tell(cell, at); this.later(); return; }
    if (this.pointers.size === 1) {
      this.x += at.x - old.x;
      this.y += at.y - old.y;
    } else {
      const [other] = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
      const ratio = Math.hypot(at.x - other.x, at.y - other.y) / Math.max(1, Math.hypot(old.x - other.x, old.y - other.y));
      this.zoom(ratio, other.x, other.y);
    }
    this.moved += Math.abs(at.x - old.x) + Math.abs(at.y - old.y);
    this.pointers.set(event.pointerId, at);
    this.went();
  }

  // the pair under the pointer and its weight, beside it
  async tell(cell, at) {
    this.tip.hidden = !cell || matchMedia("(hover: none)").matches;
    if (this.tip.hidden) return;
    const { weights, layer, head } = this;
    const { query, key } = cell;
    const beside = at.x > this.width / 2;
    this.tip.style.left = beside ? "" : `${this.canvas.offsetLeft + at.x + 14}px`;
    this.tip.style.right = beside ? `${this.box.clientWidth - this.canvas.offsetLeft - at.x + 14}px` : "";
    this.tip.style.top = `${this.canvas.offsetTop + at.y + 14}px`;
    const pair = [word(weights.queries, query), " → ", word(weights.names(layer), key), " "];
    const value = (row) => (weights.hidden(layer, query, key, row[key]) ? "hidden" : number(row[key]));
    if (!weights.small) this.tip.replaceChildren(...pair, "…");
    try {
      const row = chosen(await weights.row(layer, query), head);
      if (this.over && this.over.query === query && this.over.key === key) this.tip.replaceChildren(...pair, value(row));
    } catch { /* another row is pointed at */ }
  }

  // moved by hand: drawn at once, reported when the movement ends
  went() {
    this.keep();
    this.later();
    clearTimeout(this.telling);
    this.telling = setTimeout(() => {
      if (!this.box.isConnected) return;
      const [query, key] = [(this.height / 2 - this.y) / this.scale, (this.width / 2 - this.x) / this.scale];
      this.at = `${query.toFixed(1)},${key.toFixed(1)},${this.scale.toPrecision(4)}`;
      this.onmove(this.at);
    }, 250);
  }

  // the whole map, or the place that a link names
  settle() {
    const S = this.weights.S(this.layer);
    this.least = Math.min(Math.max(1, this.width - 2) / S, Math.max(1, this.height - 2) / this.weights.T, 48);
    const [query, key, scale] = (this.at || "").split(",").map(Number);
    const known = [query, key, scale].every(Number.isFinite) && scale > 0;
    this.scale = known ? Math.min(Math.max(scale, this.least * 0.8), 64) : this.least;
    this.x = known ? this.width / 2 - key * this.scale : 1;
    this.y = known ? this.height / 2 - query * this.scale : 1;
    this.keep();
  }

  // at least an edge of the map stays in sight
  keep() {
    const within = (at, room, count) => Math.min(Math.max(at, EDGE - count * this.scale), room - EDGE);
    this.x = within(this.x, this.width, this.weights.S(this.layer));
    this.y = within(this.y, this.height, this.weights.T);
  }

  zoom(ratio, x, y) {
    const before = this.scale;
    this.scale = Math.min(Math.max(before * ratio, this.least * 0.8), 64);
    this.x = x - (x - this.x) * this.scale / before;
    this.y = y - (y - this.y) * this.scale / before;
    this.went();
  }

  cell({ x, y }) {
    const query = Math.floor((y - this.y) / this.scale);
    const key = Math.floor((x - this.x) / this.scale);
    return query >= 0 && key >= 0 && query < this.weights.T && key < this.weights.S(this.layer) ? { query, key } : null;
  }

  later() {
    if (this.waiting || !this.weights) return;
    this.waiting = true;
    requestAnimationFrame((now) => { this.waiting = false; this.frames.push(now); if (this.frames.length > 240) this.frames.shift(); this.draw(); });
  }

  draw() {
    const { weights } = this;
    const S = weights.S(this.layer);
    // as wide as the longest name, within bounds
    const longest = Math.max(...[weights.queries, weights.names(this.layer)].map((names) => names.slice(0, 200).reduce((most, name) => Math.max(most, name.length), 0)));
    const labels = Math.min(120, Math.max(56, 14 + 8 * longest), this.box.clientWidth / 4);
    const room = this.box.clientWidth - labels;
    const tall = Math.max(280, Math.min(room, window.innerHeight - 330 - (weights.small ? labels : 0)));
    this.height = weights.T < S ? Math.max(200, Math.min(tall, tall * weights.T / S + 40)) : tall;
    // as wide as the whole map, so that no empty space is beside it
    const unit = Math.min(Math.max(1, room - 2) / S, Math.max(1, this.height - 2) / weights.T, 48);
    this.width = Math.min(room, Math.max(240, Math.ceil(unit * S) + 2));
    this.box.style.setProperty("--labels", `${labels}px`);
    const context = fit(this.canvas, this.width, this.height);
    // drawn while hidden, as for the thumbnails, it had no size
    if (this.scale === null || this.unseen) this.settle();
    this.unseen = this.box.clientWidth === 0;
    context.imageSmoothingEnabled = false;
    if (this.whole) {
      context.drawImage(this.whole, this.x, this.y, S * this.scale, weights.T * this.scale);
    } else {
      const coarse = farthest(weights, this.layer);
      this.paint(context, coarse, true);
      const level = Math.min(coarse, Math.max(0, Math.floor(-Math.log2(this.scale * (window.devicePixelRatio || 1)) + 0.5)));
      if (level < coarse) this.paint(context, level, false);
    }
    this.frame(context);
    this.names();
    this.explain();
  }

  // the colour bar
  explain() {
    const { top, twoSided, log, layer, weights } = this;
    const { causal, slots } = weights.meta.layers[layer];
    const hidden = (causal && !slots) || this.blank;
    const stamp = [top, twoSided, log, hidden, getComputedStyle(document.documentElement).colorScheme].join();
    if (!top || this.explained === stamp) return;
    this.explained = stamp;
    this.legend.replaceChildren(colourKey({ high: top, signed: twoSided, log, hidden }));
  }

  paint(context, level, overview) {
    const span = 2 ** level;
    const [rows, columns] = this.weights.meta.layers[this.layer].tiles[level].map((cells) => cells * span);
    const [down, across] = [Math.ceil(this.weights.T / rows), Math.ceil(this.weights.S(this.layer) / columns)];
    const [tall, wide] = [rows * this.scale, columns * this.scale];
    const head = overview ? undefined : typeof this.head === "number" ? this.head : undefined;
    let ready = 0;
    for (let at = 0; at < down * across; at += 1) {
      // tiles that the server makes together are requested one after the other
      const [row, column] = rows > columns ? [at % down, Math.floor(at / down)] : [Math.floor(at / across), at % across];
      const [left, top] = [this.x + column * wide, this.y + row * tall];
      const shown = left < this.width && top < this.height && left + wide > 0 && top + tall > 0;
      if (!overview && !shown) { this.drop(`${level}/${row}/${column}`); continue; }
      const tile = this.tile(level, row, column, head);
      if (!tile.canvas) continue;
      ready += 1;
      context.drawImage(tile.canvas, left, top, tile.canvas.width * span * this.scale, tile.canvas.height * span * this.scale);
    }
    if (overview && !this.stopped) this.onprogress(ready / (down * across));
  }

  // stops waiting for tiles that have not come
  cancel() {
    this.stopped = true;
    for (const tile of this.tiles.values()) if (!tile.reply) tile.abort.abort();
  }

  // requests once more what was cancelled or failed
  again() {
    this.stopped = false;
    for (const id of [...this.tiles.keys()]) this.drop(id);
    this.later();
  }

  drop(id) {
    const tile = this.tiles.get(id);
    if (tile && !tile.reply) { tile.abort.abort(); this.tiles.delete(id); }
  }

  tile(level, row, column, head) {
    const id = `${level}/${row}/${column}`;
    let tile = this.tiles.get(id);
    if (tile) return tile;
    tile = { abort: new AbortController(), canvas: null, reply: null, level, row, column };
    this.tiles.set(id, tile);
    const { weights, layer } = this;
    ask("tile", { ...weights.values, layer, level, row, column, head }, tile.abort.signal).then((reply) => {
      if (this.tiles.get(id) !== tile) return;
      tile.reply = reply;
      if (reply.meta.scale > this.top || (reply.meta.signed && !this.twoSided)) {
        // earlier tiles were coloured for a smaller maximum, or for one side
        this.top = Math.max(this.top, reply.meta.scale);
        this.twoSided ||= reply.meta.signed;
        for (const other of this.tiles.values()) if (other.reply) this.colour(other);
      } else {
        this.colour(tile);
      }
      this.later();
      if (this.onoverview && head === undefined) this.onoverview();
    }).catch((error) => { if (this.tiles.get(id) === tile && error.name !== "AbortError") { tile.failed = true; this.onhover(null, error); } });
    return tile;
  }

  colour(tile) {
    const { meta, arrays } = tile.reply;
    const { values, shape: [H, t, s] } = arrays[this.pooled] || arrays.largest;
    const one = H === 1 ? 0 : typeof this.head === "number" ? this.head : null;
    const codes = one === null ? values.slice(0, t * s) : values.subarray(one * t * s, (one + 1) * t * s);
    // the largest over all heads
    if (one === null) for (let i = t * s; i < H * t * s; i += 1) if (Math.abs(values[i]) > Math.abs(codes[i % (t * s)])) codes[i % (t * s)] = values[i];
    tile.canvas = codedImage(codes, s, t, meta, this.top, this.twoSided, this.log, this.shadow(tile));
  }

  // the cells of a tile of a causal map that lie in the future of all their queries
  shadow({ level, row, column }) {
    const { causal, slots, tiles } = this.weights.meta.layers[this.layer];
    if (!causal || slots) return null;
    const [down, across] = tiles[level];
    return (t, s) => (column * across + s) * 2 ** level > (row * down + t + 1) * 2 ** level - 1;
  }

  frame(context) {
    const S = this.weights.S(this.layer);
    context.strokeStyle = "rgba(127,127,127,.5)";
    context.strokeRect(this.x, this.y, S * this.scale, this.weights.T * this.scale);
    const lines = [[this.over ? this.over.query : null, this.over ? this.over.key : null], [this.pin, null]];
    context.strokeStyle = "#E69F00";
    context.lineWidth = 1.5;
    for (const [query, key] of lines) {
      if (query !== null && query !== undefined) context.strokeRect(this.x, this.y + query * this.scale, S * this.scale, this.scale);
      if (key !== null && key !== undefined) context.strokeRect(this.x + key * this.scale, this.y, this.scale, this.weights.T * this.scale);
    }
  }

  names() {
    const room = this.scale >= 13;
    const make = (tokens, offset, count, vertical) => {
      const nodes = [];
      if (!room) return nodes;
      const first = Math.max(0, Math.ceil(-offset / this.scale));
      const last = Math.min(tokens.length, first + Math.ceil((vertical ? this.height : this.width) / this.scale) + 1, count);
      for (let at = first; at < last; at += 1) {
        const node = tokenNode(tokens[at], {}, numbering(tokens)[at]);
        const middle = offset + (at + 0.5) * this.scale;
        if (middle > (vertical ? this.height : this.width)) break;
        node.style[vertical ? "top" : "left"] = `${middle}px`;
        nodes.push(node);
      }
      return nodes;
    };
    this.rows.replaceChildren(...make(this.weights.queries, this.y, this.weights.T, true));
    this.columns.replaceChildren(...make(this.weights.names(this.layer), this.x, this.weights.S(this.layer), false));
    this.box.classList.toggle("bare", !room);
  }
}

// the level at which the whole map fits into one tile
function farthest(weights, layer) {
  return Math.max(0, Math.ceil(Math.log2(Math.max(weights.T, weights.S(layer)) / WIDE)));
}

// every head of a layer as a small picture
export function grid(host, weights, layer, head, log, onhead, matrix) {
  const H = weights.heads(layer);
  const side = Math.round(Math.min(260, Math.max(132, host.clientWidth / Math.min(H, 6) - 48)));
  host.style.setProperty("--thumb", `${side}px`);
  const draw = () => {
    const buttons = [];
    for (let h = 0; h < H; h += 1) {
      const canvas = el("canvas", { "aria-hidden": "true" });
      const context = fit(canvas, side, side);
      context.imageSmoothingEnabled = false;
      if (weights.small) {
        const map = weights.map(layer, h);
        const hidden = (query, key, weight) => weights.hidden(layer, query, key, weight);
        context.drawImage(image(map, weights.S(layer), weights.T, largest(map), log, hidden), 0, 0, side, side);
      } else {
        const coarse = farthest(weights, layer);
        const [tall, wide] = weights.meta.layers[layer].tiles[coarse];
        const [unit, across] = [side * 2 ** coarse / weights.T, side * 2 ** coarse / weights.S(layer)];
        for (const [id, tile] of matrix.tiles) {
          const [level, row, column] = id.split("/").map(Number);
          if (level !== coarse || !tile.reply) continue;
          const { values, shape: [, t, s] } = tile.reply.arrays.largest;
          const codes = values.subarray(h * t * s, (h + 1) * t * s);
          const picture = codedImage(codes, s, t, tile.reply.meta, matrix.top, matrix.twoSided, log, matrix.shadow(tile));
          context.imageSmoothingEnabled = true;
          context.drawImage(picture, column * wide * across, row * tall * unit, s * across, t * unit);
        }
      }
      const button = el("button", { type: "button", className: "thumb", "aria-pressed": String(h === head), onclick: () => onhead(h) },
        canvas, el("span", {}, `head ${h + 1}`), el("small", { className: "quiet" }, weights.small ? `to ${short(largest(weights.map(layer, h)))}` : ""));
      button.style.setProperty("--mark", HEADS[h % HEADS.length]);
      buttons.push(button);
    }
    host.replaceChildren(...buttons);
  };
  host.classList.add("grid");
  if (!weights.small) matrix.onoverview = draw;
  draw();
}
