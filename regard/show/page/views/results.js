// Results: the answers of a classifier on the texts it validates on; a threshold that moves precision and recall.

import { el, control, layout, number, problem, renew, select } from "../ui.js";
import { css, fit } from "../colour.js";
import { ask, forget } from "../client.js";

export const title = "Precision and recall";

const AT_ONCE = 100; // texts that are asked about in one question

export function mount(host, app) {
  const parts = layout(host, "Answer a class only where its probability reaches the threshold: a higher one takes fewer texts and errs less, a lower one misses fewer.",
    "precision = right / taken,  recall = right / all of the class");
  let asked = null;
  let data = null;
  const slide = el("input", { type: "range", min: 0, max: 1, step: 0.01, "aria-label": "threshold" });
  const shown = el("output", {});
  slide.addEventListener("input", () => app.set({ threshold: slide.value }));

  const options = () => {
    const state = app.state();
    const run = app.run("classify");
    const label = data && data.labels.includes(state.label) ? state.label : data ? data.labels[data.labels.length - 1] : null;
    const threshold = Number(state.threshold ?? 0.5);
    return { run, label, threshold: Number.isNaN(threshold) ? 0.5 : Math.min(Math.max(threshold, 0), 1) };
  };

  // the answer to a text: the class asked for from the threshold on, else the best of the others
  function answer(row, index, threshold) {
    if (row[index] >= threshold) return index;
    let best = -1;
    for (let c = 0; c < row.length; c += 1) if (c !== index && (best < 0 || row[c] > row[best])) best = c;
    return best;
  }

  function draw() {
    const { run, label, threshold } = options();
    const C = data.labels.length;
    const index = data.labels.indexOf(label);
    const rows = Array.from({ length: data.truth.length }, (_, at) => data.probabilities.slice(at * C, (at + 1) * C));
    const usual = rows.map((row) => row.reduce((best, value, c) => (value > row[best] ? c : best), 0));
    const now = rows.map((row) => answer(row, index, threshold));
    const confusion = Array.from({ length: C }, () => new Array(C).fill(0));
    now.forEach((one, at) => { confusion[data.truth[at]][one] += 1; });
    const taken = now.filter((one) => one === index).length;
    const right = confusion[index][index];
    const all = confusion[index].reduce((sum, count) => sum + count, 0);
    const precision = taken ? right / taken : 0;
    const recall = all ? right / all : 0;
    const top = Math.max(...confusion.flat(), 1);
    const head = el("tr", {}, el("th", {}, "is ↓ answered →"), ...data.labels.map((one) => el("th", { dir: "auto" }, one)));
    const table = el("table", { className: "confusion" }, el("thead", {}, head), el("tbody", {}, ...confusion.map((line, truth) => el("tr", {}, el("th", { dir: "auto" }, data.labels[truth]), ...line.map((count, one) => {
      const cell = el("td", { "data-truth": truth, "data-answer": one }, String(count));
      const share = Math.sqrt(count / top);
      cell.style.background = css(share);
      cell.style.color = share > 0.6 ? "#111" : "#fff";
      return cell;
    })))));
    const moved = now.map((one, at) => [at, one]).filter(([at, one]) => one !== usual[at]).sort((a, b) => Math.abs(rows[a[0]][index] - 0.5) - Math.abs(rows[b[0]][index] - 0.5));
    const list = el("ul", { className: "sides" }, ...moved.slice(0, 20).map(([at, one]) => el("li", { "data-at": at }, el("p", { dir: "auto" }, data.texts[at]),
      el("small", { className: "quiet" }, "is ", el("b", { dir: "auto" }, data.labels[data.truth[at]]), `; answered ${data.labels[one]} instead of ${data.labels[usual[at]]}; probability of ${label} `, number(rows[at][index], 3)))));
    parts.picture.replaceChildren(
      el("div", { className: "view-two" }, el("figure", {}, el("h3", {}, "What is answered"), table), el("figure", {}, el("h3", {}, "Precision over recall"), curve(rows, index, threshold), el("figcaption", {}, `Each point is a threshold; the ring is ${threshold.toFixed(2)}.`))),
      el("h3", {}, `${moved.length} of ${data.truth.length} texts change sides`),
      el("p", { className: "quiet" }, moved.length ? "They are answered otherwise than by the most probable class; the nearest to the border first." : "All get their most probable class. Move the threshold to see which do not."), list);
    parts.numbers.replaceChildren(
      el("p", { className: "reading precision" }, "Of the ", String(taken), " texts taken, ", number(precision, 4), " are right: precision."),
      el("p", { className: "reading recall" }, "Of the ", String(all), " that belong to it, ", number(recall, 4), " are found: recall."),
      el("p", { className: "quiet accuracy" }, "Without a threshold: accuracy ", number(usual.filter((one, at) => one === data.truth[at]).length / usual.length, 4), "."));
    slide.value = threshold;
    shown.textContent = threshold.toFixed(2);
    const classes = parts.controls.querySelector("select");
    if (classes) classes.value = label;
    app.done(`${data.truth.length} texts · ${run.title} · threshold ${threshold.toFixed(2)}`);
  }

  function curve(rows, index, threshold) {
    const canvas = el("canvas", { role: "img", "aria-label": "precision over recall" });
    const size = 280;
    const context = fit(canvas, size, size);
    const order = rows.map((row, at) => [row[index], data.truth[at] === index]).sort((a, b) => b[0] - a[0]);
    const all = order.filter(([, own]) => own).length || 1;
    const style = getComputedStyle(document.documentElement);
    const x = (recall) => 34 + recall * (size - 46);
    const y = (precision) => 10 + (1 - precision) * (size - 46);
    context.strokeStyle = style.getPropertyValue("--line");
    context.strokeRect(x(0), y(1), x(1) - x(0), y(0) - y(1));
    context.fillStyle = style.getPropertyValue("--quiet");
    context.font = "11px system-ui, sans-serif";
    context.fillText("recall", x(0.42), size - 8);
    context.save();
    context.translate(14, y(0.38));
    context.rotate(-Math.PI / 2);
    context.fillText("precision", 0, 0);
    context.restore();
    context.fillText("1", 20, y(1) + 4);
    context.fillText("0", 20, y(0) + 4);
    context.strokeStyle = style.getPropertyValue("--accent");
    context.lineWidth = 2;
    context.beginPath();
    let right = 0;
    let ring = null;
    order.forEach(([score, own], at) => {
      right += own ? 1 : 0;
      // equal scores are taken together
      if (at + 1 < order.length && order[at + 1][0] === score) return;
      const place = [x(right / all), y(right / (at + 1))];
      context.lineTo(...place);
      if (score >= threshold) ring = place;
    });
    context.stroke();
    if (ring) { context.beginPath(); context.arc(...ring, 6, 0, 7); context.strokeStyle = "#E69F00"; context.lineWidth = 3; context.stroke(); }
    return canvas;
  }

  async function update() {
    const { run } = options();
    if (asked === run.name && data) { draw(); return; }
    asked = run.name;
    data = null;
    const work = new AbortController();
    forget();
    app.busy("Asking the classifier about its texts", work);
    try {
      const found = { labels: [], texts: [], truth: [], probabilities: [] };
      for (let total = 1; found.texts.length < total;) {
        const { meta, arrays } = await ask("results", { run: run.name, first: found.texts.length, count: AT_ONCE }, work.signal);
        if (asked !== run.name) return;
        total = meta.total;
        found.labels = meta.labels;
        found.texts.push(...meta.texts);
        found.truth.push(...arrays.truth.values);
        found.probabilities.push(...arrays.probabilities.values);
        app.progress(found.texts.length / total, "Asking the classifier about its texts", () => work.abort());
        work.signal.throwIfAborted();
      }
      data = found;
      const { label } = options();
      renew(parts.controls,
        control("class", select(data.labels.map((one) => [one, one]), label, (value) => app.set({ label: value }, true), "class")),
        control("threshold", el("span", { className: "slider" }, slide, shown)));
      draw();
    } catch (error) {
      if (asked !== run.name) return;
      asked = null;
      if (error.name === "AbortError") return;
      app.fail(error);
      parts.picture.replaceChildren(problem(error));
    }
  }

  return { update, place: () => ({ layer: 0, layers: 1, head: 0, heads: 1 }), move: () => {}, picture: () => parts.picture };
}
