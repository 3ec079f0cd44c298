// Mechanisms: the pattern of each and the reason for each pair, its weights on real text beside those of softmax, its cost.

import { count, el, chips, control, layout, number, problem, renew, select, slider, textBox, tokenNode } from "../ui.js";
import { whole } from "../store.js";
import { HEADS, REASONS } from "../colour.js";
import { chart, plate, sketch, style } from "../chart.js";
import { ask, forget } from "../client.js";

export const title = "Mechanisms";

const WORDS = {
  local: "close by", global: "a token that all see, or that sees all", stride: "at multiples of a stride", fixed: "by position, whatever the tokens",
  random: "drawn at random", content: "chosen by what the tokens say", all: "every pair that the role allows",
};
// options that do not count tokens
const OTHER = ["longest", "bank", "every", "iterations", "bits", "inner", "expansion"];

// a number of tokens; of a grid it may be a list instead, which only the spec can say
const isWhole = (option, now) => option.type === "a whole number" || (option.type === "a whole number or a list of whole numbers" && Number.isInteger(now));

export function mount(host, app) {
  const parts = layout(host, "Which token can attend to which, and why. Everything is measured on the layer itself: other tokens and other random draws tell what a pair depends on.", null, false);
  const columns = el("div", { className: "beside" });
  parts.picture.append(columns);
  let asked = null;
  let work = null;
  let typed = null;

  const known = (name) => app.about.mechanisms.find((one) => one.name === name);
  const nameOf = (spec) => spec.split("(")[0].trim();
  const usual = (one) => one.examples[0];
  // a bare name means options that suit a short text: a window of 256 over 36 tokens shows nothing
  const fitted = (spec) => (spec && known(nameOf(spec)) ? (/^\w+$/.test(spec.trim()) ? usual(known(nameOf(spec))) : spec) : null);
  // a model of images may have other numbers in each stage
  const layers = () => Number(app.run().facts.layers) || 1;
  const causal = () => app.run().places.includes("decoder") && !app.run().places.includes("encoder");
  // the role of the run, if the mechanism has it
  const roleOf = (about, role) => [role, causal() ? "causal" : "self"].find((one) => about.roles.includes(one)) || about.roles[0];
  const headsOf = (spec) => {
    const parts_ = known(nameOf(spec)).nests ? width(spec) : 1;
    return parts_ * Math.max(1, Math.floor(Math.min(Number(app.run().facts.heads) || 4, 16) / parts_));
  };
  const options = () => {
    const state = app.state();
    const spec = fitted(state.spec) || "longformer(window=3, globals=2)";
    const second = fitted(state.second);
    const heads = Math.min(headsOf(spec), second ? headsOf(second) : Infinity);
    return { spec, second, role: state.role, length: whole(state.length, 36, 8, 96), text: state.text || app.example(), layer: whole(state.layer, 0, 0, layers() - 1), head: whole(state.head, 0, 0, heads - 1), heads };
  };

  function choice(spec, key) {
    const families = [...new Set(app.about.mechanisms.map((one) => one.family))];
    const node = el("select", { "aria-label": key === "spec" ? "mechanism" : "second mechanism", onchange: () => app.set({ [key]: node.value ? usual(known(node.value)) : null, role: null }, true) });
    if (key === "second") node.append(el("option", { value: "" }, "nothing"));
    for (const family of families) {
      const group = el("optgroup", { label: family });
      for (const one of app.about.mechanisms.filter((each) => each.family === family)) group.append(el("option", { value: one.name, selected: spec !== null && nameOf(spec) === one.name }, one.name));
      node.append(group);
    }
    return node;
  }

  function knobs(spec, key) {
    const about = known(nameOf(spec));
    const chosen = values(spec);
    const box = el("div", { className: "knobs" });
    if (about.nests) { box.append(specBox(spec, key)); return box; }
    for (const option of about.options) {
      const now = chosen[option.name] === undefined ? option.default : chosen[option.name];
      const change = (value) => app.set({ [key]: write(nameOf(spec), { ...chosen, [option.name]: value }) });
      let node = null;
      if (isWhole(option, now)) node = slider(now, Math.min(1, option.default), Math.max(16, Math.min(2048, now * 4)), 1, change, option.name);
      else if (/^a (whole )?number or None$/.test(option.type)) node = numberOrNone(now, change, option.name);
      else if (option.type === "a number") node = now <= 1 ? slider(now, 0, 1, 0.01, change, option.name) : slider(now, 0, Math.max(4, now * 2), 0.1, change, option.name);
      else if (option.type === "True or False") node = chips([{ key: true, text: "yes" }, { key: false, text: "no" }], now, change, option.name);
      else if (/^'[^']+'( or '[^']+')*$/.test(option.type)) node = select(option.type.split(" or ").map((one) => [one.slice(1, -1), one.slice(1, -1)]), now, change, option.name);
      if (node) { const line = control(option.name, node); line.title = option.meaning; box.append(line); }
    }
    box.append(specBox(spec, key));
    return box;
  }

  function numberOrNone(now, change, label) {
    const node = el("input", { className: "spec", type: "number", step: "any", placeholder: "None", "aria-label": label });
    node.value = now === null || now.raw ? "" : now;
    node.addEventListener("change", () => change(node.value === "" ? null : Number(node.value)));
    return node;
  }

  function specBox(spec, key) {
    const node = el("input", { className: "spec", "aria-label": "spec", spellcheck: false, maxLength: 300 });
    node.value = spec;
    node.addEventListener("change", () => app.set({ [key]: node.value }));
    return control("spec", node);
  }

  async function one(spec, key, signal) {
    const about = known(nameOf(spec));
    const { role, length, text, layer, head } = options();
    const box = el("article", { className: "mechanism" });
    const role_ = roleOf(about, role);
    box.append(el("h2", {}, about.name), el("p", { className: "quiet" }, about.package ? `${about.paper} (from the package ${about.package})` : about.paper), el("code", { className: "line" }, about.formula));
    const heads = headsOf(spec);
    const figures = el("div", { className: "figures" });
    box.append(knobs(spec, key), figures);
    try {
      const reply = await ask("pattern", { spec, role: role_, length, heads }, signal);
      figures.append(...pattern(reply, Math.min(head, heads - 1), spec, key, role_));
    } catch (error) {
      if (error.name === "AbortError") throw error;
      box.append(problem(error));
      return box;
    }
    figures.append(await onText(spec, text, layer, head, signal), await cost(spec, role_, signal));
    box.append(facts(about));
    return box;
  }

  // the pattern of a head: which pairs are visible and why; of a map that hides nothing, its weights and their rank
  function pattern({ meta, arrays }, head, spec, key, role) {
    const { values: all, shape: [H, T, S] } = arrays.why;
    const h = Math.min(head, H - 1);
    const why = all.subarray(h * T * S, (h + 1) * T * S);
    const weights = arrays.weights.values.subarray(h * T * S, (h + 1) * T * S);
    const visible = why.reduce((sum, reason) => sum + (reason ? 1 : 0), 0);
    const everything = why.every((reason, at) => reason || (role === "causal" && at % S > Math.floor(at / S)));
    const hidden = (query, column) => !why[query * S + column];
    const columnsAre = meta.columns === "slots" ? "slot" : "key";
    const figures = [el("figure", { className: "pattern-of" }, ...(everything && !meta.blank
      ? [el("h3", {}, `Weights of head ${h + 1} over random tokens`), plate({ values: weights, rows: T, columns: S, axes: { down: "query", across: columnsAre }, hidden: role === "causal" ? hidden : null, size: 340, label: `weights of head ${h + 1}: ${T} queries by ${S} ${columnsAre}s` })]
      : [el("h3", {}, `What head ${h + 1} can see`), squares(why, T, S, meta), legend(why, meta)]),
    el("figcaption", {}, ...said(meta, h, { T, S, visible, everything, role })), ...misfit(spec, key, T))];
    // a window or a stride has full rank, which says nothing about it
    if (!meta.blank && (everything || meta.rank[h] < meta.most)) figures.push(spectrum(meta, arrays.spectrum, h));
    return figures;
  }

  // in words, and only what was measured
  function said(meta, h, { T, S, visible, everything, role }) {
    const slots = meta.columns === "slots";
    const words = [];
    if (everything && slots) words.push(`Every token sees ${role === "causal" ? "all slots before it" : `all ${S} slots`}, which summarise ${T} tokens. `);
    else if (everything) words.push(role === "causal" ? "Every token sees itself and all before it. " : "Every token sees every token. ");
    else words.push(number(100 * visible / (T * S), 1), ` % of the ${T} × ${S} pairs are visible. `);
    if (meta.blank) words.push("Its matrix is initialised with zeros: before training no token reads another, and any of these pairs may get a weight. ");
    else if (meta.steady) words.push("The weights are the same whatever the tokens say. ");
    if (meta.signed) words.push("Weights may be negative or not add up to one. ");
    words.push(`Queries down, ${slots ? "slots" : "keys"} across.`);
    return words;
  }

  // options as large as the text: what they limit cannot be seen
  function misfit(spec, key, T) {
    const about = known(nameOf(spec));
    if (about.nests) return [];
    const chosen = values(spec);
    const large = about.options.filter((option) => isWhole(option, chosen[option.name] ?? option.default) && !OTHER.includes(option.name) && (chosen[option.name] ?? option.default) >= T);
    if (!large.length) return [];
    const names = large.map((option) => `${option.name}=${chosen[option.name] ?? option.default}`).join(", ");
    return [el("p", { className: "misfit" }, `${names}: not smaller than the ${T} tokens, so its limit cannot be seen here. `, el("button", { type: "button", className: "linklike", onclick: () => app.set({ [key]: usual(about) }) }, `Show ${usual(about)}`))];
  }

  function squares(why, T, S, meta) {
    const size = Math.min(340, Math.max(220, T * 8));
    const unit = size / Math.max(T, S);
    const canvas = el("canvas", { className: "pattern", role: "img", "aria-label": "which pairs are visible" });
    const gap = unit > 4 ? 0.5 : 0;
    const paths = new Map([["hidden", ""]]);
    why.forEach((code, at) => {
      const reason = meta.reasons[code];
      const [x, y] = [(at % S) * unit, Math.floor(at / S) * unit];
      paths.set(reason, `${paths.get(reason) || ""}M${x.toFixed(2)} ${y.toFixed(2)}h${(unit - gap).toFixed(2)}v${(unit - gap).toFixed(2)}h${(gap - unit).toFixed(2)}z`);
    });
    const shapes = [];
    for (const [reason, d] of paths) {
      if (!d) continue;
      shapes.push({ d, fill: reason === "hidden" ? style("--cell") : REASONS[reason] });
      const marks = unit < 5 || reason === "hidden" ? "" : [...why.keys()].filter((at) => meta.reasons[why[at]] === reason).map((at) => hatch(reason, (at % S) * unit, Math.floor(at / S) * unit, unit)).join("");
      if (marks) shapes.push({ d: marks, stroke: "#ffffff", alpha: 0.75 });
    }
    return sketch(canvas, unit * S, unit * T, shapes);
  }

  function legend(why, meta) {
    const counts = new Map();
    for (const code of why) if (code) counts.set(meta.reasons[code], (counts.get(meta.reasons[code]) || 0) + 1);
    const list = el("ul", { className: "legend" });
    const swatch = (reason) => sketch(el("canvas", { "aria-hidden": "true" }), 16, 16, [{ d: "M0 0h16v16h-16z", fill: reason ? REASONS[reason] : style("--cell") }, ...(reason && hatch(reason, 0, 0, 16) ? [{ d: hatch(reason, 0, 0, 16), stroke: "#ffffff", alpha: 0.75 }] : [])]);
    for (const [reason, many_] of counts) list.append(el("li", { "data-reason": reason }, swatch(reason), `${reason}: ${WORDS[reason]}`, el("small", { className: "quiet" }, ` ${(100 * many_ / why.length).toFixed(1)} %`)));
    const rest = why.length - [...counts.values()].reduce((sum, one_) => sum + one_, 0);
    if (rest) list.append(el("li", { className: "quiet" }, swatch(null), "hidden", el("small", {}, ` ${(100 * rest / why.length).toFixed(1)} %`)));
    return list;
  }

  // the rank of the map: its singular values
  function spectrum(meta, { values: all, shape: [, K] }, h) {
    const rank = meta.rank[h];
    const canvas = el("canvas", { role: "img", "aria-label": `singular values: ${rank} of ${meta.most} are not zero` });
    const [wide, tall] = [340, 120];
    const [left, base] = [34, tall - 22];
    const step = (wide - left) / K;
    const [accent, quiet, cell] = [style("--accent"), style("--quiet"), style("--cell")];
    const shapes = [
      { text: "1", x: left - 6, y: 8, anchor: "end", fill: quiet }, { text: "10⁻⁶", x: left - 6, y: base, anchor: "end", fill: quiet },
      { text: "1", x: left + step / 2, y: tall - 8, anchor: "middle", fill: quiet }, { text: String(K), x: wide - step / 2 - 4, y: tall - 8, anchor: "middle", fill: quiet },
    ];
    const bars = (from, to, height) => Array.from({ length: to - from }, (_, i) => { const top = height(from + i); return `M${(left + (from + i) * step + 0.5).toFixed(2)} ${base}v${-top.toFixed(2)}h${Math.max(1, step - 1.5).toFixed(2)}v${top.toFixed(2)}z`; }).join("");
    shapes.push({ d: bars(rank, K, () => 2), fill: cell }, { d: bars(0, rank, (at) => 2 + (base - 10) * (1 + Math.log10(Math.max(all[h * K + at], 1e-6)) / 6)), fill: accent });
    sketch(canvas, wide, tall, shapes.filter((shape) => shape.d !== ""));
    const full = rank === meta.most;
    const what = meta.halves ? "The part of the map in which the second half of the text reads the first" : "The map of this head";
    const why = full ? "full rank: every token can have weights of its own" : `whatever the tokens, it is a mix of ${count(rank, "pattern")}`;
    const wide_ = rank === meta.head_width && !full ? `, as the head is ${meta.head_width} wide` : "";
    return el("figure", { className: "rank" }, el("h3", {}, "The rank of its map"), canvas, el("figcaption", {}, `${what} has rank `, el("data", { value: String(rank) }, String(rank)), ` of ${meta.most}${wide_}: ${why}. The bars are its singular values as shares of the largest, on a logarithmic scale.`));
  }

  async function onText(spec, text, layer, head, signal) {
    const run = app.run();
    const box = el("figure", { className: "on-text" });
    // without a text there is nothing to compare on
    if (run.reads === "images") return box;
    try {
      const { meta, arrays } = await ask("compare", { spec, run: run.name, text, layer }, signal);
      const H = arrays.mechanism.shape[0];
      const h = Math.min(head, H - 1);
      const pictures = ["mechanism", "softmax"].map((name) => {
        const { values: all, shape: [, T, S] } = arrays[name];
        const map = all.subarray(h * T * S, (h + 1) * T * S);
        const role = name === "softmax" ? meta.softmax_role : meta.role;
        const slots = S !== meta.tokens.length;
        const across = slots ? Array.from({ length: S }, (_, at) => `▁slot ${at + 1}`) : meta.tokens;
        const hidden = (query, at, weight) => (role === "causal" && !slots && at > query) || (name === "mechanism" && !meta.signed && nameOf(spec) !== "entmax" && weight === 0);
        return el("div", { "data-name": name }, el("h3", {}, name === "softmax" ? "softmax" : meta.spec), plate({ values: map, rows: T, columns: S, names: { down: meta.tokens, across }, axes: { down: "query", across: "key" }, hidden, size: 300, label: `weights of ${name} on the text` }));
      });
      const source = meta.learned ? `Queries and keys are those that layer ${layer + 1} of “${run.title}” has learned; other parameters of the mechanism are as initialised.` : `Layer ${layer + 1} of “${run.title}” has no queries and keys of this form: all parameters are as initialised.`;
      box.append(el("h3", {}, `Head ${h + 1} on a text, beside softmax`), el("div", { className: "pair" }, ...pictures), el("figcaption", {}, source, meta.cut ? ` The first ${meta.tokens.length} tokens.` : "", ` Role: ${meta.role}.`), el("p", { className: "words", dir: "auto" }, ...meta.tokens.map((token) => tokenNode(token))));
    } catch (error) { if (error.name === "AbortError") throw error; box.append(problem(error)); }
    return box;
  }

  async function cost(spec, role, signal) {
    const box = el("figure", { className: "cost" });
    try {
      const { meta } = await ask("cost", { spec, role }, signal);
      const { lengths, counts } = meta;
      const last = counts.mechanism.length - 1;
      const lines = ["softmax", "mechanism"].map((name) => counts[name].map((value, i) => [lengths[i], value]));
      box.append(el("h3", {}, "Counted operations of one layer"),
        chart({ lines, colours: [style("--quiet"), HEADS[0]], dashes: [[4, 4], []], width: 340, height: 200, x: "tokens", y: "operations", log: true, ticks: lengths, label: "counted operations over lengths" }),
        el("figcaption", {}, `Both scales are logarithmic; dashed: softmax. At ${lengths[last].toLocaleString("en")} tokens: `, many(counts.mechanism[last]), " operations, softmax ", many(counts.softmax[last]), `. It declares time ${meta.time.text}, memory ${meta.memory.text}.`));
    } catch (error) { if (error.name === "AbortError") throw error; box.append(problem(error)); }
    return box;
  }

  function facts(about) {
    const rows = [["family", about.family], ["roles", about.roles.join(", ")], ["time", about.time.text], ["memory", about.memory.text], ["decoding keeps", about.state ? about.state.text : "it does not decode"], ["exact", about.exact ? "yes" : "no: a random or learned approximation"], ["weights", about.signed ? "may be negative or not sum to one" : "sum to one"]];
    return el("details", { className: "facts" }, el("summary", {}, "Facts"), el("dl", {}, ...rows.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])), el("p", { className: "about" }, about.about));
  }

  async function update() {
    const { spec, second, role, length, text, layer, head, heads } = options();
    const run = app.run();
    const id = JSON.stringify([run.name, spec, second, role, length, text, layer, head]);
    if (id === asked) return;
    asked = id;
    const about = known(nameOf(spec));
    if (work) work.abort();
    const mine = work = new AbortController();
    forget();
    if (typed !== `${run.name}/${text}`) {
      typed = `${run.name}/${text}`;
      renew(parts.input, run.reads === "images" ? "" : textBox(text, run.examples, (value) => app.set({ text: value }, true), "Type a text to read", "Text"));
    }
    app.busy("Measuring the pattern", work);
    const choices = Array.from({ length: heads }, (_, h) => ({ key: h, text: String(h + 1), colour: HEADS[h % HEADS.length] }));
    renew(parts.controls,
      control("mechanism", choice(spec, "spec")),
      control("beside it", choice(second, "second")),
      control("role", chips(about.roles.map((one_) => ({ key: one_, text: one_ })), roleOf(about, role), (value) => app.set({ role: value }), "role")),
      control("tokens", slider(length, 8, 96, 4, (value) => app.set({ length: String(value) }), "tokens")),
      layers() > 1 ? control("layer of the run", slider(layer + 1, 1, layers(), 1, (value) => app.set({ layer: String(value - 1) }), "layer")) : "",
      control("head", chips(choices, head, (value) => app.set({ head: String(value) }), "head")),
    );
    try {
      const boxes = [];
      for (const [each, key] of second ? [[spec, "spec"], [second, "second"]] : [[spec, "spec"]]) boxes.push(await one(each, key, mine.signal));
      if (work !== mine) return;
      renew(columns, ...boxes);
      app.done(second ? `${spec} beside ${second}` : spec);
    } catch (error) {
      if (work !== mine) return;
      asked = null;
      if (error.name !== "AbortError") { app.fail(error); return; }
      app.done("Cancelled.");
      renew(columns, el("button", { type: "button", className: "run", onclick: update }, "Run"));
    }
  }

  return { update, place: () => ({ ...options(), layers: layers() }), move: () => {}, picture: () => parts.picture, repaint: () => { asked = null; update(); } };
}

