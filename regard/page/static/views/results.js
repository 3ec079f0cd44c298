// Results: the answers of a classifier on its validation texts; a threshold that moves precision and recall.

import { count, el, control, layout, number, problem, renew, select } from "../ui.js";
import { chart, style } from "../chart.js";
import { ask, forget } from "../client.js";

export const title = "Precision and recall";

const AT_ONCE = 100; // texts per question

export function mount(host, app) {
  const parts = layout(host, "A class is predicted only if its probability reaches the threshold. A higher threshold predicts it less often and with fewer errors, a lower one misses fewer texts.",
    "precision = right / predicted,  recall = right / all of the class", false);
  let asked = null;
  let data = null;
  let work = null;
  const slide = el("input", { type: "range", min: 0, max: 1, step: 0.01, "aria-label": "threshold" });
  const shown = el("output", {});
  slide.addEventListener("input", () => app.set({ threshold: slide.value }));

  const options = () => {
    const state = app.state();
    const run = app.run();
    const label = data && data.labels.includes(state.label) ? state.label : data ? data.labels[data.labels.length - 1] : null;
    const threshold = Number(state.threshold ?? 0.5);
    return { run, label, threshold: Number.isNaN(threshold) ? 0.5 : Math.min(Math.max(threshold, 0), 1) };
  };

  // the answer to a text: the chosen class from the threshold on, else the best of the others
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
    const head = el("tr", {}, el("th", { scope: "col" }, "true ↓ predicted →"), ...data.labels.map((one) => el("th", { dir: "auto", scope: "col" }, one)));
    const table = el("table", { className: "confusion" }, el("thead", {}, head), el("tbody", {}, ...confusion.map((line, truth) => el("tr", {}, el("th", { dir: "auto", scope: "row" }, data.labels[truth]), ...line.map((count_, one) => {
      // right answers in one colour, wrong ones in another, stronger with the count; the text keeps its colour
      const cell = el("td", { "data-truth": truth, "data-answer": one, className: truth === one ? "right" : "wrong" }, String(count_), el("small", { className: "of" }, ` ${Math.round(100 * count_ / Math.max(line.reduce((sum, each) => sum + each, 0), 1))} %`));
      cell.style.setProperty("--share", `${Math.round(46 * Math.sqrt(count_ / top))}%`);
      return cell;
    })))));
    const moved = now.map((one, at) => [at, one]).filter(([at, one]) => one !== usual[at]).sort((a, b) => Math.abs(rows[a[0]][index] - 0.5) - Math.abs(rows[b[0]][index] - 0.5));
    const list = el("ul", { className: "sides" }, ...moved.slice(0, 20).map(([at, one]) => el("li", { "data-at": at }, el("p", { dir: "auto" }, data.texts[at]),
      el("small", { className: "quiet" }, "is ", el("b", { dir: "auto" }, data.labels[data.truth[at]]), `; predicted ${data.labels[one]} instead of ${data.labels[usual[at]]}; probability of ${label} `, number(rows[at][index], 3)))));
    parts.picture.replaceChildren(
      el("div", { className: "view-two" }, el("figure", {}, el("h2", {}, "Confusion matrix"), table), el("figure", {}, el("h2", {}, "Precision over recall"), curve(rows, index, threshold), el("figcaption", {}, `Each point is a threshold; the ring is ${threshold.toFixed(2)}.`))),
      el("h2", {}, `${moved.length} of ${count(data.truth.length, "text")} ${moved.length === 1 ? "changes" : "change"} sides`),
      el("p", { className: "quiet" }, moved.length ? "Their prediction is not the most probable class; those nearest to the border come first." : "All get their most probable class. Move the threshold to change that."), list);
    parts.numbers.replaceChildren(
      el("p", { className: "reading precision" }, "Of the ", count(taken, "text"), " predicted as this class, ", number(precision, 4), " are right: precision."),
      el("p", { className: "reading recall" }, "Of the ", String(all), " that belong to it, ", number(recall, 4), " are found: recall."),
      el("p", { className: "quiet accuracy" }, "Without a threshold: accuracy ", number(usual.filter((one, at) => one === data.truth[at]).length / usual.length, 4), "."));
    slide.value = threshold;
    shown.textContent = threshold.toFixed(2);
    const classes = parts.controls.querySelector("select");
    if (classes) classes.value = label;
    app.done(`${count(data.truth.length, "text")} · ${run.title} · threshold ${threshold.toFixed(2)}`);
  }

  function curve(rows, index, threshold) {
    const order = rows.map((row, at) => [row[index], data.truth[at] === index]).sort((a, b) => b[0] - a[0]);
    const all = order.filter(([, own]) => own).length || 1;
    const points = [];
    let right = 0;
    let ring = null;
    order.forEach(([score, own], at) => {
      right += own ? 1 : 0;
      // texts of equal score are taken together
      if (at + 1 < order.length && order[at + 1][0] === score) return;
      points.push([right / all, right / (at + 1)]);
      if (score >= threshold) ring = points[points.length - 1];
    });
    // begins where nothing is taken, with the precision of the surest text
    const line = [[0, points[0][1]], ...points];
    return chart({ lines: [line], colours: [style("--accent")], width: 380, height: 320, x: "recall", y: "precision", bounds: [0, 1], ticks: [0, 0.5, 1], ring, label: `precision over recall of ${data.labels[index]}` });
  }

  async function update() {
    const { run } = options();
    if (asked === run.name && data) { draw(); return; }
    asked = run.name;
    data = null;
    const mine = work = new AbortController();
    forget();
    app.busy("Asking the classifier about its texts", work);
    try {
      const answers = { labels: [], texts: [], truth: [], probabilities: [] };
      for (let total = 1; answers.texts.length < total;) {
        const { meta, arrays } = await ask("results", { run: run.name, first: answers.texts.length, count: AT_ONCE }, mine.signal);
        if (work !== mine) return;
        total = meta.total;
        answers.labels = meta.labels;
        answers.texts.push(...meta.texts);
        answers.truth.push(...arrays.truth.values);
        answers.probabilities.push(...arrays.probabilities.values);
        app.progress(answers.texts.length / total, "Asking the classifier about its texts", () => mine.abort());
        mine.signal.throwIfAborted();
      }
      data = answers;
      const { label } = options();
      renew(parts.controls,
        control("class", select(data.labels.map((one) => [one, one]), label, (value) => app.set({ label: value }, true), "class")),
        control("threshold", el("span", { className: "slider" }, slide, shown)));
      draw();
    } catch (error) {
      if (work !== mine) return;
      asked = null;
      if (error.name === "AbortError") return;
      app.fail(error);
      parts.picture.replaceChildren(problem(error));
    }
  }

  return { update, place: () => ({ layer: 0, layers: 1, head: 0, heads: 1 }), move: () => {}, picture: () => parts.picture, repaint: () => { if (data) draw(); } };
}
