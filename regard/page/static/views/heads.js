// Heads: what any model attends to in any text; all heads as a grid, one as lines or as a matrix.

import { count, el, chips, control, layout, problem, renew, select, slider, textBox } from "../ui.js";
import { whole } from "../store.js";
import { HEADS } from "../colour.js";
import { ask, forget } from "../client.js";
import { Lines } from "../lines.js";
import { Matrix, grid } from "../matrix.js";
import { Weights, readout } from "../weights.js";

const PLACES = { encoder: "encoder", decoder: "decoder", cross: "target to source", aligner: "aligner" };
const MODES = ["lines", "matrix", "grid"];
const NAMES = { cross: ["target", "source"], aligner: ["target", "source"] };

const SAYS = {
  lines: "Each line is a share of attention: how much of a token’s value reaches the token that attends to it. The stronger the line, the more.",
  matrix: "Each cell is a share of attention: the token of its row attends to the token of its column. The brighter the cell, the more.",
  grid: "Each picture is one head: queries from top to bottom, keys from left to right.",
};

// for mechanisms whose weights are not shares
const SIGNED = {
  lines: " Weights of this mechanism need not sum to one; negative ones are grey.",
  matrix: " Weights of this mechanism need not sum to one; if some are negative, these are blue and the others red.",
};
SIGNED.grid = SIGNED.matrix;

const LINKED = "The model’s aligner says where a target token comes from: the thicker the line or the brighter the cell, the surer it is of the source token.";
const FORMULA = {
  attention: "o_i = Σ_j a_ij v_j,  a = the effective weights of the layer",
  aligner: "p(s | y_≤t, x) ∝ p(s | y_<t, x) p(y_t | x_s),  target t comes from source s",
};

export const title = "Heads";

