// Mechanisms: the pattern of each and why a pair is in it, its weights on real text beside softmax's, its cost.

import { el, chips, control, layout, number, problem, renew, select, slider, tokenNode, plainToken } from "../ui.js";
import { whole } from "../store.js";
import { HEADS, REASONS, fit, image, largest } from "../colour.js";
import { ask, forget } from "../client.js";

export const title = "Mechanisms";

const WORDS = { local: "close by", global: "sees or is seen by all", stride: "at fixed steps", random: "drawn at random", cluster: "alike, by content", all: "everything" };

export function mount(host, app) {
  const parts = layout(host, "Who may look at whom, and why. The pattern is measured on the layer that runs: other tokens and other draws tell what a pair depends on.", null);
  const columns = el("div", { className: "beside" });
  parts.picture.append(columns);
  let asked = null;
  let work = null;

  const known = (name) => app.about.mechanisms.find((one) => one.name === name);
  const nameOf = (spec) => spec.split("(")[0].trim();
  const usual = (one) => one.examples[0];
  const layers = () => app.run().facts.layers || 1;
  const options = () => {
    const state = app.state();
    const spec = state.spec && known(nameOf(state.spec)) ? state.spec : "longformer(window=3, globals=2)";
    const second = state.second && known(nameOf(state.second)) ? state.second : null;
    return { spec, second, role: state.role, length: whole(state.length, 36, 8, 96), text: state.text || "the animal did not cross the street because it was too tired", layer: whole(state.layer, 0, 0, layers() - 1), head: whole(state.head, 0, 0, 3) };
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
    const given = values(spec);
    const box = el("div", { className: "knobs" });
    if (about.nests) { box.append(specBox(spec, key)); return box; }
    for (const option of about.options) {
      const now = given[option.name] === undefined ? option.default : given[option.name];
      const change = (value) => app.set({ [key]: write(nameOf(spec), { ...given, [option.name]: value }) });
      let node = null;
      if (option.type === "a whole number") node = slider(now, Math.min(1, option.default), Math.max(16, Math.min(2048, now * 4)), 1, change, option.name);
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
    const role_ = about.roles.includes(role) ? role : about.roles[0];
    box.append(el("h3", {}, about.name), el("p", { className: "quiet" }, about.paper), el("code", { className: "line" }, about.formula));
    const heads = about.nests ? lcmHeads(spec) : 4;
    const figures = el("div", { className: "figures" });
    box.append(knobs(spec, key), figures);
    try {
      const reply = await ask("pattern", { spec, role: role_, length, heads }, signal);
      figures.append(pattern(reply, Math.min(head, heads - 1)));
    } catch (error) {
      if (error.name === "AbortError") throw error;
      box.append(problem(error));
      return box;
    }
    figures.append(await onText(spec, text, layer, head, signal), await cost(spec, role_, signal));
    box.append(facts(about));
    return box;
  }

  function pattern({ meta, arrays }, head) {
    const { values: all, shape: [, T, S] } = arrays.why;
    const why = all.subarray(head * T * S, (head + 1) * T * S);
    const size = Math.min(380, Math.max(220, T * 8));
    const canvas = el("canvas", { className: "pattern", role: "img", "aria-label": "which pairs are visible" });
    const context = fit(canvas, size, size * Math.min(1, T / S) || size);
    const wide = size / S;
    const tall = wide;
    fit(canvas, size, T * tall);
    context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--cell");
    context.fillRect(0, 0, size, T * tall);
    const counts = new Map();
    for (let at = 0; at < T * S; at += 1) {
      if (!why[at]) continue;
      const reason = meta.reasons[why[at]];
      counts.set(reason, (counts.get(reason) || 0) + 1);
      const x = (at % S) * wide;
      const y = Math.floor(at / S) * tall;
      context.fillStyle = REASONS[reason];
      context.fillRect(x, y, wide - (wide > 4 ? 0.5 : 0), tall - (tall > 4 ? 0.5 : 0));
      hatch(context, reason, x, y, wide, tall);
    }
    const legend = el("ul", { className: "legend" });
    for (const [reason, count] of counts) {
      const swatch = el("canvas", { "aria-hidden": "true" });
      const pen = fit(swatch, 16, 16);
      pen.fillStyle = REASONS[reason];
      pen.fillRect(0, 0, 16, 16);
      hatch(pen, reason, 0, 0, 16, 16);
      legend.append(el("li", { "data-reason": reason }, swatch, `${reason}: ${WORDS[reason]}`, el("small", { className: "quiet" }, ` ${(100 * count / (T * S)).toFixed(1)} %`)));
    }
    return el("figure", {}, canvas, el("figcaption", {}, number(100 * [...counts.values()].reduce((sum, count) => sum + count, 0) / (T * S), 1), " % of the pairs are visible. Queries down, keys across", meta.columns === "slots" ? " (slots)." : "."), legend);
  }

  async function onText(spec, text, layer, head, signal) {
    const run = app.run();
    const box = el("figure", { className: "on-text" });
    try {
      const { meta, arrays } = await ask("compare", { spec, run: run.name, text, layer }, signal);
      const pictures = ["mechanism", "softmax"].map((name) => {
        const { values: all, shape: [H, T, S] } = arrays[name];
        const h = Math.min(head, H - 1);
        const map = all.subarray(h * T * S, (h + 1) * T * S);
        const canvas = el("canvas", { className: "small-map", "data-name": name, role: "img", "aria-label": `weights of ${name}` });
        const context = fit(canvas, 180, 180 * Math.min(1, T / S));
        context.imageSmoothingEnabled = false;
        context.drawImage(image(map, S, T, largest(map)), 0, 0, 180, 180 * Math.min(1, T / S));
        const sentence = el("p", { className: "quiet" });
        canvas.addEventListener("pointermove", (event) => {
          const query = Math.min(T - 1, Math.floor(event.offsetY / canvas.clientHeight * T));
          const key = Math.min(S - 1, Math.floor(event.offsetX / canvas.clientWidth * S));
          sentence.replaceChildren(el("b", { dir: "auto" }, plainToken(meta.tokens[query])), " → ", el("b", { dir: "auto" }, plainToken(meta.tokens[key] || `slot ${key}`)), " ", number(map[query * S + key]));
        });
        return el("div", {}, el("h4", {}, name === "softmax" ? "softmax" : meta.spec), canvas, sentence);
      });
      const words = el("p", { className: "words", dir: "auto" }, ...meta.tokens.map((token) => tokenNode(token)));
      box.append(el("figcaption", {}, `Head ${head + 1} on real text beside softmax: ${meta.learnt ? `queries and keys are those that layer ${layer + 1} of the run “${run.title}” has learnt; what the mechanism has beyond them is` : `layer ${layer + 1} of the run “${run.title}” has no queries and keys like it; all it has is`} as it was drawn.`), words, el("div", { className: "pair" }, ...pictures));
    } catch (error) { if (error.name === "AbortError") throw error; box.append(problem(error)); }
    return box;
  }

  async function cost(spec, role, signal) {
    const box = el("figure", { className: "cost" });
    try {
      const { meta } = await ask("cost", { spec, role }, signal);
      const canvas = el("canvas", { role: "img", "aria-label": "counted work over lengths" });
      const [wide, tall] = [360, 190];
      const context = fit(canvas, wide, tall);
      const { lengths, counts } = meta;
      const last = counts.mechanism.length - 1;
      const longest = lengths[last];
      const top = Math.log2(Math.max(...counts.mechanism, ...counts.softmax));
      const low = Math.log2(Math.min(...counts.mechanism, ...counts.softmax));
      const x = (i) => 44 + i * (wide - 60) / (lengths.length - 1);
      const y = (value) => 14 + (tall - 44) * (1 - (Math.log2(value) - low) / Math.max(top - low, 1));
      const style = getComputedStyle(document.documentElement);
      context.font = "11px system-ui, sans-serif";
      context.fillStyle = style.getPropertyValue("--quiet");
      context.textAlign = "center";
      lengths.forEach((length, i) => context.fillText(String(length), x(i), tall - 10));
      for (const [name, colour, dash] of [["softmax", style.getPropertyValue("--quiet"), [4, 4]], ["mechanism", HEADS[0], []]]) {
        context.strokeStyle = colour;
        context.setLineDash(dash);
        context.lineWidth = 2.5;
        context.beginPath();
        counts[name].forEach((value, i) => context[i ? "lineTo" : "moveTo"](x(i), y(value)));
        context.stroke();
      }
      box.append(el("figcaption", {}, `Counted operations of one layer over the length, both on logarithmic scales; dashed: softmax. It declares time ${meta.time.text}, memory ${meta.memory.text}.`), canvas,
        el("p", { className: "quiet" }, "At ", longest.toLocaleString("en"), " tokens: ", many(counts.mechanism[last]), " operations, softmax ", many(counts.softmax[last]), "."));
    } catch (error) { if (error.name === "AbortError") throw error; box.append(problem(error)); }
    return box;
  }

  function facts(about) {
    const rows = [["family", about.family], ["roles", about.roles.join(", ")], ["time", about.time.text], ["memory", about.memory.text], ["decoding keeps", about.state ? about.state.text : "it does not decode"], ["exact", about.exact ? "yes" : "no: random or learnt approximation"], ["weights", about.signed ? "may be negative or not sum to one" : "sum to one"]];
    return el("details", { className: "facts" }, el("summary", {}, "Facts"), el("dl", {}, ...rows.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])), el("p", { className: "about" }, about.about));
  }

  async function update() {
    const { spec, second, role, length, text, layer, head } = options();
    const id = JSON.stringify([spec, second, role, length, text, layer, head]);
    if (id === asked) return;
    asked = id;
    const about = known(nameOf(spec));
    if (work) work.abort();
    work = new AbortController();
    forget();
    app.busy("Measuring the pattern", work);
    const choices = [0, 1, 2, 3].map((h) => ({ key: h, text: String(h + 1), colour: HEADS[h] }));
    renew(parts.controls,
      control("mechanism", choice(spec, "spec")),
      control("beside it", choice(second, "second")),
      control("role", chips(about.roles.map((one_) => ({ key: one_, text: one_ })), about.roles.includes(role) ? role : about.roles[0], (value) => app.set({ role: value }), "role")),
      control("tokens", slider(length, 8, 96, 4, (value) => app.set({ length: String(value) }), "tokens")),
      control("head", chips(choices, head, (value) => app.set({ head: String(value) }), "head")),
    );
    try {
      const boxes = [];
      for (const [each, key] of second ? [[spec, "spec"], [second, "second"]] : [[spec, "spec"]]) boxes.push(await one(each, key, work.signal));
      if (asked !== id) return;
      renew(columns, ...boxes);
      app.done(second ? `${spec} beside ${second}` : spec);
    } catch (error) {
      if (asked !== id) return;
      asked = null;
      if (error.name !== "AbortError") { app.fail(error); return; }
      app.done("Cancelled.");
      renew(columns, el("button", { type: "button", className: "run", onclick: update }, "Run"));
    }
  }

  return { update, place: () => ({ ...options(), layers: layers(), heads: 4 }), move: () => {}, picture: () => parts.picture };
}

