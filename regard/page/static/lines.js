// Lines between two columns of tokens: what attends to what.

import { el, tokenNode, numbering } from "./ui.js";
import { largest, fit } from "./colour.js";
import { draw } from "./chart.js";
import { ask } from "./client.js";
import { colourOf } from "./weights.js";

// the height of a row of tokens follows the font size
const ROW = Math.round(1.7 * parseFloat(getComputedStyle(document.documentElement).fontSize));
// the most lines that are drawn: the strongest
const MOST = 3000;

// two columns of tokens with lines between them; only what is on the screen is in the DOM
export class Lines {
  constructor(host, onpin, onhover) {
    this.onpin = onpin;
    this.onhover = onhover;
    this.canvas = el("canvas", { className: "between", "aria-hidden": "true" });
    this.left = el("div", { className: "lane left", role: "listbox", "aria-label": "queries", tabIndex: 0 });
    this.right = el("div", { className: "lane right", role: "group", "aria-label": "keys" });
    this.body = el("div", { className: "lanes-body" }, this.left, el("div", { className: "middle" }, this.canvas), this.right);
    this.scroller = el("div", { className: "lanes" }, this.body);
    this.note = el("p", { className: "quiet lane-names" });
    this.faint = el("p", { className: "quiet faint" });
    this.row = ROW;
    host.append(this.faint, this.note, this.scroller);
    this.hover = null;
    this.blocks = new Map();
    this.pending = new Map();
    this.scroller.addEventListener("scroll", () => this.later());
    new ResizeObserver(() => this.later()).observe(this.scroller);
    this.left.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (step) { event.preventDefault(); this.move(step); }
    });
  }

  move(step, pin = this.pin, count = this.weights.T) {
    const at = Math.min(Math.max((pin ?? -1) + step, 0), count - 1);
    this.onpin(at);
    const top = at * this.row;
    if (top < this.scroller.scrollTop || top > this.scroller.scrollTop + this.scroller.clientHeight - this.row) {
      this.scroller.scrollTop = top - this.scroller.clientHeight / 2;
    }
  }

  show(weights, { layer, head, pin, names = ["query", "key"] }) {
    const fresh = weights !== this.weights || layer !== this.layer;
    Object.assign(this, { weights, layer, head, pin });
    if (fresh) { this.drop(); this.blocks.clear(); this.hover = null; }
    if (weights.small) this.top = Math.max(...this.heads().map((one) => largest(weights.map(layer, one))));
    else if (fresh) this.top = 0;
    // rows are higher on a tall screen
    const room = (window.innerHeight - 24 * ROW / 1.7) / Math.max(weights.T, weights.S(layer));
    this.row = window.innerHeight < 1200 ? ROW : Math.round(Math.min(Math.max(room, ROW), 1.7 * ROW));
    this.scroller.style.setProperty("--row", `${this.row}px`);
    this.note.replaceChildren(el("span", {}, names[0]), el("span", {}, names[1]));
    this.body.style.height = `${Math.max(weights.T, Math.min(weights.S(layer), 100000)) * this.row}px`;
    this.drawn = null;
    this.later();
  }

  later() {
    if (this.waiting || !this.weights) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  window() {
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / this.row) - 2);
    return [first, first + Math.ceil(this.scroller.clientHeight / this.row) + 4];
  }

  heads() {
    return this.head === "all" ? [...Array(this.weights.heads(this.layer)).keys()] : [this.head];
  }

  // the factor by which small weights are drawn stronger
  get gain() {
    return this.top ? Math.max(1, 0.5 / this.top) : 1;
  }

  draw() {
    const [first, last] = this.window();
    const { gain } = this;
    const focus = this.hover ?? (this.pin === null || this.pin === undefined ? null : { side: "query", at: this.pin });
    const many = this.head === "all" && this.weights.heads(this.layer) > 1;
    this.faint.textContent = [
      gain >= 1.5 ? `No weight here is above ${this.top.toPrecision(1)}: lines are drawn ${Math.round(gain).toLocaleString("en")} times as strong.` : "",
      many && focus === null ? "The strongest line of each token and head; point at a token for all of its lines." : "",
    ].filter(Boolean).join(" ");
    this.lane(this.left, this.weights.queries, first, last, "query");
    this.lane(this.right, this.weights.names(this.layer), first, last, "key");
    const middle = this.canvas.parentElement;
    const height = this.scroller.clientHeight;
    this.canvas.style.top = `${this.scroller.scrollTop}px`;
    const context = fit(this.canvas, middle.clientWidth, height);
    const half = middle.clientWidth / 2;
    const lines = this.lines(first, last);
    this.canvas.shapes = (many && focus === null ? strongest(lines) : lines).map(([query, key, weight, head]) => {
      const lit = focus === null || (focus.side === "query" ? focus.at === query : focus.at === key);
      const from = (query + 0.5) * this.row - this.scroller.scrollTop;
      const to = (key + 0.5) * this.row - this.scroller.scrollTop;
      const strength = Math.min(1, gain * Math.abs(weight));
      return {
        d: `M0 ${from}C${half} ${from} ${half} ${to} ${2 * half} ${to}`,
        stroke: weight < 0 ? "#888888" : colourOf(this.head === "avg" ? "avg" : head),
        width: 1 + 2.5 * strength,
        alpha: Math.min(1, strength * (lit ? 1 : 0.08) + (lit && focus !== null ? 0.05 : 0)),
      };
    });
    draw(context, this.canvas.shapes);
    this.mark(focus);
  }

  // [query, key, weight, head] of the lines to draw
  lines(first, last) {
    const { weights, layer, head, gain } = this;
    const out = [];
    if (weights.small) {
      for (const one of this.heads()) {
        const map = weights.map(layer, one);
        const S = weights.S(layer);
        for (let query = first; query < Math.min(last, weights.T); query += 1) {
          for (let key = 0; key < S; key += 1) {
            const weight = map[query * S + key];
            if (gain * Math.abs(weight) > 0.02) out.push([query, key, weight, one]);
          }
        }
      }
      return out.length > MOST ? out.sort((a, b) => Math.abs(b[2]) - Math.abs(a[2])).slice(0, MOST) : out;
    }
    this.drop((block) => block * 32 >= last || (block + 1) * 32 <= first);
    for (let block = Math.floor(first / 32); block * 32 < Math.min(last, weights.T); block += 1) {
      const got = this.blocks.get(block);
      if (got === undefined) this.fetch(block);
      else if (got) {
        const { values, shape: [H, n, most] } = got.weights;
        for (let h = 0; h < H; h += 1) {
          if (typeof head === "number" && h !== head) continue;
          for (let i = 0; i < n * most; i += 1) {
            out.push([block * 32 + Math.floor(i / most), got.keys.values[h * n * most + i], values[h * n * most + i], h]);
          }
        }
      }
    }
    return out;
  }

  async fetch(block) {
    const { weights, layer } = this;
    const work = new AbortController();
    this.blocks.set(block, null);
    this.pending.set(block, work);
    try {
      const { arrays } = await ask("top", { ...weights.values, layer, first: block * 32, count: 32 }, work.signal);
      if (this.pending.get(block) === work) {
        this.blocks.set(block, arrays);
        this.top = Math.max(this.top, largest(arrays.weights.values));
        this.later();
      }
    } catch {
      if (this.pending.get(block) === work) this.blocks.delete(block);
    }
    if (this.pending.get(block) === work) this.pending.delete(block);
  }

  // stops waiting for lines that are off the screen
  drop(some = () => true) {
    for (const [block, work] of this.pending) {
      if (!some(block)) continue;
      this.pending.delete(block);
      this.blocks.delete(block);
      work.abort();
    }
  }

  lane(lane, tokens, first, last, side) {
    const stamp = `${first}-${last}`;
    if (lane.stamp === stamp && lane.tokens === tokens) return;
    Object.assign(lane, { stamp, tokens });
    const nodes = [];
    for (let at = first; at < Math.min(last, tokens.length); at += 1) {
      const node = tokenNode(tokens[at], { "data-at": at, "data-side": side }, numbering(tokens)[at]);
      if (side === "query") {
        node.setAttribute("role", "option");
        node.addEventListener("click", () => {
          this.onpin(this.pin === at ? null : at);
          this.left.focus({ preventScroll: true });
          // on a narrow page the numbers are at the foot of the screen: the token stays in sight above them
          if (matchMedia("(max-width: 820px)").matches) node.scrollIntoView({ block: "nearest" });
        });
      }
      // touch has no hover before a tap
      node.addEventListener("pointerenter", (event) => { if (event.pointerType !== "touch") this.point({ side, at }); });
      node.addEventListener("pointerleave", () => this.point(null));
      node.style.top = `${at * this.row}px`;
      nodes.push(node);
    }
    lane.replaceChildren(...nodes);
  }

  point(focus) {
    this.hover = focus;
    this.onhover(focus);
    this.later();
  }

  mark(focus) {
    const reach = new Map();
    if (focus) {
      for (const [query, key, weight] of this.lines(...this.window())) {
        if (focus.side === "query" ? query === focus.at : key === focus.at) {
          const other = focus.side === "query" ? key : query;
          reach.set(other, Math.min(1, Math.max(reach.get(other) || 0, this.gain * Math.abs(weight))));
        }
      }
    }
    for (const lane of [this.left, this.right]) {
      for (const node of lane.children) {
        const at = Number(node.dataset.at);
        const own = focus && focus.side === node.dataset.side;
        const share = focus ? (own ? Number(at === focus.at) : reach.get(at) || 0) : 0;
        node.style.setProperty("--share", share.toFixed(3));
        node.classList.toggle("lit", share > 0.05);
        node.classList.toggle("faded", Boolean(focus) && share <= 0.05);
        if (node.dataset.side === "query") node.setAttribute("aria-selected", String(at === this.pin));
      }
    }
  }
}

// the strongest line of each query and head
function strongest(lines) {
  const best = new Map();
  for (const line of lines) {
    const id = `${line[3]}/${line[0]}`;
    if (!best.has(id) || Math.abs(line[2]) > Math.abs(best.get(id)[2])) best.set(id, line);
  }
  return [...best.values()];
}