export function mount(host, app) {
  const parts = layout(host, SAYS.lines, FORMULA.attention);
  const pictures = el("div", { className: "pictures" });
  const thumbs = el("div", {});
  const lanes = el("div", {});
  const cells = el("div", {});
  pictures.append(lanes, cells, thumbs);
  parts.picture.append(pictures);
  let weights = null;
  let asked = null;
  let work = null;
  const pinned = (at) => app.set({ pin: at === null ? null : String(at) });
  const lines = new Lines(lanes, pinned, (focus) => number(focus && focus.side === "query" ? focus.at : null));
  const matrix = new Matrix(cells, (cell, error) => { if (error) app.fail(error); number(cell ? cell.query : null, cell ? cell.key : null); }, pinned, (at) => app.note({ at }), (done) => app.progress(done, "Drawing the map", () => matrix.cancel()));

  const options = () => {
    const state = app.state();
    const run = app.run();
    const place = run.places.includes(state.place) ? state.place : run.places.includes("encoder") ? "encoder" : run.places[0];
    const layers = weights ? weights.meta.layers.length : 1;
    const layer = whole(state.layer, 0, 0, layers - 1);
    const heads = weights ? weights.heads(layer) : 1;
    const head = state.head === "avg" ? "avg" : whole(state.head, "all", 0, heads - 1);
    const mode = MODES.includes(state.mode) ? state.mode : weights && !weights.small ? "matrix" : "lines";
    return { run, place, layer, layers, heads, head, mode, text: state.text || app.example(), target: state.target || "", pin: whole(state.pin, null, 0, Infinity), at: state.at || null, log: state.log === "1", pooled: state.pooled === "mean" ? "mean" : "largest" };
  };

  async function number(query, key = null) {
    const { layer, head, pin } = options();
    const at = query ?? pin;
    if (at === null || !weights || at >= weights.T) { parts.numbers.token = null; parts.numbers.replaceChildren(el("p", { className: "quiet hint" }, "Point at a token to see what it attends to; click or tap to keep it.")); return; }
    const token = `${layer}/${head}/${at}/${key}`;
    parts.numbers.token = token;
    try {
      const box = el("div", {});
      await readout(box, weights, layer, head, at, weights.values.place === "aligner" ? "link goes to" : undefined, key);
      if (parts.numbers.token === token) parts.numbers.replaceChildren(box);
    } catch (error) { if (error.name !== "AbortError") parts.numbers.replaceChildren(problem(error)); }
  }

  function input() {
    const { run, place, text, target } = options();
    const runText = (value) => { if (value === text) matrix.again(); app.set({ text: value, pin: null, at: null }, true); };
    const boxes = [textBox(text, run.examples, runText, "Type any text", "Text to read")];
    if (place !== "encoder" && run.task === "translate") {
      boxes.push(textBox(target, [], (value) => app.set({ target: value, pin: null, at: null }, true), "its translation; empty: the model’s own", "Translation to read", true));
    }
    renew(parts.input, ...boxes);
  }

  function controls() {
    const { run, place, layer, layers, heads, head, mode, log, pooled } = options();
    const list = [
      control("attention of", select(run.places.map((one) => [one, PLACES[one] || one]), place, (value) => app.set({ place: value, layer: null, pin: null, at: null }, true), "place")),
      control("seen as", chips([{ key: "lines", text: "lines" }, { key: "matrix", text: "matrix" }, { key: "grid", text: "all heads" }], mode, (value) => app.set({ mode: value }, true), "picture")),
    ];
    if (layers > 1) list.push(control("layer", slider(layer + 1, 1, layers, 1, (value) => app.set({ layer: String(value - 1) }), "layer")));
    const choices = [{ key: "all", text: "all" }, { key: "avg", text: "average" }];
    for (let h = 0; h < heads; h += 1) choices.push({ key: h, text: String(h + 1), colour: HEADS[h % HEADS.length], title: `head ${h + 1}` });
    if (heads > 1) list.push(control("head", chips(choices, head, (value) => app.set({ head: String(value) }), "head")));
    if (mode !== "lines") list.push(control("shade", chips([{ key: false, text: "root" }, { key: true, text: "logarithm" }], log, (value) => app.set({ log: value ? "1" : null }), "shade")));
    if (weights && !weights.small && mode === "matrix") list.push(control("a cell is its", chips([{ key: "largest", text: "largest" }, { key: "mean", text: "mean" }], pooled, (value) => app.set({ pooled: value }), "pooling")));
    renew(parts.controls, ...list);
  }

  function draw() {
    const { place, layer, head, mode, pin, at, log, pooled } = options();
    parts.words.textContent = place === "aligner" ? LINKED : SAYS[mode] + (weights.signed(layer) ? SIGNED[mode] : "");
    parts.side.querySelector(".formula code").textContent = FORMULA[place] || FORMULA.attention;
    lanes.hidden = mode !== "lines";
    cells.hidden = mode !== "matrix";
    thumbs.hidden = mode !== "grid";
    const kept = pin !== null && pin < weights.T ? pin : null;
    if (mode === "lines") lines.show(weights, { layer, head, pin: kept, names: NAMES[place] });
    if (mode === "matrix" || (mode === "grid" && !weights.small)) matrix.show(weights, { layer, head, log, pin: kept, pooled, at });
    if (mode === "grid") grid(thumbs, weights, layer, head, log, (h) => app.set({ head: String(h), mode: weights.small ? "lines" : "matrix" }, true), matrix);
    number(null);
    controls();
    const { meta } = weights;
    const cut = meta.cut ? `, cut at ${meta.longest.toLocaleString("en")}` : "";
    const heads = weights.heads(layer);
    const which = head === "all" ? (heads > 1 ? `${heads} heads` : "1 head") : head === "avg" ? `average of ${count(heads, "head")}` : `head ${head + 1} of ${heads}`;
    app.done(`${count(weights.T, "token")}${cut} · ${meta.layers[layer].spec} · layer ${layer + 1} of ${meta.layers.length} · ${which}`);
  }

  async function update() {
    const { run, place, text, target } = options();
    const values = { run: run.name, place, text, target: place === "encoder" ? "" : target };
    const id = JSON.stringify(values);
    if (id === asked && weights) { draw(); return; }
    asked = id;
    if (work) work.abort();
    const mine = work = new AbortController();
    forget();
    input();
    app.busy("Reading the text", work);
    try {
      const reply = await ask("read", values, mine.signal);
      // another reading has begun since, perhaps of the same text
      if (work !== mine) return;
      // a row of the aligner is about the token after it
      weights = new Weights(reply, values, place === "aligner" ? reply.meta.predicted : null);
      pictures.classList.remove("empty");
      draw();
    } catch (error) {
      if (work !== mine) return;
      asked = null;
      if (error.name === "AbortError") return;
      app.fail(error);
      parts.numbers.replaceChildren(problem(error));
    }
  }

  return {
    update,
    place: options,
    move: (step) => { if (weights) lines.move(step, options().pin, weights.T); },
    picture: () => parts.picture,
    matrix,
    repaint: () => { matrix.weights = null; if (weights) draw(); },
  };
}
