// Positions: how a scheme tells places apart, and what it adds between two of them.

import { el, chips, control, layout, number, problem, renew, slider } from "../ui.js";
import { whole } from "../store.js";
import { HEADS, fit, image, largest } from "../colour.js";
import { ask, forget } from "../client.js";

export const title = "Positions";

const SAYS = {
  input: "A vector for each place is added to the token there. Below: the vectors, and their products with one another.",
  rotation: "Queries and keys are turned by an angle that grows with the place, so that their product depends on the distance. Below: one and the same vector turned, and its products.",
  bias: "A number for each distance is added to the score. Below: those numbers, head by head.",
  content: "A vector for each distance meets the query. Below: what one random query gets from each place.",
};

export function mount(host, app) {
  const parts = layout(host, "", null);
  let asked = null;
  const options = () => {
    const state = app.state();
    const scheme = app.about.positions.find((one) => one.name === state.scheme) || app.about.positions.find((one) => one.name === "sinusoidal");
    return { scheme, role: state.role === "causal" ? "causal" : "self", length: whole(state.length, 64, 8, 192), width: 8 * Math.round(whole(state.width, 64, 8, 256) / 8), head: whole(state.head, 0, 0, 3) };
  };

  async function update() {
    const { scheme, role, length, width, head } = options();
    const id = JSON.stringify([scheme.name, role, length, width, head]);
    if (id === asked) return;
    asked = id;
    forget();
    app.busy("Computing positions");
    parts.words.textContent = SAYS[scheme.kind];
    const heads = 4;
    renew(parts.controls,
      control("scheme", chips(app.about.positions.map((one) => ({ key: one.name, text: one.name, title: one.paper })), scheme.name, (value) => app.set({ scheme: value }, true), "scheme")),
      control("role", chips([{ key: "self", text: "self" }, { key: "causal", text: "causal" }], role, (value) => app.set({ role: value }), "role")),
      control("tokens", slider(length, 8, 192, 8, (value) => app.set({ length: String(value) }), "tokens")),
      control("width", slider(width, 8, 256, 8, (value) => app.set({ width: String(value) }), "width")),
      control("head", chips([0, 1, 2, 3].map((h) => ({ key: h, text: String(h + 1), colour: HEADS[h] })), head, (value) => app.set({ head: String(value) }), "head")),
    );
    parts.numbers.replaceChildren(el("code", { className: "line" }, scheme.formula), el("p", { className: "quiet" }, scheme.paper));
    try {
      const reply = await ask("position", { spec: scheme.name, role, length, width, heads });
      if (asked !== id) return;
      parts.picture.replaceChildren(...pictures(reply, head));
      app.done(`${scheme.name} · ${length} places · width ${width}`);
    } catch (error) {
      if (asked !== id) return;
      asked = null;
      app.fail(error);
      parts.picture.replaceChildren(problem(error));
    }
  }

  function pictures({ meta, arrays }, head) {
    const list = [];
    if (arrays.table) {
      const { values, shape: [N, E] } = arrays.table;
      list.push(figure(matrix(values, N, E, "place", "channel", parts), meta.kind === "input" ? "The vector of each place: fast waves on the left, slow ones on the right." : "One vector, turned place by place."));
    }
    const { values: all, shape: [H, N] } = arrays.pairs;
    const h = Math.min(head, H - 1);
    const pairs = all.subarray(h * N * N, (h + 1) * N * N);
    const title_ = { input: "The product of every two places", rotation: "The product of a query and a key that are the same vector", bias: "What is added to the score of query and key", content: "What one query gets from each place" }[meta.kind];
    list.push(figure(matrix(pairs, N, N, "query", "key", parts), `${title_}${H > 1 ? `, head ${h + 1}` : ""}.`));
    const middle = meta.role === "causal" ? N - 1 : Math.floor(N / 2);
    const lines = Array.from({ length: H }, (_, one) => all.subarray((one * N + middle) * N, (one * N + middle + 1) * N));
    list.push(figure(curve(lines, middle), `The same along the distance from place ${middle}${H > 1 ? ", a line a head" : ""}.`));
    return list;
  }

  return { update, place: () => ({ ...options(), layer: 0, layers: 1, heads: 4 }), move: () => {}, picture: () => parts.picture };
}

function figure(canvas, words) {
  return el("figure", { className: "plate" }, canvas, el("figcaption", {}, words));
}

function matrix(values, rows, columns, down, across, parts) {
  const canvas = el("canvas", { className: "plate-map", role: "img", "aria-label": `${down} by ${across}` });
  const size = Math.min(460, Math.max(260, columns * 5));
  const tall = Math.min(460, Math.max(200, size * rows / columns));
  const context = fit(canvas, size, tall);
  context.imageSmoothingEnabled = false;
  context.drawImage(image(values, columns, rows, largest(values)), 0, 0, size, tall);
  canvas.addEventListener("pointermove", (event) => {
    const row = Math.min(rows - 1, Math.floor(event.offsetY / canvas.clientHeight * rows));
    const column = Math.min(columns - 1, Math.floor(event.offsetX / canvas.clientWidth * columns));
    let line = parts.numbers.querySelector(".under");
    if (!line) { line = el("p", { className: "under reading" }); parts.numbers.append(line); }
    line.replaceChildren(`${down} ${row}, ${across} ${column}: `, number(values[row * columns + column], 4));
  });
  return canvas;
}

function curve(lines, middle) {
  const [wide, tall] = [460, 220];
  const canvas = el("canvas", { role: "img", "aria-label": "over the distance" });
  const context = fit(canvas, wide, tall);
  const N = lines[0].length;
  let low = Infinity;
  let high = -Infinity;
  for (const line of lines) for (const value of line) { low = Math.min(low, value); high = Math.max(high, value); }
  const x = (at) => 40 + at * (wide - 52) / Math.max(N - 1, 1);
  const y = (value) => 10 + (tall - 40) * (1 - (value - low) / (high - low || 1));
  const style = getComputedStyle(document.documentElement);
  context.fillStyle = style.getPropertyValue("--quiet");
  context.strokeStyle = style.getPropertyValue("--line");
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  for (const value of [low, high]) context.fillText(value.toPrecision(3), 36, y(value) + 4);
  context.textAlign = "center";
  for (const at of [0, middle, N - 1]) context.fillText(String(at - middle), x(at), tall - 8);
  context.beginPath();
  context.moveTo(x(middle), 6);
  context.lineTo(x(middle), tall - 26);
  context.stroke();
  lines.forEach((line, h) => {
    context.strokeStyle = HEADS[h % HEADS.length];
    context.lineWidth = 1.8;
    context.beginPath();
    line.forEach((value, at) => context[at ? "lineTo" : "moveTo"](x(at), y(value)));
    context.stroke();
  });
  return canvas;
}
