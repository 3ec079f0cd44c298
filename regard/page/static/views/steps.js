// Steps: one token through one head in six steps, with all its numbers.

import { count, el, chips, control, layout, number, numbering, plainToken, problem, renew, select, slider, special, textBox, tokenNode, word } from "../ui.js";
import { whole } from "../store.js";
import { HEADS, cssSigned, fit, largest } from "../colour.js";
import { ask, forget } from "../client.js";

export const title = "Steps";

const PRESETS = [
  { key: "text", text: "your text" },
  { key: "worked", text: "112 and 96", title: "a worked example: two words, width 64" },
  { key: "word", text: "one word, two sentences", title: "how attention moves the vector of a word with two meanings" },
];
const SIX = "How a token makes its new vector: it compares its query with every key it sees, turns the scores into shares, and mixes the values by them.";
const TWICE = "One word in two sentences: how far attention moves its vector in each, and which tokens make the step.";
// words of an example, since every token has a row in five tables
const WORDS = 9;
// tokens to choose from on either side of the chosen one
const NEAR = 100;

// an aligner has no queries, keys and values
const places = (run) => run.places.filter((place) => place !== "aligner");

export function mount(host, app) {
  const parts = layout(host, SIX, "softmax(q K^T / √D) V");
  let sizes = { layers: 1, heads: 1, tokens: 1, query: 0 };
  let asked = null;
  let shown = null;

  const options = () => {
    const state = app.state();
    const run = app.run();
    const place = places(run).includes(state.place) ? state.place : run.places.includes("encoder") ? "encoder" : run.places[0];
    const named = state.preset === "bank" ? "word" : state.preset;
    const preset = PRESETS.some((one) => one.key === named) && (named !== "word" || run.pairs.length) ? named : "text";
    const pair = run.pairs.find((one) => one.word === state.word) || run.pairs[0];
    return { run, place, preset, pair, text: state.text || app.example(run).split(" ").slice(0, WORDS).join(" "), layer: whole(state.layer, null, 0, 999), head: whole(state.head, 0, 0, 999), pin: whole(state.pin, null, 0, 4096) };
  };

  function controls(layer, head) {
    const { layers, heads } = sizes;
    const { run, place, preset, pair } = options();
    parts.words.textContent = preset === "word" ? TWICE : SIX;
    // only if there is a word that this model reads as one token
    const offered = PRESETS.filter((one) => one.key !== "word" || run.pairs.length);
    const list = [control("example", chips(offered, preset, (value) => app.set({ preset: value === "text" ? null : value, pin: null, layer: null }, true), "example"))];
    if (preset === "word") list.push(control("word", chips(run.pairs.map((one) => ({ key: one.word, text: one.word })), pair.word, (value) => app.set({ word: value, layer: null }, true), "word")));
    if (preset !== "worked") {
      if (preset === "text" && places(run).length > 1) list.push(control("attention of", select(places(run).map((one) => [one, one]), place, (value) => app.set({ place: value, layer: null, pin: null }, true), "place")));
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
    const { run, place, preset, pair, text, layer, head, pin } = options();
    const id = JSON.stringify([run.name, place, preset, pair, text, layer, head, pin]);
    if (id === asked) return;
    const typed = JSON.stringify([run.name, preset, text]);
    if (typed !== shown) {
      shown = typed;
      if (preset === "text") renew(parts.input, textBox(text, run.examples, (value) => app.set({ text: value, pin: null }, true), "Type a text", "Text"));
      else parts.input.replaceChildren();
    }
    asked = id;
    forget();
    app.busy("Computing the six steps");
    try {
      if (preset === "word") {
        const about = await ask("read", { run: run.name, place: "encoder", text: pair.text, target: "" });
        const layers = about.meta.layers.length;
        const replies = [];
        for (let at = 0; at < layers; at += 1) replies.push(await ask("moves", { run: run.name, text: pair.text, other: pair.other, word: pair.word, layer: at }));
        if (asked !== id) return;
        const at = layer === null ? telling(replies, pair.clues) : Math.min(layer, layers - 1);
        sizes = { layers, heads: 1, tokens: 1, query: 0, layer: at };
        controls(at, 0);
        twice(replies[at], layer === null ? pair.clues : null);
        app.done(`${pair.word} · layer ${at + 1} of ${layers}`);
        return;
      }
      if (preset === "worked") {
        const reply = await ask("example", {});
        if (asked !== id) return;
        sizes = { layers: 1, heads: 1, tokens: reply.meta.queries.length, query: 0 };
        controls(0, 0);
        six(reply, true);
        app.done("A worked example: width 64");
        return;
      }
      const { meta } = await ask("read", { run: run.name, place, text, target: "" });
      if (asked !== id) return;
      const at = { layer: Math.min(layer ?? 0, meta.layers.length - 1) };
      const last = meta.queries.length - 1;
      // the first token of a causal layer sees only itself, so the last one is shown; elsewhere the first one of the text
      // itself
      const query = Math.min(pin ?? (meta.layers[at.layer].causal ? last : Math.max(0, meta.queries.findIndex((token) => !special(token)))), last);
      sizes = { layers: meta.layers.length, heads: meta.layers[at.layer].heads, tokens: last + 1, query };
      Object.assign(at, { head: Math.min(head, sizes.heads - 1), query });
      // shown even if the steps cannot be: another layer or place may have them
      controls(at.layer, at.head);
      const reply = await ask("steps", { run: run.name, place, text, target: "", ...at });
      if (asked !== id) return;
      six(reply, place === "encoder" || place === "decoder");
      app.done(`${count(sizes.tokens, "token")} · head ${at.head + 1} of ${sizes.heads} · layer ${at.layer + 1} of ${sizes.layers}`);
    } catch (error) {
      if (asked !== id) return;
      asked = null;
      if (!parts.controls.hasChildNodes()) controls(0, 0);
      app.fail(error);
      parts.numbers.replaceChildren();
      parts.picture.replaceChildren(problem(error));
    }
  }

  // `own`: the tokens attend to one another, not to another text
  function six({ meta, arrays }, own) {
    const { keys, queries, query, places: at_ } = meta;
    const S = keys.length;
    const D = arrays.q.shape[0];
    const v = (name, at) => arrays[name].values[at];
    const row = (name, at) => arrays[name].values.subarray(at * D, (at + 1) * D);
    const top = Math.max(largest(arrays.q.values), largest(arrays.k.values));
    const most = largest(arrays.v.values);
    const mixed = Math.max(largest(arrays.weighted.values), largest(arrays.sum.values));
    // equal tokens are numbered over the whole text, of which only some may be shown
    const nth = (at) => (own ? numbering(queries)[at_[at]] : numbering(keys)[at]);
    const who = el("div", { className: "who", role: "listbox", "aria-label": "token" });
    for (let at = Math.max(0, query - NEAR); at < Math.min(queries.length, query + NEAR + 1); at += 1) {
      const choose = () => app.set({ pin: String(at) });
      const node = tokenNode(queries[at], { "data-at": at, role: "option", onclick: choose, onkeydown: (event) => { if (event.key === "Enter") choose(); } }, numbering(queries)[at]);
      node.setAttribute("aria-selected", String(at === query));
      node.tabIndex = at === query ? 0 : -1;
      who.append(node);
    }
    const table = (cells) => {
      const body = el("div", { className: "step-table" });
      for (let at = 0; at < S; at += 1) body.append(el("div", { className: "step-row", "data-at": at_[at] }, tokenNode(keys[at], {}, nth(at)), ...cells(at)));
      return body;
    };
    const name = () => word(queries, query);
    const called = (at) => { const node = el("b", { dir: "auto" }, ...tokenNode(keys[at], {}, nth(at)).childNodes); return node; };
    const bar = (share) => { const part = el("span", { className: share < 0 ? "bar against" : "bar" }); part.style.inlineSize = `${100 * Math.abs(share)}%`; return el("span", { className: "track" }, part); };
    const highest = largest(arrays.scores.values);
    const best = [...arrays.weights.values.keys()].reduce((a, b) => (v("weights", b) > v("weights", a) ? b : a), 0);
    const towards = () => (own && at_[best] === query ? el("b", {}, "itself") : called(best));
    const left = meta.visible - S;
    const unseen = [left ? `Shown are the ${S} keys with most weight of the ${meta.visible.toLocaleString("en")} it sees.` : "", meta.hidden ? `${count(meta.hidden, "token")} ${meta.hidden === 1 ? "is" : "are"} hidden from it${meta.causal ? ": those that come later, and no score is computed for them" : ""}.` : ""].filter(Boolean).join(" ");
    const steps = [
      ["Query, key and value", [name(), ` asks with its query; every token offers a key and a value. Each is a vector of ${D} numbers.`], "q_i = x_i W_Q,  k_j = x_j W_K,  v_j = x_j W_V",
        el("div", { className: "all-vectors" }, unseen ? el("p", { className: "quiet unseen" }, unseen) : null, el("div", { className: "step-row" }, el("b", {}, "q"), strip(arrays.q.values, top)), table((at) => [el("span", { className: "one" }, el("i", {}, "k"), strip(row("k", at), top)), el("span", { className: "one" }, el("i", {}, "v"), strip(row("v", at), most))]),
          vectors([["q", arrays.q.values], ...keys.flatMap((_, at) => [[["k of ", called(at)], row("k", at)], [["v of ", called(at)], row("v", at)]])]))],
      ["Scores", [meta.plain ? "The query times each key: large where they point the same way." : "The query times each key. What follows is particular to this mechanism: see its formula."], "s_j = q_i · k_j",
        table((at) => [bar(v("scores", at) / highest), number(v("scores", at), 2)])],
      ["Divided by the root of the width", [`√${D} = ${Math.sqrt(D).toFixed(2)} keeps the scores from growing with the width.`], "s_j / √D",
        table((at) => [bar(v("scaled", at) / largest(arrays.scaled.values)), number(v("scaled", at), 3)])],
      [meta.plain ? "Softmax" : "Weights", [`${meta.plain ? "Shares that add up to one" : "The weight of each token"}: ${v("weights", best).toFixed(2)} of the attention of `, name(), " goes to ", towards(), "."], meta.plain ? "a_j = exp(s_j / √D) / Σ_m exp(s_m / √D)" : meta.formula,
        table((at) => [bar(v("weights", at)), number(v("weights", at), 3)])],
      ["Values, weighted", ["Each value is multiplied by its weight."], "a_j v_j", el("div", {}, table((at) => [strip(row("weighted", at), mixed)]), vectors(keys.map((_, at) => [[called(at)], row("weighted", at)])))],
      ["Sum", ["What ", name(), " gets from this head."], "o_i = Σ_j a_j v_j", el("div", {}, el("div", { className: "step-row" }, el("b", {}, "o"), strip(arrays.sum.values, mixed)), vectors([["o", arrays.sum.values]]))],
    ];
    const list = el("ol", { className: "steps" });
    steps.forEach(([heading, words, formula, body], at) => {
      const fold = el("details", { className: "step", open: true }, el("summary", {}, el("span", { className: "count" }, String(at + 1)), heading), el("p", {}, ...words), el("details", { className: "formula" }, el("summary", {}, "Formula"), el("code", {}, formula)), body);
      list.append(el("li", {}, fold));
    });
    renew(parts.picture, who, list);
    parts.numbers.replaceChildren(el("p", { className: "reading" }, number(v("weights", best), 2), " of ", name(), "’s attention goes to ", towards(), "."));
  }

  // `clues`: this layer was chosen for them
  function twice({ meta, arrays }, clues) {
    const sides = meta.sides.map((side, which) => ({ ...side, shares: arrays[`shares${which}`].values }));
    const boxes = sides.map((side) => {
      const top = largest(side.shares);
      const body = el("div", { className: "step-table" });
      side.tokens.forEach((token, at) => {
        const bar = el("span", { className: `bar${side.shares[at] < 0 ? " against" : ""}` });
        bar.style.inlineSize = `${100 * Math.abs(side.shares[at]) / top}%`;
        body.append(el("div", { className: `step-row${at === side.at ? " self" : ""}`, "data-at": at }, tokenNode(token, {}, numbering(side.tokens)[at]), el("span", { className: "track" }, bar), number(side.shares[at], 2)));
      });
      const best = strongest(side);
      const most = best === side.at ? ["most of it comes from the word itself, ", number(side.shares[best], 2)] : ["most of it comes from ", word(side.tokens, best), ", ", number(side.shares[best], 2)];
      return el("article", {}, el("h2", {}, side.tokens.slice(0, -1).join("").replaceAll("▁", " ").trim()),
        el("p", {}, "Attention moves ", el("b", {}, meta.word), " by a step of length ", number(side.moved, 2), "; ", ...most, " of the step."), body);
    });
    parts.picture.replaceChildren(el("div", { className: "beside" }, ...boxes));
    parts.numbers.replaceChildren(
      el("p", { className: "reading" }, "Before the encoder the two ", el("b", {}, meta.word), " differ by their positions only: cosine ", number(meta.before, 3), "."),
      el("p", { className: "reading" }, "After this layer: ", number(meta.after, 3), "."),
      el("p", { className: "quiet" }, "Shares add up to one; a negative share works against the step.", ...(clues ? [" Shown is the layer in which ", el("b", {}, clues[0]), " and ", el("b", {}, clues[1]), " contribute most. Other layers may differ: move the slider."] : [])),
      el("details", { className: "formula" }, el("summary", {}, "Formula"), el("code", {}, "d = Σ_j c_j,  c_j = Σ_h a_hj v_hj W_h;  share of j = c_j · d / |d|²")),
    );
  }

  return {
    update,
    place: () => ({ ...sizes, layer: Math.min(options().layer ?? sizes.layer ?? 0, sizes.layers - 1), head: Math.min(options().head, sizes.heads - 1) }),
    move: (step) => app.set({ pin: String(whole(sizes.query + step, 0, 0, sizes.tokens - 1)) }),
    picture: () => parts.picture,
    repaint: () => { asked = null; update(); },
  };
}

const strongest = ({ shares }) => shares.reduce((best, share, at) => (share > shares[best] ? at : best), 0);

// the layer in which the word that tells the meaning contributes most, in both sentences
function telling(replies, clues) {
  const share = ({ meta, arrays }) => Math.min(...meta.sides.map(({ tokens }, which) => arrays[`shares${which}`].values[tokens.findIndex((token) => plainToken(token).toLowerCase() === clues[which])]));
  return replies.reduce((best, reply, at) => (share(reply) > share(replies[best]) ? at : best), 0);
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

// all the numbers of a step, folded
function vectors(rows) {
  const fold = el("details", { className: "vector" }, el("summary", {}, "All numbers"));
  fold.addEventListener("toggle", () => {
    if (!fold.open || fold.children.length > 1) return;
    for (const [name, values] of rows) fold.append(el("p", { className: "digits" }, el("span", {}, ...(Array.isArray(name) ? name : [name])), ...[...values].map((value) => number(value, 3))));
  });
  return fold;
}
