// Image: what each patch of an image attends to, in any head of any layer; where each word of a caption looks; rollout over
// the layers; how far heads look.

import { count, el, chips, control, inPieces, layout, number, numbering, problem, renew, slider, textBox, tokenNode, word } from "../ui.js";
import { whole } from "../store.js";
import { HEADS, fit, largest } from "../colour.js";
import { key, short, sketch, style } from "../chart.js";
import { ask, forget, isSaved, upload } from "../client.js";
import { Stage, leastOf, nameOf, paint, toImage } from "../stage.js";
import { chosen } from "../weights.js";

export const title = "Image";

const MODES = ["words", "heads", "rollout", "distance"];
const NAMES = { words: "words", heads: "attention", rollout: "rollout", distance: "distances" };
const SAYS = {
  query: "Each patch of the image is a token. The brighter a patch, the more of the attention of the marked one goes to it.",
  key: "Each patch of the image is a token. The brighter a patch, the more of its own attention goes to the marked one.",
  word: "Each word of the caption looks at the image when it is written. The brighter a patch, the more of the attention of the marked word goes to it.",
  words: "Each word of the caption looks at the image when it is written. The brighter a patch, the more attention it gets from all words on average.",
  mean: "Each patch of the image is a token. The brighter a patch, the more attention it gets from all patches on average.",
  rollout: "How much of each patch reaches the marked token through all layers up to this one: attention and residual connections multiplied. It is the same for every class.",
  distance: "Each dot is a head: the mean distance, in pixels of this image, between a patch and what it attends to. Heads at the bottom look next to themselves, heads at the top across the image.",
};
const SIGNED = " Weights of this mechanism need not sum to one; if some are negative, these are blue and the others red.";
const FORMULA = {
  words: "A = A_cross · mean over heads of A_pooler,  from words to pooled queries to patches",
  heads: "o_i = Σ_j a_ij v_j,  a = the effective weights of the layer",
  rollout: "R = Ā_L ⋯ Ā_1,  Ā = (A + I) / 2 with rows that sum to one,  A = mean over heads",
  distance: "mean over i of Σ_j a_ij |x_i − x_j|,  x = centres of patches",
};
// layers whose rollout, and words whose patches, are drawn small beside the large image
const MOST_LAYERS = 24;
const MOST_WORDS = 40;

