// Translate: a sentence, its translation as it comes, the source of each word, and the beam search as a tree.

import { count, el, chips, control, layout, number, plainToken, problem, renew, select, slider, textBox, tokenNode } from "../ui.js";
import { whole } from "../store.js";
import { HEADS } from "../colour.js";
import { sketch, style } from "../chart.js";
import { ask, forget, stream } from "../client.js";
import { Lines } from "../lines.js";
import { Matrix } from "../matrix.js";
import { Weights, readout } from "../weights.js";

export const title = "Translate";

// what the lines show
const LINKS = {
  aligner: {
    text: "aligner",
    title: "links that the model has learned while it learned to translate",
    says: "Each target word is linked to the source words it comes from, by the model’s aligner: the thicker the line or the brighter the cell, the surer the link.",
    formula: "p(s | y_≤t, x) ∝ p(s | y_<t, x) p(y_t | x_s),  target t comes from source s",
    verb: "link goes to",
  },
  cross: {
    text: "attention",
    title: "what the decoder attends to, by layer and head",
    says: "Each target word attends to source words: the thicker the line or the brighter the cell, the larger the weight.",
    formula: "o_t = Σ_s a_ts v_s,  a = the weights of target t over the source, as the layer computes them",
    verb: "attention goes to",
  },
};