// the options of a spec that a slider can move: numbers, strings, True and False
function values(spec) {
  const inside = spec.slice(spec.indexOf("(") + 1, spec.lastIndexOf(")"));
  const found = {};
  if (!spec.includes("(")) return found;
  for (const match of inside.matchAll(/(\w+)\s*=\s*('[^']*'|\[[^\]]*\]|\([^)]*\)|[^,]+)/g)) {
    const text = match[2].trim();
    found[match[1]] = text === "True" ? true : text === "False" ? false : /^'.*'$/.test(text) ? text.slice(1, -1) : Number.isNaN(Number(text)) ? { raw: text } : Number(text);
  }
  return found;
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

// heads that divide among the parts of heads(...)
function lcmHeads(spec) {
  let depth = 0;
  let parts = 1;
  for (const letter of spec) {
    if (letter === "(" || letter === "[") depth += 1;
    if (letter === ")" || letter === "]") depth -= 1;
    if (letter === "," && depth === 1) parts += 1;
  }
  return parts * Math.max(1, Math.floor(4 / parts));
}

// every reason has a colour and a hatch of its own
function hatch(context, reason, x, y, wide, tall) {
  if (wide < 5) return;
  context.save();
  context.beginPath();
  context.rect(x, y, wide, tall);
  context.clip();
  context.strokeStyle = "rgba(255,255,255,.75)";
  context.lineWidth = 1;
  context.beginPath();
  if (reason === "global") { context.moveTo(x, y + tall / 2); context.lineTo(x + wide, y + tall / 2); }
  if (reason === "stride") { context.moveTo(x, y + tall); context.lineTo(x + wide, y); }
  if (reason === "random") context.arc(x + wide / 2, y + tall / 2, Math.min(wide, tall) / 5, 0, 7);
  if (reason === "cluster") { context.moveTo(x, y); context.lineTo(x + wide, y + tall); context.moveTo(x, y + tall); context.lineTo(x + wide, y); }
  if (reason === "all") { context.moveTo(x + wide / 2, y); context.lineTo(x + wide / 2, y + tall); }
  context.stroke();
  context.restore();
}
