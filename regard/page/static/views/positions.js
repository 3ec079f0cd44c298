// Positions: how a scheme tells places apart, and what it adds between two of them.

import { count, el, chips, control, layout, problem, renew, slider } from "../ui.js";
import { whole } from "../store.js";
import { HEADS } from "../colour.js";
import { chart, plate } from "../chart.js";
import { ask, forget } from "../client.js";

export const title = "Positions";

const SAYS = {
  input: "A vector for each position is added to the token there. Below: the vectors, and their dot products.",
  rotation: "Queries and keys are rotated by an angle that grows with the position, so that their product depends on the distance. Below: the same vector rotated at each position, and the dot products.",
  bias: "A number for each distance is added to the score. Below: those numbers, head by head.",
  content: "A vector for each distance is multiplied with the query. Below: what this adds to the score of one random query at each position.",
  none: "Nothing marks positions: what a token reads does not depend on where others are, except that a causal mask hides later ones. Below: only zeros.",
};
const TABLES = {
  sinusoidal: "The vector of each position: waves, fast in the first channels and slow in the last.",
  learned: "The vector of each position, one parameter per cell.",
  fourier: "The vector of each position: a learned mixture of waves in every channel.",
  none: "The vector of each position: zero.",
  rotary: "One vector, rotated position by position: pairs of channels, fast in the first and slow in the last.",
};
const PAIRS = {
  input: "The dot product of every two positions", rotation: "The dot product of a query and a key that are the same vector",
  bias: "What is added to the score of a query and a key", content: "What is added to the score of one query",
};

export function mount(host, app) {
  const parts = layout(host, "", null, false);
  let asked = null;
  const nameOf = (spec) => (spec || "").split("(")[0].trim();
  const causal = () => app.run().places.includes("decoder") && !app.run().places.includes("encoder");
  const options = () => {
    const state = app.state();
    const known = (name) => app.about.positions.find((one) => one.name === name);
    // the scheme in the address, or that of the run
    const scheme = known(state.scheme) || known(nameOf(app.run().facts.position)) || known("sinusoidal");
    const role = ["self", "causal"].includes(state.role) ? state.role : causal() ? "causal" : "self";
    return { run: app.run(), scheme, role, length: whole(state.length, 64, 8, 192), width: 8 * Math.round(whole(state.width, 64, 8, 256) / 8), head: whole(state.head, 0, 0, 999) };
  };
  let heads = 4;

  function controls(meta) {
    const { scheme, role, length, width, head } = options();
    renew(parts.controls,
      control("scheme", chips(app.about.positions.map((one) => ({ key: one.name, text: one.name, title: one.paper })), scheme.name, (value) => app.set({ scheme: value }, true), "scheme")),
      control("role", chips([{ key: "self", text: "self" }, { key: "causal", text: "causal" }], role, (value) => app.set({ role: value }), "role")),
      control("tokens", slider(length, 8, 192, 8, (value) => app.set({ length: String(value) }), "tokens")),
      meta.trained ? "" : control("width", slider(width, 8, 256, 8, (value) => app.set({ width: String(value) }), "width")),
      meta.heads > 1 ? control("head", chips(Array.from({ length: meta.heads }, (_, h) => ({ key: h, text: String(h + 1), colour: HEADS[h % HEADS.length] })), Math.min(head, meta.heads - 1), (value) => app.set({ head: String(value) }), "head")) : "",
    );
  }

  async function update() {
    const { run, scheme, role, length, width, head } = options();
    const id = JSON.stringify([run.name, scheme.name, role, length, width, head]);
    if (id === asked) return;
    asked = id;
    forget();
    app.busy("Computing positions");
    parts.words.textContent = SAYS[scheme.name] || SAYS[scheme.kind];
    try {
      const reply = await ask("position", { spec: scheme.name, role, length, width, heads: 4, run: run.name });
      if (asked !== id) return;
      heads = reply.meta.heads;
      controls(reply.meta);
      parts.numbers.replaceChildren(el("code", { className: "line" }, scheme.formula), el("p", { className: "quiet" }, scheme.paper), el("p", { className: "quiet origin" }, origin(reply.meta, run)));
      parts.picture.replaceChildren(...pictures(reply, scheme, head));
      app.done(`${scheme.name} · ${count(reply.meta.length, "position")} · width ${reply.meta.width}`);
    } catch (error) {
      if (asked !== id) return;
      asked = null;
      app.fail(error);
      parts.picture.replaceChildren(problem(error));
    }
  }

  // where the numbers come from
  function origin(meta, run) {
    if (meta.trained) return `“${run.title}” has learned these numbers${meta.kind === "input" ? "" : ", in its first layer"}.`;
    if (meta.trains) return `“${run.title}” does not have this scheme. Its numbers are parameters, shown as initialised, before training.`;
    return "This scheme has no parameters: its numbers are the same in every model.";
  }

  function pictures({ meta, arrays }, scheme, head) {
    const list = [];
    if (arrays.table) {
      const { values, shape: [N, E] } = arrays.table;
      list.push(figure(plate({ values, rows: N, columns: E, axes: { down: "position", across: "channel" }, even: true, signed: true, size: 330, say: "value", label: "vectors: position by channel" }), TABLES[scheme.name] || "The vector of each position."));
    }
    const { values: all, shape: [H, N] } = arrays.pairs;
    const h = Math.min(head, H - 1);
    const pairs = all.subarray(h * N * N, (h + 1) * N * N);
    const hidden = meta.hidden ? (query, key) => key > query : null;
    list.push(figure(plate({ values: pairs, rows: N, columns: N, axes: { down: "query", across: "key" }, even: true, hidden, size: 330, say: "value", label: "query by key" }), `${PAIRS[meta.kind]}${H > 1 ? `, head ${h + 1}` : ""}.`));
    const middle = meta.hidden ? N - 1 : Math.floor(N / 2);
    const lines = Array.from({ length: H }, (_, one) => Array.from({ length: meta.hidden ? middle + 1 : N }, (_place, at) => [at - middle, all[(one * N + middle) * N + at]]));
    const ends = [-middle, 0, N - 1 - middle].filter((at, i, every) => every.indexOf(at) === i);
    list.push(figure(chart({ lines, colours: lines.map((_, one) => HEADS[one % HEADS.length]), width: 380, height: 230, x: "distance from the query", y: "value", ticks: ends, mark: 0, label: "over the distance" }), `The same from position ${middle}, over the distance${H > 1 ? "; one line per head, in its colour" : ""}.`));
    return list;
  }

  return { update, place: () => ({ ...options(), head: Math.min(options().head, heads - 1), layer: 0, layers: 1, heads }), move: () => {}, picture: () => parts.picture, repaint: () => { asked = null; update(); } };
}

function figure(picture, words) {
  return el("figure", { className: "plate" }, picture, el("figcaption", {}, words));
}
