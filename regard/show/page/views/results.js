// Results: the answers of a classifier on the texts it validates on; a threshold that moves precision and recall.

import { el, control, layout, number, problem, select } from "../ui.js";
import { css, fit } from "../colour.js";
import { ask } from "../client.js";

export const title = "Precision and recall";

export function mount(host, app) {
  const parts = layout(host, "Answer a class only where its probability reaches the threshold: a higher one takes fewer texts and errs less, a lower one misses fewer.",
    "precision = right / taken,  recall = right / all of the class");
  let asked = null;
  let data = null;

  const options = () => {
    const state = app.state();
    const run = app.run("classify");
    const label = data && data.labels.includes(state.label) ? state.label : data ? data.labels[data.labels.length - 1] : null;
    return { run, label, threshold: Math.min(Math.max(Number(state.threshold || 0.5), 0), 1) };
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
    const rows = Array.from({ length: data.truth.length }, (_, at) => data.probabilities.subarray(at * C, (at + 1) * C));
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
      el("h3", {}, `${moved.length} of ${data.truth.length} texts change sides`), list);
    parts.numbers.replaceChildren(
      el("p", { className: "reading precision" }, "Of the ", String(taken), " texts taken, ", number(precision, 4), " are right: precision."),
      el("p", { className: "reading recall" }, "Of the ", String(all), " that belong to it, ", number(recall, 4), " are found: recall."),
      el("p", { className: "quiet accuracy" }, "Without a threshold: accuracy ", number(data.accuracy, 4), "."));
    const slide = el("input", { type: "range", min: 0, max: 1, step: 0.01, "aria-label": "threshold" });
    slide.value = threshold;
    const shown = el("output", {}, threshold.toFixed(2));
    slide.addEventListener("input", () => { shown.textContent = Number(slide.value).toFixed(2); app.set({ threshold: slide.value }); });
    if (!parts.controls.contains(document.activeElement)) {
      parts.controls.replaceChildren(
        control("class", select(data.labels.map((one) => [one, one]), label, (value) => app.set({ label: value }, true), "class")),
        control("threshold", el("span", { className: "slider" }, slide, shown)));
    }
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
    app.busy("Asking the classifier about all its texts");
    try {
      const { meta, arrays } = await ask("results", { run: run.name });
      if (asked !== run.name) return;
      data = { ...meta, truth: arrays.truth.values, probabilities: arrays.probabilities.values };
      draw();
    } catch (error) {
      asked = null;
      app.fail(error);
      parts.picture.replaceChildren(problem(error));
    }
  }

  return { update, layers: () => 1, heads: () => 1, move: () => {}, picture: () => parts.picture };
}