// the options of a spec that a slider can move: numbers, strings, True and False
function values(spec) {
  const inside = spec.slice(spec.indexOf("(") + 1, spec.lastIndexOf(")"));
  const options = {};
  if (!spec.includes("(")) return options;
  for (const match of inside.matchAll(/(\w+)\s*=\s*('[^']*'|\[[^\]]*\]|\([^)]*\)|[^,]+)/g)) {
    const text = match[2].trim();
    options[match[1]] = text === "True" ? true : text === "False" ? false : /^'.*'$/.test(text) ? text.slice(1, -1) : Number.isNaN(Number(text)) ? { raw: text } : Number(text);
  }
  return options;
}

function write(name, options) {
  const literal = (value) => (value === null ? "None" : value === true ? "True" : value === false ? "False" : value.raw ? value.raw : typeof value === "string" ? `'${value}'` : String(value));
  const inside = Object.entries(options).map(([key, value]) => `${key}=${literal(value)}`);
  return inside.length ? `${name}(${inside.join(", ")})` : name;
}

// a large count in words, such as 71 million
function many(count) {
  const short = new Intl.NumberFormat("en", { notation: "compact", compactDisplay: "long", maximumSignificantDigits: 3 }).format(count);
  return el("data", { value: String(count), title: count.toLocaleString("en") }, short);
}

// the number of parts of heads(...)
function width(spec) {
  let depth = 0;
  let parts = 1;
  for (const letter of spec) {
    if (letter === "(" || letter === "[") depth += 1;
    if (letter === ")" || letter === "]") depth -= 1;
    if (letter === "," && depth === 1) parts += 1;
  }
  return parts;
}

// every reason has a colour and a hatch of its own
function hatch(reason, x, y, size) {
  const half = size / 2;
  const at = (dx, dy) => `${(x + dx).toFixed(1)} ${(y + dy).toFixed(1)}`;
  return {
    global: `M${at(0, half)}h${size.toFixed(1)}`,
    stride: `M${at(0, size)}L${at(size, 0)}`,
    fixed: `M${at(0, 0)}L${at(size, size)}`,
    random: `M${at(half - size / 5, half)}a${size / 5} ${size / 5} 0 1 0 ${2 * size / 5} 0a${size / 5} ${size / 5} 0 1 0 ${-2 * size / 5} 0`,
    content: `M${at(0, 0)}L${at(size, size)}M${at(0, size)}L${at(size, 0)}`,
    all: `M${at(half, 0)}v${size.toFixed(1)}`,
  }[reason] || "";
}
