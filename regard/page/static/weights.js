// The weights of a text that a model has read, and the words about them. Short texts come with all their weights; for long
// ones only what is on the screen is requested.

import { el, tokenNode, numbering, number, word } from "./ui.js";
import { HEADS } from "./colour.js";
import { ask } from "./client.js";

// places where one text attends to another
const ACROSS = ["cross", "aligner"];

// The weights of a reading. `values` identifies it to the server, `labels` are the names of the queries.
export class Weights {
  constructor(reply, values, labels = null) {
    this.meta = reply.meta;
    this.arrays = reply.arrays;
    this.values = values;
    this.queries = labels || reply.meta.queries;
    this.keys = reply.meta.keys;
    this.small = reply.meta.small;
    this.T = this.queries.length;
  }

  // the number of columns of a layer's map, and their names
  S(layer) {
    return this.meta.layers[layer].columns;
  }

  names(layer) {
    if (!this.meta.layers[layer].slots) return this.keys;
    this.slots ||= {};
    this.slots[layer] ||= Array.from({ length: this.S(layer) }, (_, at) => `▁slot ${at + 1}`);
    return this.slots[layer];
  }

  heads(layer) {
    return this.meta.layers[layer].heads;
  }

  signed(layer) {
    return this.meta.layers[layer].signed;
  }

  // whether a query cannot see a key; a visible key may have weight zero
  hidden(layer, query, key, weight) {
    const { causal, slots, zeros_are_hidden: zeros } = this.meta.layers[layer];
    return (causal && !slots && key > query) || (zeros && weight === 0);
  }

  // [T * S] of one head, or the mean of all; short texts only
  map(layer, head) {
    const { values, shape: [H, T, S] } = this.arrays[`layer${layer}`];
    if (head !== "avg") return values.subarray(head * T * S, (head + 1) * T * S);
    const mean = new Float32Array(T * S);
    for (let h = 0; h < H; h += 1) for (let i = 0; i < T * S; i += 1) mean[i] += values[h * T * S + i] / H;
    return mean;
  }

  // the row of a query: [S] for each head
  async row(layer, query) {
    if (this.small) {
      const { shape: [H, T, S], values } = this.arrays[`layer${layer}`];
      return Array.from({ length: H }, (_, h) => values.subarray((h * T + query) * S, (h * T + query + 1) * S));
    }
    // only the row that was pointed at last is waited for
    if (this.work && this.work.row !== `${layer}/${query}`) this.work.abort.abort();
    this.work = { row: `${layer}/${query}`, abort: new AbortController() };
    const { arrays } = await ask("rows", { ...this.values, layer, first: query, count: 1 }, this.work.abort.signal);
    const { shape: [H, , S], values } = arrays.weights;
    return Array.from({ length: H }, (_, h) => values.subarray(h * S, (h + 1) * S));
  }
}

function mean(rows) {
  const total = new Float32Array(rows[0].length);
  for (const row of rows) for (let i = 0; i < row.length; i += 1) total[i] += row[i] / rows.length;
  return total;
}

export function chosen(rows, head) {
  return head === "avg" || head === "all" ? mean(rows) : rows[head];
}

export function colourOf(head) {
  return typeof head === "number" ? HEADS[head % HEADS.length] : getComputedStyle(document.documentElement).getPropertyValue("--accent").trim();
}

// the five keys with the largest weights of a query; a pair that is pointed at comes first
export async function readout(box, weights, layer, head, query, verb = "attention goes to", key = null) {
  const rows = await weights.row(layer, query);
  const row = chosen(rows, head);
  const names = weights.names(layer);
  const seen = [...row.keys()].filter((at) => !weights.hidden(layer, query, at, row[at]));
  const best = seen.sort((a, b) => Math.abs(row[b]) - Math.abs(row[a])).slice(0, 5);
  const top = Math.abs(row[best[0]]) || 1;
  const list = el("ol", { className: "best" });
  for (const at of best) {
    const bar = el("span", { className: row[at] < 0 ? "bar against" : "bar" });
    bar.style.inlineSize = `${100 * Math.abs(row[at]) / top}%`;
    list.append(el("li", { "data-key": at, className: at === key ? "pointed" : "" }, tokenNode(names[at], {}, numbering(names)[at]), el("span", { className: "track" }, bar), number(row[at])));
  }
  const looks = word(weights.queries, query);
  const own = names === weights.keys && !ACROSS.includes(weights.values.place);
  const about = key ?? best[0];
  const object = own && about === query ? el("b", {}, "itself") : about === undefined ? null : word(names, about);
  const share = about === undefined ? null : number(row[about], key === null ? 2 : 3);
  let words;
  if (about === undefined) words = [looks, " sees nothing"];
  else if (key !== null && !seen.includes(key)) words = [looks, " cannot see ", object, weights.meta.layers[layer].causal && key > query ? ": it comes later" : ": it is hidden from it"];
  // called a share only if weights are shares
  else if (weights.signed(layer)) words = key === null ? [looks, "’s largest weight, ", share, ", is that of ", object] : [looks, "’s weight for ", object, " is ", share];
  else words = [share, " of ", looks, `’s ${verb} `, object];
  const more = row.length - seen.length;
  box.replaceChildren(el("p", { className: "reading" }, ...words, "."), list, more ? el("p", { className: "quiet unseen" }, `${more.toLocaleString("en")} of ${row.length.toLocaleString("en")} are hidden from it.`) : "");
}
