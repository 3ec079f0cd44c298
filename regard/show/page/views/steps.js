// Steps: one token through one head, six steps, all numbers real.

import { el, chips, control, layout, number, plainToken, problem, renew, select, slider, textBox, tokenNode } from "../ui.js";
import { whole } from "../store.js";
import { HEADS, cssSigned, fit, largest } from "../colour.js";
import { ask, forget } from "../client.js";

export const title = "Steps";

const PRESETS = [
  { key: "text", text: "your text" },
  { key: "worked", text: "112 and 96", title: "a worked example: two words, width 64" },
  { key: "bank", text: "bank and bank", title: "the bank of the river, the cashier at the bank" },
];
const RIVER = "the bank of the river";
const CASHIER = "the cashier at the bank";
const SIX = "How a token makes its new vector: it compares its query with every key, turns the scores into shares, and mixes the values by them.";
const BANK = "One word in two sentences: how far attention moves its vector in each, and which words it moves it towards.";

// an aligner has no queries, keys and values
const places = (run) => run.places.filter((place) => place !== "aligner");

export function mount(host, app) {
  const parts = layout(host, SIX, "softmax(q K^T / √D) V");
  let sizes = { layers: 1, heads: 1, tokens: 1 };
  let asked = null;
  let shown = null;

  const options = () => {
    const state = app.state();
    const run = app.run();
    const place = places(run).includes(state.place) ? state.place : run.places.includes("encoder") ? "encoder" : run.places[0];
    const preset = PRESETS.some((one) => one.key === state.preset) ? state.preset : "text";
    return { run, place, preset, text: state.text || RIVER, layer: whole(state.layer, preset === "bank" ? 999 : 0, 0, 999), head: whole(state.head, 0, 0, 999), query: whole(state.pin, 0, 0, 4096) };
  };

  function controls(layer, head) {
    const { layers, heads } = sizes;
    const { run, place, preset } = options();
    parts.words.textContent = preset === "bank" ? BANK : SIX;
    const list = [control("example", chips(PRESETS, preset, (value) => app.set({ preset: value === "text" ? null : value, pin: null }, true), "example"))];
    if (preset !== "worked") {
      if (preset === "text") list.push(control("attention of", select(places(run).map((one) => [one, one]), place, (value) => app.set({ place: value, layer: null, pin: null }, true), "place")));
      if (layers > 1) list.push(control("layer", slider(layer + 1, 1, layers, 1, (value) => app.set({ layer: String(value - 1) }), "layer")));
    }
    if (preset === "text") {
      const choices = [];
      for (let h = 0; h < heads; h += 1) choices.push({ key: h, text: String(h + 1), colour: HEADS[h % HEADS.length] });
      list.push(control("head", chips(choices, head, (value) => app.set({ head: String(value) }), "head")));
    }
    renew(parts.controls, ...list);
  }

  async function update() {
    const { run, place, preset, text, layer, head, query } = options();
    const id = JSON.stringify([run.name, place, preset, text, layer, head, query]);
    if (id === asked) return;
    const typed = JSON.stringify([run.name, preset, text]);
    if (typed !== shown) {
      shown = typed;
      if (preset === "text") renew(parts.input, textBox(text, [RIVER, CASHIER, ...run.examples.slice(0, 2)], (value) => app.set({ text: value, pin: null }, true), "Type a short text", "Text"));
      else parts.input.replaceChildren();
    }
    asked = id;
    forget();
    app.busy("Computing the six steps");
    try {
      if (preset === "bank") {
        if (!run.places.includes("encoder")) throw new Error(`“${run.title}” has no encoder whose words could be compared: choose another run, or your text.`);
        const about = await ask("read", { run: run.name, place: "encoder", text: RIVER, target: "" });
        const at = Math.min(layer, about.meta.layers.length - 1);
        const reply = await ask("moves", { run: run.name, text: RIVER, other: CASHIER, word: "bank", layer: at });
        if (asked !== id) return;
        sizes = { layers: about.meta.layers.length, heads: 1, tokens: 1 };
        controls(at, 0);
        bank(reply);
        app.done(`${run.title} · encoder layer ${at + 1}`);
        return;
      }
      if (preset === "worked") {
        const reply = await ask("example", {});
        if (asked !== id) return;
        sizes = { layers: 1, heads: 1, tokens: reply.meta.queries.length };
        controls(0, 0);
        six(reply, true);
        app.done("A worked example: width 64");
        return;
      }
      const { meta } = await ask("read", { run: run.name, place, text, target: "" });
      if (asked !== id) return;
      const at = { layer: Math.min(layer, meta.layers.length - 1) };
      sizes = { layers: meta.layers.length, heads: meta.layers[at.layer].heads, tokens: meta.queries.length };
      Object.assign(at, { head: Math.min(head, sizes.heads - 1), query: Math.min(query, sizes.tokens - 1) });
      // shown even where the steps cannot be: another layer or place may have them
      controls(at.layer, at.head);
      const reply = await ask("steps", { run: run.name, place, text, target: "", ...at });
      if (asked !== id) return;
      six(reply, place === "encoder" || place === "decoder");
      app.done(`${sizes.tokens} tokens · head ${at.head + 1} of ${sizes.heads} · layer ${at.layer + 1} of ${sizes.layers}`);
    } catch (error) {
      if (asked !== id) return;
      asked = null;
      if (!parts.controls.hasChildNodes()) controls(0, 0);
      app.fail(error);
      parts.numbers.replaceChildren();
      parts.picture.replaceChildren(problem(error));
    }
  }

  // `own`: the tokens look at one another, not at another text
  function six({ meta, arrays }, own) {
    const { keys, queries, query } = meta;
    const S = arrays.weights.shape[0];
    const D = arrays.q.shape[0];
    const v = (name, at) => arrays[name].values[at];
    const row = (name, at) => arrays[name].values.subarray(at * D, (at + 1) * D);
    const top = Math.max(largest(arrays.q.values), largest(arrays.k.values));
    const most = largest(arrays.v.values);
    const mixed = Math.max(largest(arrays.weighted.values), largest(arrays.sum.values));
    const hidden = (at) => meta.causal && at > query;
    const who = el("div", { className: "who", role: "listbox", "aria-label": "token" });
    queries.forEach((token, at) => {
      const choose = () => app.set({ pin: String(at) });
      const node = tokenNode(token, { "data-at": at, role: "option", onclick: choose, onkeydown: (event) => { if (event.key === "Enter") choose(); } });
      node.setAttribute("aria-selected", String(at === query));
      node.tabIndex = 0;
      who.append(node);
    });
    const table = (cells) => {
      const body = el("div", { className: "step-table" });
      for (let at = 0; at < S; at += 1) if (!hidden(at)) body.append(el("div", { className: "step-row", "data-at": at }, tokenNode(keys[at]), ...cells(at)));
      return body;
    };
    const name = () => el("b", { dir: "auto" }, plainToken(queries[query]));
    const bar = (share) => { const part = el("span", { className: share < 0 ? "bar against" : "bar" }); part.style.inlineSize = `${100 * Math.abs(share)}%`; return el("span", { className: "track" }, part); };
    const highest = largest(arrays.scores.values);
    const best = [...arrays.weights.values.keys()].reduce((a, b) => (v("weights", b) > v("weights", a) ? b : a), 0);
    const towards = () => el("b", { dir: "auto" }, own && best === query ? "itself" : plainToken(keys[best]));
    const steps = [
      ["Query, key and value", [name(), ` asks with its query; every token offers a key and a value. Each is a vector of ${D} numbers.`], "q_i = x_i W_Q,  k_j = x_j W_K,  v_j = x_j W_V",
        el("div", {}, el("div", { className: "step-row" }, el("b", {}, "q"), strip(arrays.q.values, top), vector(arrays.q.values)), table((at) => [el("i", {}, "k"), strip(row("k", at), top), vector(row("k", at)), el("i", {}, "v"), strip(row("v", at), most), vector(row("v", at))]))],
      ["Scores", [meta.plain ? "The query times each key: large where they point the same way." : "The query times each key. This mechanism goes on from here in its own way: see its formula."], "s_j = q_i · k_j",
        table((at) => [bar(v("scores", at) / highest), number(v("scores", at), 2)])],
      ["Divided by the root of the width", [`√${D} = ${Math.sqrt(D).toFixed(2)} keeps the scores from growing with the width.`], "s_j / √D",
        table((at) => [bar(v("scaled", at) / largest(arrays.scaled.values)), number(v("scaled", at), 3)])],
      [meta.plain ? "Softmax" : "Weights", [`${meta.plain ? "Shares that add up to one" : "What each token counts"}: ${v("weights", best).toFixed(2)} of the attention of `, name(), " goes to ", towards(), "."], meta.plain ? "a_j = exp(s_j / √D) / Σ_m exp(s_m / √D)" : meta.formula,
        table((at) => [bar(v("weights", at)), number(v("weights", at), 3)])],
      ["Values, weighted", ["Each value is made as strong as its share."], "a_j v_j", table((at) => [strip(row("weighted", at), mixed), vector(row("weighted", at))])],
      ["Sum", ["What ", name(), " takes along from this head."], "o_i = Σ_j a_j v_j", el("div", { className: "step-row" }, el("b", {}, "o"), strip(arrays.sum.values, mixed), vector(arrays.sum.values))],
    ];
    const list = el("ol", { className: "steps" });
    steps.forEach(([heading, words, formula, body], at) => {
      const fold = el("details", { className: "step", open: true }, el("summary", {}, el("span", { className: "count" }, String(at + 1)), heading), el("p", {}, ...words), el("details", { className: "formula" }, el("summary", {}, "Formula"), el("code", {}, formula)), body);
      list.append(el("li", {}, fold));
    });
    renew(parts.picture, who, list);
    parts.numbers.replaceChildren(el("p", { className: "reading" }, number(v("weights", best), 2), " of ", name(), "’s attention goes to ", towards(), "."));
  }

  function bank({ meta, arrays }) {
    const boxes = meta.sides.map((side, number_) => {
      const shares = arrays[`shares${number_}`].values;
      const top = largest(shares);
      const body = el("div", { className: "step-table" });
      side.tokens.forEach((token, at) => {
        const bar = el("span", { className: `bar${shares[at] < 0 ? " against" : ""}` });
        bar.style.inlineSize = `${100 * Math.abs(shares[at]) / top}%`;
        body.append(el("div", { className: `step-row${at === side.at ? " self" : ""}`, "data-at": at }, tokenNode(token), el("span", { className: "track" }, bar), number(shares[at], 2)));
      });
      return el("article", {}, el("h3", {}, side.tokens.slice(0, -1).join("").replaceAll("▁", " ").trim()),
        el("p", {}, "Attention moves ", el("b", {}, meta.word), " by a step of length ", number(side.moved, 2), "; these words make it:"), body);
    });
    parts.picture.replaceChildren(el("div", { className: "beside" }, ...boxes));
    parts.numbers.replaceChildren(
      el("p", { className: "reading" }, "Before the encoder the two ", el("b", {}, meta.word), "s differ by their places only: cosine ", number(meta.before, 3), "."),
      el("p", { className: "reading" }, "After this layer: ", number(meta.after, 3), "."),
      el("details", { className: "formula" }, el("summary", {}, "Formula"), el("code", {}, "d = Σ_j c_j,  c_j = Σ_h a_hj v_hj W_h;  share of j = c_j · d / |d|²")),
    );
  }

  return {
    update,
    place: () => ({ ...sizes, layer: Math.min(options().layer, sizes.layers - 1), head: Math.min(options().head, sizes.heads - 1) }),
    move: (step) => app.set({ pin: String(whole(options().query + step, 0, 0, sizes.tokens - 1)) }),
    picture: () => parts.picture,
  };
}

// a vector as a row of coloured cells
function strip(values, top) {
  const canvas = el("canvas", { className: "strip", "aria-hidden": "true" });
  const context = fit(canvas, 192, 16);
  const wide = 192 / values.length;
  values.forEach((value, at) => {
    context.fillStyle = cssSigned(value / top);
    context.fillRect(at * wide, 0, Math.ceil(wide), 16);
  });
  return canvas;
}

// all its numbers, for whoever opens it
function vector(values) {
  const fold = el("details", { className: "vector" }, el("summary", { title: "all numbers" }, "…"));
  fold.addEventListener("toggle", () => {
    if (fold.open && fold.children.length === 1) fold.append(el("div", { className: "digits" }, ...[...values].map((value) => number(value, 3))));
  });
  return fold;
}