export function mount(host, app) {
  const parts = layout(host, SAYS.query, FORMULA.heads);
  const answers = el("section", { className: "answers", "aria-label": "Prediction" });
  const stageHost = el("div", { className: "stage-host" });
  const legend = el("div", { className: "legend-line" });
  const thumbs = el("div", { className: "image-thumbs" });
  const far = el("figure", { className: "far", hidden: true });
  const refused = el("div", {});
  const strip = el("div", { className: "who caption-words", role: "group", "aria-label": "Words of the caption" });
  const main = el("div", { className: "image-main" }, el("div", { className: "image-left" }, strip, stageHost, legend), el("div", { className: "image-right" }, answers, thumbs));
  parts.picture.append(refused, main, far);
  const stage = new Stage(stageHost, (at, shift) => {
    if (options().mode === "words") return;
    pointed = at === null ? null : { at, side: shift ? "key" : null };
    draw();
  }, (at) => { if (options().mode !== "words") app.set({ pin: options().pin === at ? null : String(at) }); });
  const own = new Map(); // images that were given here, by name
  let [seen, caption, asked, work, pointed, drawing, samples, lastGrid] = [null, null, null, null, null, 0, null, null];

  const modes = (run) => MODES.filter((mode) => mode !== "words" || run.captions);
  const options = () => {
    const state = app.state();
    const run = app.run();
    const mode = modes(run).includes(state.mode) ? state.mode : modes(run)[0];
    const all = seen ? seen.meta.layers : [{ heads: 1, rows: 1, columns: 1, leading: 0 }];
    const written = mode === "words" && caption;
    const layers = written ? caption.heads.length : all.length;
    const layer = whole(state.layer, layers - 1, 0, layers - 1);
    // words look at the patches of the last layer
    const grid = mode === "words" ? { ...all[all.length - 1], leading: 0, spec: "caption", signed: false, slots: false, zeros_are_hidden: false } : all[layer];
    const heads = written ? caption.heads[layer] : grid.heads;
    const tokens = grid.leading + grid.rows * grid.columns;
    return {
      run, mode, layer, layers, grid, heads, image: state.image || "0", text: (run.captions && state.text) || "",
      head: ["heads", "words"].includes(mode) ? whole(state.head, "avg", 0, heads - 1) : "avg",
      side: state.side === "key" ? "key" : "query", light: state.as === "light", spread: state.scale === "least",
      pin: mode === "words" ? null : whole(state.pin, null, 0, tokens - 1),
      word: written ? whole(state.word, null, 0, caption.tokens.length - 1) : null,
    };
  };

  // the weights [T] of each head for a token, or for the mean over all patches; of rollout, one
  async function rowsOf({ run, image, layer, grid, mode, text }, at, side, signal) {
    const values = { run: run.name, image, layer };
    if (mode === "words") {
      const { values: map, shape: [H, T, n] } = (await ask("caption", { ...values, text: text || null }, signal)).arrays.weights;
      return Array.from({ length: H }, (_, h) => {
        const head = map.subarray(h * T * n, (h + 1) * T * n);
        return at === null ? average(head, 0, T, n) : head.subarray(at * n, (at + 1) * n);
      });
    }
    if (mode === "rollout") {
      const all = await ask("rollout", values, signal);
      const [k, T] = all.arrays.weights.shape;
      if (all.meta.all && at === null) return [average(all.arrays.weights.values, grid.leading, k, T)];
      if (all.meta.all) return [all.arrays.weights.values.subarray(at * T, (at + 1) * T)];
      return [(at === null ? all : await ask("rollout", { ...values, at }, signal)).arrays.weights.values];
    }
    const whole_ = await ask("attention", values, signal);
    if (!whole_.arrays.weights) {
      const { values: row, shape: [H, T] } = (await ask("glance", { ...values, at, side: at === null ? null : side }, signal)).arrays.weights;
      return Array.from({ length: H }, (_, h) => row.subarray(h * T, (h + 1) * T));
    }
    const { values: map, shape: [H, T] } = whole_.arrays.weights;
    return Array.from({ length: H }, (_, h) => {
      const head = map.subarray(h * T * T, (h + 1) * T * T);
      if (at === null) return average(head, grid.leading, T, T);
      return side === "query" ? head.subarray(at * T, (at + 1) * T) : Float32Array.from({ length: T }, (_, query) => head[query * T + at]);
    });
  }

  // what is drawn: the token pointed at, or pinned, or the class token; null: all patches
  function focusOf({ pin, side, grid, mode, word: kept }) {
    if (mode === "words") return { at: pointed?.word ?? kept, side: "query" };
    const at = pointed ? pointed.at : pin;
    return { at: at ?? (grid.leading ? 0 : null), side: (pointed && pointed.side) || side };
  }

  async function draw() {
    if (!seen) return;
    const mine = drawing += 1;
    if (caption) inPieces(caption.tokens.some((token) => /^[▁Ġ]/.test(token)));
    const now = options();
    const { run, layer, layers, grid, heads, head, mode, light, spread } = now;
    strip.hidden = mode !== "words";
    const why = mode === "rollout" ? seen.meta.rollout[layer] : grid.slots ? `The columns of “${grid.spec}” are slots and not patches: there is no map over the image.` : null;
    parts.side.querySelector(".formula code").textContent = FORMULA[mode];
    controls();
    far.hidden = mode !== "distance";
    main.hidden = mode === "distance";
    if (mode === "distance") { await distance(mine); return; }
    refused.replaceChildren(...(why ? [el("p", { className: "misfit" }, why[0].toUpperCase() + why.slice(1), why.endsWith(".") ? "" : ".")] : []));
    const { at, side } = focusOf(now);
    // many patches take a moment
    if (!grid.small || mode === "rollout") app.busy(mode === "rollout" ? "Multiplying the layers" : "Computing the weights");
    try {
      const rows = why ? null : await rowsOf(now, at, mode === "rollout" ? "query" : side, work.signal);
      const windows = why || mode !== "heads" ? [] : (await ask("attention", { run: run.name, image: now.image, layer }, work.signal)).meta.windows;
      // something else is pointed at by now
      if (mine !== drawing) return;
      const weights = rows && chosen(rows, head);
      // rollout leads back to the patches of the first layer
      const shown = mode === "rollout" ? seen.meta.layers[0] : grid;
      const hidden = mode === "heads" && grid.zeros_are_hidden ? (value) => value === 0 : null;
      const says = { words: at === null ? SAYS.words : SAYS.word, rollout: SAYS.rollout, heads: at === null ? SAYS.mean : SAYS[side] };
      parts.words.textContent = says[mode] + (mode === "heads" && grid.signed ? SIGNED : "");
      const same = shown.rows === grid.rows && shown.columns === grid.columns;
      stage.show(seen.picture, shown, weights, { focus: same && mode !== "words" ? at : null, windows, light, hidden, spread });
      if (mode === "words") words(at);
      small(now, rows, at, hidden);
      const signed = weights && weights.some((value) => value < 0);
      const patches = weights && weights.subarray(shown.leading);
      const low = !weights ? 0 : signed ? Math.min(...weights) : spread ? leastOf(patches, hidden) : 0;
      legend.replaceChildren(...(weights && !light ? [key({ low, high: largest(patches), signed, even: spread && !signed, hidden: Boolean(hidden) && weights.some(hidden), name: mode === "rollout" ? "share" : "weight" })] : []));
      readout(now, weights, shown, at, side);
      const which = mode === "rollout" ? `rollout through ${count(layer + 1, "layer")}` : `layer ${layer + 1} of ${layers} · ${head === "avg" ? `average of ${count(heads, "head")}` : `head ${head + 1} of ${heads}`}`;
      app.done(`${grid.rows} × ${grid.columns} patches · ${mode === "words" ? count(caption.tokens.length, "token") : grid.spec} · ${which}`);
    } catch (error) {
      if (mine !== drawing || error.name === "AbortError") return;
      app.fail(error);
      parts.numbers.replaceChildren(problem(error));
    }
  }

  // the caption as a line of words to point at
  function words(at) {
    if (strip.tokens !== caption.tokens) {
      strip.tokens = caption.tokens;
      strip.replaceChildren(...caption.tokens.map((token, n) => {
        const button = el("button", { type: "button", className: "word", onclick: () => app.set({ word: options().word === n ? null : String(n) }) }, tokenNode(token, {}, numbering(caption.tokens)[n]));
        button.addEventListener("pointerenter", (event) => { if (event.pointerType !== "touch") { pointed = { word: n }; draw(); } });
        button.addEventListener("pointerleave", () => { pointed = null; draw(); });
        return button;
      }));
    }
    [...strip.children].forEach((button, n) => button.setAttribute("aria-pressed", String(n === at)));
  }

  // all heads as small images, or the rollout of each layer, or the patches of each word
  async function small(now, rows, at, hidden) {
    const { run, image, layer, layers, grid, head, mode, light, spread } = now;
    if (!rows) { thumbs.replaceChildren(); return; }
    const many = mode === "words" ? Math.min(caption.tokens.length, MOST_WORDS) : mode === "rollout" ? (layers > 1 && layers <= MOST_LAYERS && seen.meta.layers.every((one) => one.small) ? layers : 0) : rows.length > 1 ? rows.length : 0;
    const stamp = mode === "words" ? caption.tokens : mode;
    if (thumbs.children.length !== many || thumbs.stamp !== stamp) {
      thumbs.stamp = stamp;
      const choose = { words: (n) => ({ word: options().word === n ? null : String(n) }), rollout: (n) => ({ layer: String(n) }), heads: (n) => ({ head: options().head === n ? null : String(n) }) }[mode];
      const label = { words: (n) => tokenNode(caption.tokens[n], {}, numbering(caption.tokens)[n]), rollout: (n) => `layer ${n + 1}`, heads: (n) => `head ${n + 1}` }[mode];
      thumbs.replaceChildren(...Array.from({ length: many }, (_, n) => {
        const button = el("button", { type: "button", className: "thumb", onclick: () => app.set(choose(n)) }, el("canvas", { "aria-hidden": "true" }), el("span", {}, label(n)));
        if (mode === "heads") button.style.setProperty("--mark", HEADS[n % HEADS.length]);
        return button;
      }));
    }
    const wide = Math.max(72, Math.min(140, Math.round((thumbs.clientWidth || 300) / Math.min(many, 2) - 40)));
    const tall = Math.round(wide * seen.picture.height / seen.picture.width);
    const mine = drawing;
    [...thumbs.children].forEach(async (button, n) => {
      button.setAttribute("aria-pressed", String(n === { words: at, rollout: layer, heads: head }[mode]));
      const context = fit(button.firstChild, wide, tall);
      if (mode === "words") {
        const each = await rowsOf(now, n, "query", work.signal);
        if (mine === drawing) paint(fit(button.firstChild, wide, tall), wide, tall, seen.picture, grid, chosen(each, head), { light, spread });
        return;
      }
      if (mode !== "rollout") { paint(context, wide, tall, seen.picture, grid, rows[n], { light, hidden, spread }); return; }
      const there = seen.meta.layers[n];
      // the same place in the grid of that layer
      const token = at === null ? null : moved(at, grid, there);
      if (seen.meta.rollout[n]) { paint(context, wide, tall, seen.picture, there, null); return; }
      try {
        const [row] = await rowsOf({ ...now, layer: n, grid: there }, token, "query", work.signal);
        if (mine === drawing) paint(fit(button.firstChild, wide, tall), wide, tall, seen.picture, seen.meta.layers[0], row, { light, spread });
      } catch (error) { if (error.name !== "AbortError" && mine === drawing) app.fail(error); }
    });
  }

  function readout({ mode, grid, head, heads, pin, word: kept }, weights, shown, at, side) {
    if (!weights) { parts.numbers.replaceChildren(); return; }
    const order = [...weights.keys()].filter((token) => !(mode === "heads" && grid.zeros_are_hidden && weights[token] === 0)).sort((a, b) => Math.abs(weights[b]) - Math.abs(weights[a]));
    const best = order.slice(0, 5);
    const top = Math.abs(weights[best[0]]) || 1;
    const list = el("ol", { className: "best" }, ...best.map((token) => {
      const bar = el("span", { className: weights[token] < 0 ? "bar against" : "bar" });
      bar.style.inlineSize = `${100 * Math.abs(weights[token]) / top}%`;
      return el("li", { "data-key": token }, el("span", { className: "token" }, nameOf(shown, token)), el("span", { className: "track" }, bar), number(weights[token]));
    }));
    const called = (one, token) => [token < one.leading ? "the " : "", el("b", {}, nameOf(one, token))];
    const name = at === null ? [] : mode === "words" ? [word(caption.tokens, at)] : called(grid, at);
    const own = mode !== "words" && at === best[0] && shown.rows === grid.rows && shown.columns === grid.columns;
    const first = own ? [el("b", {}, "itself")] : called(shown, best[0]);
    const share = best.length ? number(weights[best[0]], 2) : null;
    let words;
    if (!best.length) words = [...name, " sees nothing."];
    else if (mode === "rollout") words = [share, " of what ", ...(at === null ? ["all patches read"] : [...name, " reads"]), " comes from ", ...first, "."];
    else if (grid.signed && at === null) words = ["The largest mean weight, ", share, ", is that of ", ...first, "."];
    else if (grid.signed) words = [side === "key" ? "The largest weight for " : "The largest weight of ", ...name, ", ", share, ", is that of ", ...first, "."];
    else if (at === null) words = [share, mode === "words" ? " of the attention of all words goes to " : " of the attention of all patches goes to ", ...first, "."];
    else if (side === "key") words = [share, " of the attention of ", ...called(shown, best[0]), " goes to ", ...(own ? first : name), ", more than of any other."];
    else words = [share, " of the attention of ", ...name, " goes to ", ...first, "."];
    const hints = mode === "words" ? "Point at a word to see where it looks; click or tap to keep it." : "Point at a patch to see what it attends to, with Shift who attends to it; click or tap to keep it.";
    const hint = pin === null && kept === null && !pointed ? el("p", { className: "quiet hint" }, hints) : "";
    const over = head === "avg" && heads > 1 && mode !== "rollout" ? el("p", { className: "quiet over-heads" }, `Average of ${count(heads, "head")}.`) : "";
    parts.numbers.replaceChildren(el("p", { className: "reading" }, ...words), list, over, hint);
  }

  // the chart of the paper: a dot for each head, layer by layer
  async function distance(mine) {
    const { run, image, layer, layers, heads, head } = options();
    parts.words.textContent = SAYS.distance;
    refused.replaceChildren();
    app.busy("Measuring distances", work);
    try {
      const { meta } = await ask("distances", { run: run.name, image }, work.signal);
      if (mine !== drawing) return;
      const known = meta.distances.map((one) => one || []);
      const [width, height] = [Math.max(260, Math.min(720, parts.picture.clientWidth - 60)), 320];
      const edge = { left: 46, right: 14, top: 12, bottom: 42 };
      const most = Math.max(...known.flat(), 1) * 1.08;
      const x = (at) => edge.left + (at + 0.5) / layers * (width - edge.left - edge.right);
      const y = (value) => height - edge.bottom - value / most * (height - edge.top - edge.bottom);
      const [quiet, rule] = [style("--quiet"), style("--line")];
      const shapes = [];
      for (const value of [0, most / 2, most]) shapes.push({ d: `M${edge.left} ${y(value)}H${width - edge.right}`, stroke: rule }, { text: short(Number(value.toPrecision(2))), x: edge.left - 6, y: y(value), anchor: "end", fill: quiet });
      const each = Math.ceil(layers / 12);
      known.forEach((list, at) => {
        if (at % each === 0) shapes.push({ text: String(at + 1), x: x(at), y: height - edge.bottom + 13, anchor: "middle", fill: quiet });
        list.forEach((value, h) => {
          const [cx, cy, r] = [x(at), y(value), at === layer && h === head ? 8 : 5];
          shapes.push({ d: `M${cx - r} ${cy}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`, fill: HEADS[h % HEADS.length], alpha: 0.85, stroke: at === layer && h === head ? style("--ink") : null, width: 2 });
        });
      });
      shapes.push({ text: "layer", x: (edge.left + width - edge.right) / 2, y: height - 8, anchor: "middle", fill: quiet });
      shapes.push({ text: "pixels", x: 9, y: (edge.top + height - edge.bottom) / 2, anchor: "middle", fill: quiet, turn: -90 });
      const spread = known.map((list, at) => (list.length ? `layer ${at + 1}: ${short(Math.min(...list))} to ${short(Math.max(...list))}` : `layer ${at + 1}: none`)).join("; ");
      const canvas = sketch(el("canvas", { className: "chart", role: "img", "aria-label": `mean attention distance in pixels. ${spread}` }), width, height, shapes);
      const missing = meta.distances.map((one, at) => (one ? null : at + 1)).filter((at) => at !== null);
      far.replaceChildren(canvas, el("figcaption", {}, `The image is ${seen.picture.width} × ${seen.picture.height} pixels, ${short(meta.diagonal)} from corner to corner. Heads have the colours of their buttons.`, missing.length ? ` Weights of layer ${missing.join(", ")} are no shares of patches: there is no distance.` : ""));
      const list = known[layer];
      parts.numbers.replaceChildren(list.length ? el("p", { className: "reading" }, `Heads of layer ${layer + 1} look `, number(Math.min(...list), 1), " to ", number(Math.max(...list), 1), " pixels far.") : "", el("ol", { className: "best" }, ...list.map((value, h) => {
        const bar = el("span", { className: "bar" });
        bar.style.inlineSize = `${100 * value / most}%`;
        bar.style.background = HEADS[h % HEADS.length];
        return el("li", {}, el("span", { className: "token" }, `head ${h + 1}`), el("span", { className: "track" }, bar), number(value, 1));
      })));
      app.done(`mean attention distance · ${count(layers, "layer")} · ${count(heads, "head")}`);
    } catch (error) {
      if (mine !== drawing || error.name === "AbortError") return;
      app.fail(error);
      far.replaceChildren(problem(error));
    }
  }

  function controls() {
    const { run, layer, layers, heads, head, mode, side, light, spread } = options();
    const known = modes(run);
    const list = [control("seen as", chips(known.map((one) => ({ key: one, text: NAMES[one] })), mode, (value) => app.set({ mode: value === known[0] ? null : value, layer: null, head: null, pin: null, word: null }, true), "picture"))];
    if (mode === "heads") list.push(control("of a patch", chips([{ key: "query", text: "what it looks at" }, { key: "key", text: "who looks at it" }], side, (value) => app.set({ side: value === "key" ? value : null }), "side")));
    if (layers > 1) list.push(control(mode === "rollout" ? "layers 1 to" : "layer", slider(layer + 1, 1, layers, 1, (value) => app.set({ layer: String(value - 1) }), "layer")));
    const choices = [{ key: "avg", text: "average" }];
    for (let h = 0; h < heads; h += 1) choices.push({ key: h, text: String(h + 1), colour: HEADS[h % HEADS.length], title: `head ${h + 1}` });
    if (heads > 1 && (mode === "heads" || mode === "words")) list.push(control("head", chips(choices, head, (value) => app.set({ head: value === "avg" ? null : String(value) }), "head")));
    if (mode !== "distance") list.push(control("drawn as", chips([{ key: false, text: "colours" }, { key: true, text: "light" }], light, (value) => app.set({ as: value ? "light" : null }), "drawing")));
    if (mode !== "distance") list.push(control("scale", chips([{ key: false, text: "from zero" }, { key: true, text: "from the least" }], spread, (value) => app.set({ scale: value ? "least" : null }), "scale")));
    renew(parts.controls, ...list);
  }

  // the prediction, best first
  function answer() {
    const { answers: list, label, unsure, classes } = seen.meta;
    if (caption) {
      answers.replaceChildren(el("h2", {}, options().text ? "Caption that is read" : "Caption"), el("p", { className: "reading", dir: "auto" }, caption.text), label === null ? "" : el("p", { className: "quiet truth" }, "A reference: ", el("span", { dir: "auto" }, label)));
      return;
    }
    if (!list.length) { answers.replaceChildren(); return; }
    const [best] = list;
    const says = unsure ? ["Unsure: perhaps ", el("b", { dir: "auto" }, best.label), ", with a probability of ", number(best.probability, 2), "."] : [el("b", { dir: "auto" }, best.label), ", with a probability of ", number(best.probability, 2), "."];
    const truth = label === null ? "" : el("p", { className: "quiet truth" }, best.label === label ? "Its label says so too." : "Its label is ", best.label === label ? "" : el("b", { dir: "auto" }, label), best.label === label ? "" : ".");
    answers.replaceChildren(el("h2", {}, "Prediction"), el("p", { className: unsure ? "reading unsure" : "reading" }, ...says), truth, el("ol", { className: "best" }, ...list.map(({ label: one, probability }) => {
      const bar = el("span", { className: "bar" });
      bar.style.inlineSize = `${100 * probability}%`;
      return el("li", {}, el("span", { className: "token", dir: "auto", title: one }, one), el("span", { className: "track" }, bar), probability >= 5e-4 ? number(probability) : el("data", { value: String(probability), title: String(probability) }, "< 0.001"));
    })), classes > list.length ? el("p", { className: "quiet unseen" }, `The first ${list.length} of ${classes} classes.`) : "");
  }

  // images to choose: those of the run, those given here, and a file
  function input() {
    const { run, image, text } = options();
    const button = (name, picture, label) => {
      const canvas = el("canvas", { "aria-hidden": "true" });
      fit(canvas, 52, 52).drawImage(picture, 0, 0, 52, 52);
      return el("button", { type: "button", className: "sample", "data-image": name, "aria-pressed": String(name === image), title: label, onclick: () => app.set({ image: name, text: null, word: null }, true) }, canvas, el("span", { dir: "auto" }, label));
    };
    const given = samples ? samples.labels.map((label, at) => button(String(at), samples.pictures[at], label || `image ${at + 1}`)) : [];
    const mine = [...own].map(([name, { picture, label }]) => button(name, picture, label));
    const file = el("input", { type: "file", accept: "image/*", className: "unseen-words", tabIndex: -1, "aria-hidden": "true", onchange: () => { if (file.files[0]) take(file.files[0]); } });
    const choose = isSaved() ? null : el("button", { type: "button", className: "choose", onclick: () => file.click() }, el("b", {}, "Choose an image"), el("small", {}, "or drop one here"));
    const typed = run.captions ? textBox(text, [], (value) => app.set({ text: value, word: null, mode: null }, true), "its caption; empty: the model’s own", "Caption to read", true) : "";
    renew(parts.input, el("div", { className: "samples" }, choose, file, ...mine, ...given), typed, el("div", { role: "alert", className: "upload-problem" }));
  }

  async function take(file) {
    app.busy(`Sending ${file.name}`);
    try {
      const { meta, arrays } = await upload(file);
      own.set(meta.image, { picture: toImage(arrays.pixels), label: file.name });
      // the newest few stay
      if (own.size > 4) own.delete(own.keys().next().value);
      asked = null;
      app.set({ image: meta.image, text: null, word: null }, true);
    } catch (error) {
      app.fail(error);
      parts.input.querySelector(".upload-problem").replaceChildren(problem(error));
    }
  }

  const dropped = (event) => [...(event.dataTransfer?.files || event.clipboardData?.files || [])].find((file) => file.type.startsWith("image/")) || (event.dataTransfer?.files || [])[0];
  if (!isSaved()) {
    for (const name of ["dragover", "drop"]) parts.input.parentElement.addEventListener(name, (event) => {
      if (!parts.input.isConnected) return;
      event.preventDefault();
      parts.input.classList.toggle("over", name === "dragover");
      if (name === "drop" && dropped(event)) take(dropped(event));
    });
    parts.input.parentElement.addEventListener("dragleave", () => parts.input.classList.remove("over"));
    document.addEventListener("paste", (event) => { if (parts.input.isConnected && dropped(event)) take(dropped(event)); });
  }

  async function update() {
    const { run, image, text } = options();
    const id = JSON.stringify([run.name, image, text]);
    if (id === asked && seen) { follow(); await draw(); return; }
    asked = id;
    if (work) work.abort();
    const mine = work = new AbortController();
    forget();
    seen = caption = null;
    app.busy("Looking at the image", work);
    try {
      const { meta, arrays } = await ask("samples", { run: run.name }, mine.signal);
      if (work !== mine) return;
      samples = { labels: meta.labels, pictures: meta.labels.map((_, at) => toImage({ ...arrays.pixels, shape: arrays.pixels.shape.slice(1) }, at * arrays.pixels.shape[1] * arrays.pixels.shape[2] * 3)) };
      input();
      const reply = await ask("see", { run: run.name, image }, mine.signal);
      if (work !== mine) return;
      const written = run.captions ? (await ask("caption", { run: run.name, image, layer: 0, text: text || null }, mine.signal)).meta : null;
      if (work !== mine) return;
      [seen, caption, pointed] = [{ meta: reply.meta, picture: toImage(reply.arrays.pixels) }, written, null];
      // an image that a link leads to
      if (!/^\d{1,3}$/.test(image) && !own.has(image)) { own.set(image, { picture: seen.picture, label: "your image" }); input(); }
      follow();
      answer();
      await draw();
    } catch (error) {
      if (work !== mine) return;
      asked = null;
      if (error.name === "AbortError") return;
      app.fail(error);
      answers.replaceChildren();
      parts.numbers.replaceChildren(problem(error));
    }
  }

  // a pin keeps its place where a layer has another grid
  function follow() {
    const { pin, grid } = options();
    if (lastGrid && pin !== null && pin === lastGrid.pin && (lastGrid.rows !== grid.rows || lastGrid.columns !== grid.columns)) app.note({ pin: String(moved(lastGrid.at, lastGrid, grid)) });
    const now = options();
    lastGrid = { ...now.grid, pin: now.pin, at: now.pin };
  }

  // arrow keys: from patch to patch
  function steer(arrow) {
    if (!seen) return;
    const { pin, grid, mode, word: kept } = options();
    if (mode === "words") {
      const step = /Left|Up/.test(arrow) ? -1 : 1;
      app.set({ word: String(Math.min(Math.max((kept ?? (step > 0 ? -1 : caption.tokens.length)) + step, 0), caption.tokens.length - 1)) });
      return;
    }
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[arrow];
    const at = pin === null || pin < grid.leading ? null : pin - grid.leading;
    const from = at === null ? [Math.floor((grid.rows - 1) / 2), Math.floor((grid.columns - 1) / 2)] : [Math.floor(at / grid.columns) + by[0], at % grid.columns + by[1]];
    const [row, column] = [Math.min(Math.max(from[0], 0), grid.rows - 1), Math.min(Math.max(from[1], 0), grid.columns - 1)];
    app.set({ pin: String(grid.leading + row * grid.columns + column) });
  }

  return { update, place: options, move: () => {}, steer, picture: () => parts.picture, stage, repaint: () => { if (seen) draw(); } };
}

// the mean of the rows of patches of a map [rows, T]
function average(map, leading, rows, T) {
  const mean = new Float32Array(T);
  for (let at = leading; at < rows; at += 1) for (let i = 0; i < T; i += 1) mean[i] += map[at * T + i] / (rows - leading);
  return mean;
}

// a token in another grid
function moved(at, from, to) {
  if (at < from.leading) return Math.min(at, Math.max(to.leading - 1, 0));
  const patch = at - from.leading;
  const row = Math.min(Math.floor((Math.floor(patch / from.columns) + 0.5) * to.rows / from.rows), to.rows - 1);
  const column = Math.min(Math.floor((patch % from.columns + 0.5) * to.columns / from.columns), to.columns - 1);
  return to.leading + row * to.columns + column;
}