export function mount(host, app) {
  const parts = layout(host, LINKS.cross.says, LINKS.cross.formula);
  const columns = el("div", { className: "beside" });
  const treeBox = el("div", { className: "tree-box" });
  parts.picture.append(columns, treeBox);
  const sides = [];
  let asked = null;
  let work = null;

  const options = () => {
    const state = app.state();
    const run = app.run();
    const other = app.about.runs.find((one) => one.name === state.other && one.task === "translate");
    return { run, other, text: state.text || app.example(run), beam: whole(state.beam, 4, 1, 12), mode: state.mode === "matrix" ? "matrix" : "lines", head: whole(state.head, "avg", 0, 999), layer: state.layer, at: state.at || null, links: state.links, pin: whole(state.pin, null, 0, Infinity) };
  };

  function side(run) {
    const words = el("p", { className: "translation", dir: "auto", "aria-live": "polite" });
    const picture = el("div", {});
    const box = el("article", { className: "one-run" }, el("h2", { className: "quiet" }, run.title), words, picture);
    const made = { run, words, box, read: {}, steps: [], hypotheses: null };
    made.kinds = Object.keys(LINKS).filter((kind) => run.places.includes(kind));
    made.links = () => (made.kinds.includes(options().links) ? options().links : made.kinds[0]);
    Object.defineProperty(made, "weights", { get: () => made.read[made.links()] });
    const pinned = (at) => app.set({ pin: at === null ? null : String(at) });
    const lanes = el("div", {});
    const cells = el("div", {});
    picture.append(lanes, cells);
    made.lines = new Lines(lanes, pinned, (focus) => read(made, focus && focus.side === "query" ? focus.at : null));
    made.matrix = new Matrix(cells, (cell) => read(made, cell ? cell.query : null, cell ? cell.key : null), pinned, (at) => app.note({ at }));
    made.draw = () => {
      if (!made.weights) return;
      const { mode, pin, at } = options();
      const { layer, head } = made.choice();
      lanes.hidden = mode !== "lines";
      cells.hidden = mode !== "matrix";
      const kept = pin !== null && pin < made.weights.T ? pin : null;
      if (mode === "lines") made.lines.show(made.weights, { layer, head, pin: kept, names: ["target", "source"] });
      else made.matrix.show(made.weights, { layer, head, pin: kept, at });
    };
    made.choice = () => {
      const layers = made.weights ? made.weights.meta.layers.length : 1;
      const { layer, head } = options();
      const at = whole(layer, Math.max(layers - 2, 0), 0, layers - 1);
      const heads = made.weights ? made.weights.heads(at) : 1;
      return { layer: at, layers, heads, head: head === "avg" || heads === 1 ? "avg" : Math.min(head, heads - 1) };
    };
    return made;
  }

  async function read(made, query, key = null) {
    const { pin } = options();
    const at = query ?? pin;
    if (!made.weights || at === null || at >= made.weights.T) {
      if (query === null && pin === null) parts.numbers.replaceChildren(el("p", { className: "quiet hint" }, "Point at a word to see where it comes from; click or tap to keep it."));
      return;
    }
    const { layer, head } = made.choice();
    const box = el("div", {});
    try {
      await readout(box, made.weights, layer, head, at, LINKS[made.links()].verb, key);
      parts.numbers.replaceChildren(box);
    } catch (error) { app.fail(error); }
  }

  function controls() {
    const { run, other, beam, mode } = options();
    const { layer, layers, heads, head } = sides[0].choice();
    const choices = [{ key: "avg", text: "average" }];
    for (let h = 0; h < heads; h += 1) choices.push({ key: h, text: String(h + 1), colour: HEADS[h % HEADS.length], title: `head ${h + 1}` });
    const runs = app.about.runs.filter((one) => one.task === "translate" && one.name !== run.name);
    const [links, kinds] = [sides[0].links(), sides[0].kinds];
    const said = LINKS[links];
    parts.words.textContent = said.says;
    parts.side.querySelector(".formula code").textContent = said.formula;
    renew(parts.controls,
      kinds.length > 1 ? control("links by", chips(kinds.map((key) => ({ key, ...LINKS[key] })), links, (value) => app.set({ links: value, at: null }, true), "links")) : "",
      control("seen as", chips([{ key: "lines", text: "lines" }, { key: "matrix", text: "heat map" }], mode, (value) => app.set({ mode: value }, true), "picture")),
      layers > 1 ? control("layer", slider(layer + 1, 1, layers, 1, (value) => app.set({ layer: String(value - 1) }), "layer")) : "",
      heads > 1 ? control("head", chips(choices, head, (value) => app.set({ head: String(value) }), "head")) : "",
      control("beam", slider(beam, 1, 12, 1, (value) => app.set({ beam: String(value), pin: null }, true), "beam")),
      runs.length ? control("beside it", select([["", "nothing"], ...runs.map((one) => [one.name, one.title])], other ? other.name : "", (value) => app.set({ other: value || null }, true), "second run")) : "",
    );
  }

  async function translate(made, text, beam, signal) {
    made.steps = [];
    made.hypotheses = null;
    let source = [];
    await stream({ run: made.run.name, text, beam }, (record) => {
      if (record.source) { source = record.source; made.cut = record.cut ? record.longest : null; }
      if (record.beams) {
        made.steps.push(record);
        const path = trace(made.steps, best(record.beams));
        const last = path.length - 1;
        made.words.replaceChildren(...path.map((token, i) => {
          const node = tokenNode(token, { className: i === last ? "new" : "" });
          if (i === last && record.link !== null) node.title = `${plainToken(source[record.link])} ${record.weight.toFixed(2)}`;
          return node;
        }));
        app.busy(`${count(path.length, "token")}: ${plainToken(path[last])}${record.link === null ? "" : ` from ${plainToken(source[record.link])}`}`, work);
      }
      if (record.hypotheses) made.hypotheses = record.hypotheses;
    }, signal);
    made.words.replaceChildren(made.hypotheses[0].text);
    for (const place of made.kinds) {
      const values = { run: made.run.name, place, text, target: made.hypotheses[0].text };
      const reply = await ask("read", values, signal);
      made.read[place] = new Weights(reply, values, reply.meta.predicted);
    }
    made.draw();
  }

  async function update() {
    const { run, other, text, beam } = options();
    const id = JSON.stringify([run.name, other && other.name, text, beam]);
    if (id === asked) { for (const made of sides) made.draw(); controls(); read(sides[0], null); return; }
    asked = id;
    if (work) work.abort();
    const mine = work = new AbortController();
    forget();
    renew(parts.input, textBox(text, run.examples, (value) => app.set({ text: value, pin: null, at: null }, true), "Type a sentence to translate", "Sentence"));
    sides.length = 0;
    for (const one of other ? [run, other] : [run]) sides.push(side(one));
    columns.replaceChildren(...sides.map((made) => made.box));
    treeBox.replaceChildren();
    parts.numbers.replaceChildren();
    const began = performance.now();
    app.busy("Translating", work);
    try {
      for (const made of [...sides]) await translate(made, text, beam, mine.signal);
      // another search has begun since, perhaps for the same sentence
      if (work !== mine) return;
      controls();
      read(sides[0], null);
      for (const made of sides) treeBox.append(tree(made));
      const cut = sides[0].cut ? ` · only the first ${sides[0].cut} tokens were read` : "";
      app.done(`${count(sides[0].weights.T, "target token")} · ${Math.round(performance.now() - began)} ms · beam ${beam}${cut}`);
    } catch (error) {
      if (work !== mine) return;
      asked = null;
      if (error.name === "AbortError") { app.done("Cancelled."); return; }
      app.fail(error);
      parts.numbers.replaceChildren(problem(error));
    }
  }

  return {
    update,
    place: () => sides[0].choice(),
    move: (step) => sides[0] && sides[0].weights && sides[0].lines.move(step, options().pin, sides[0].weights.T),
    picture: () => parts.picture,
    repaint: () => {
      for (const made of sides) { made.matrix.weights = null; made.draw(); }
      treeBox.replaceChildren(...sides.filter((made) => made.hypotheses).map(tree));
    },
  };
}

const best = (beams) => beams.reduce((top, beam, i) => (beam.logprob > beams[top].logprob ? i : top), 0);

// the tokens from the root to a beam of the last step
function trace(steps, at) {
  const path = [];
  for (let step = steps.length - 1; step >= 0; step -= 1) {
    path.unshift(steps[step].beams[at].token);
    at = steps[step].beams[at].parent;
  }
  return path;
}

const LETTER = parseFloat(getComputedStyle(document.documentElement).fontSize);
const [WIDE, LEAF] = [Math.round(9 * LETTER), Math.round(7.2 * LETTER)];
const TALL = Math.round(2.2 * LETTER);

// the search: one column per step, its beams from best to worst; the path of the winner is highlighted
function tree(made) {
  const { steps, hypotheses } = made;
  const box = el("div", { className: "tree", tabIndex: 0, role: "region", "aria-label": "beam search as a tree", "data-whole": "true" });
  const canvas = el("canvas", { "aria-hidden": "true" });
  const width = steps.length * WIDE;
  const tall = Math.max(...steps.map((step) => step.beams.length), 1) * TALL + 8;
  box.append(canvas);
  box.style.height = `${tall + 12}px`;
  const ways = new Map();
  const walk = (place, rank) => {
    let [step, at] = place;
    while (step >= 0) {
      const id = `${step}/${at}`;
      ways.set(id, Math.min(ways.get(id) ?? 99, rank));
      at = steps[step].beams[at].parent;
      step -= 1;
    }
  };
  hypotheses.forEach((one, rank) => { if (one.place) walk(one.place, rank); });
  const shapes = [];
  const [accent, faint] = [style("--accent"), style("--faint")];
  steps.forEach(({ beams }, step) => {
    beams.forEach((beam, at) => {
      const rank = ways.get(`${step}/${at}`);
      const x = step * WIDE;
      const y = (at + 0.5) * TALL;
      if (step > 0) {
        const [gap, from] = [WIDE - LEAF, (beam.parent + 0.5) * TALL];
        shapes.push({ d: `M${x - gap} ${from}C${x - gap / 2} ${from} ${x - gap / 2} ${y} ${x} ${y}`, stroke: rank === 0 ? accent : faint, width: rank === 0 ? 2.5 : 1.2, alpha: rank === undefined ? 0.35 : 1 });
      }
      const node = el("span", { className: `leaf${rank === 0 ? " winner" : rank === undefined ? " pruned" : ""}` }, tokenNode(beam.token), el("small", {}, number(beam.logprob, 2)));
      node.style.width = `${LEAF}px`;
      node.style.left = `${x}px`;
      node.style.top = `${y}px`;
      box.append(node);
    });
  });
  sketch(canvas, width, tall, shapes);
  const list = el("ol", { className: "hypotheses" });
  for (const one of hypotheses) {
    list.append(el("li", {}, el("span", { dir: "auto" }, one.text), el("small", { className: "quiet" }, " score ", number(one.score), one.finished ? "" : ", cut at the longest length")));
  }
  const about = el("details", { className: "formula" }, el("summary", {}, "Score"), el("code", {}, "log p(Y) / ((5 + |Y|) / 6)^α,  α = 1"));
  return el("section", { className: "search" }, el("h2", {}, "The search"), el("p", { className: "quiet" }, "Each column is a step of the beam search; dashed beams were pruned. Numbers are log probabilities of the whole path."), about, box, list);
}
