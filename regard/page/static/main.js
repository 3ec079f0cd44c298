// The frame around the views: address, runs, keys, status, saving.

import { el, inPieces, problem } from "./ui.js";
import { get, set, note, on, freeze, hash } from "./store.js";
import { ask, exported, isSaved, leave, restore } from "./client.js";
import { png, svg, download } from "./save.js";
import { mount as translate, title as translateTitle } from "./views/translate.js";
import { mount as image, title as imageTitle } from "./views/image.js";
import { mount as heads, title as headsTitle } from "./views/heads.js";
import { mount as steps, title as stepsTitle } from "./views/steps.js";
import { mount as mechanisms, title as mechanismsTitle } from "./views/mechanisms.js";
import { mount as positions, title as positionsTitle } from "./views/positions.js";
import { mount as results, title as resultsTitle } from "./views/results.js";

const VIEWS = {
  translate: [translateTitle, translate],
  image: [imageTitle, image],
  heads: [headsTitle, heads],
  steps: [stepsTitle, steps],
  mechanisms: [mechanismsTitle, mechanisms],
  positions: [positionsTitle, positions],
  results: [resultsTitle, results],
};
const THEMES = ["auto", "light", "dark"];
const byId = (id) => document.getElementById(id);
let about = null;
let current = null;
let name = null;
let slow = null;
let began = null;
let last = "";
let theme = "auto";

const app = {
  state: get,
  set,
  note,
  get about() { return about; },
  // the chosen run: every view shows this one
  run: () => about.runs.find((run) => run.name === get().run) || about.runs[0],
  example: (run = app.run()) => run.examples[1] || run.examples[0] || "the quick brown fox jumps over the lazy dog",
  busy(words, work = null) {
    clearTimeout(slow);
    byId("view").setAttribute("aria-busy", "true");
    byId("status").className = "";
    byId("cancel").hidden = !work;
    byId("cancel").onclick = () => { if (work) work.abort(); app.done("Cancelled."); };
    // quick work does not flicker, longer work tells each step
    began ??= performance.now();
    slow = setTimeout(() => { byId("status").textContent = `${words}…`; }, 250 - (performance.now() - began));
  },
  progress(share, words, stop) {
    const bar = byId("progress");
    // a message that came after the end stays
    if (share >= 1 && bar.hidden) return;
    bar.hidden = share >= 1;
    bar.value = share;
    byId("cancel").hidden = share >= 1;
    byId("cancel").onclick = () => { stop(); app.done("Cancelled."); };
    byId("status").textContent = share < 1 ? `${words}: ${Math.round(100 * share)} %` : last;
  },
  // `about` describes the view if the words are about something else
  done(words, about = words) {
    clearTimeout(slow);
    began = null;
    byId("view").removeAttribute("aria-busy");
    byId("cancel").hidden = true;
    byId("progress").hidden = true;
    byId("status").className = "";
    last = about;
    byId("status").textContent = words;
    byId("link").href = hash() || "#";
  },
  fail(error) {
    // whoever cancelled it knows
    if (error.name === "AbortError") return;
    app.done(error.message);
    byId("status").className = "wrong";
  },
};

// the first view of a task, and what a view needs of a run
const FIRST = { translate: "translate", classify: "results" };
const NEEDS = {
  translate: [(run) => run.task === "translate", "does not translate"],
  image: [(run) => run.reads === "images", "reads no images"],
  heads: [(run) => run.reads === "texts", "reads no texts"],
  steps: [(run) => run.reads === "texts", "reads no texts"],
  results: [(run) => run.labelled > 0, "has no validation texts with labels"],
};

function views(run = app.run()) {
  return Object.keys(VIEWS).filter((view) => !NEEDS[view] || NEEDS[view][0](run));
}

function firstView(run) {
  const known = views(run);
  return known.includes(FIRST[run.task]) ? FIRST[run.task] : known[0];
}

function offer(run) {
  const known = views(run);
  const shown = [...byId("views").children].map((button) => button.dataset.view);
  if (known.join() === shown.join()) return;
  byId("views").replaceChildren(...known.map((key, at) => el("button", { type: "button", "data-view": key, title: `${VIEWS[key][0]} (${at + 1})`, onclick: () => set({ view: key, pin: null, at: null }, true) }, VIEWS[key][0])));
}

function paint() {
  document.documentElement.dataset.theme = theme;
}

async function update() {
  const state = get();
  const run = app.run();
  const known = views(run);
  inPieces(run.pieces);
  const view = known.includes(state.view) ? state.view : firstView(run);
  if (view !== name) {
    if (name) leave();
    name = view;
    current = VIEWS[view][1](byId("view"), app);
    byId("view").dataset.view = view;
    document.title = `Regard · ${VIEWS[view][0]}`;
    byId("heading").textContent = VIEWS[view][0];
  }
  offer(run);
  for (const button of byId("views").children) button.setAttribute("aria-current", button.dataset.view === view ? "page" : "false");
  // on a narrow page the row of views scrolls: the current one is kept in sight
  const tab = byId("views").querySelector('[aria-current="page"]');
  byId("views").scrollLeft = tab.offsetLeft - (byId("views").clientWidth - tab.offsetWidth) / 2;
  byId("run").value = run.name;
  byId("link").href = hash() || "#";
  // says so if a link asked for something that this page cannot show
  const missing = state.run !== undefined && state.run !== run.name ? `There is no run “${state.run}” here: this is “${run.title}”.` : "";
  const refused = VIEWS[state.view] && state.view !== view ? `“${run.title}” ${NEEDS[state.view][1]}, so ${VIEWS[state.view][0]} has nothing to show: this is ${VIEWS[view][0]}.` : "";
  const notice = document.querySelector("#view .notice");
  notice.textContent = [missing, refused].filter(Boolean).join(" ");
  notice.hidden = !notice.textContent;
  await current.update();
}

// the next layer or head; from all heads, to the first or the last
function step(key, by) {
  const { [key]: now, [`${key}s`]: count } = current.place();
  if (count < 2) return;
  const at = typeof now === "number" ? now + by : by > 0 ? 0 : count - 1;
  set({ [key]: String(Math.min(Math.max(at, 0), count - 1)) });
}

function keys(event) {
  const typing = /^(input|textarea|select)$/i.test(event.target.tagName);
  if (event.key === "Escape") {
    if (!byId("cancel").hidden) byId("cancel").click();
    else if (typing) event.target.blur();
    else set({ pin: null, word: null });
    return;
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const list = views();
  if (/^[1-9]$/.test(event.key) && list[event.key - 1]) set({ view: list[event.key - 1], pin: null, at: null }, true);
  else if (event.key === "j") step("layer", 1);
  else if (event.key === "k") step("layer", -1);
  else if (event.key === "l") step("head", 1);
  else if (event.key === "h") step("head", -1);
  // in an image a patch has neighbours on all sides
  else if (/^Arrow/.test(event.key) && current.steer && !event.target.closest("dialog")) { event.preventDefault(); current.steer(event.key); }
  // wherever the focus is, except in elements that scroll by themselves
  else if (/^Arrow(Up|Down)$/.test(event.key) && !event.defaultPrevented && !event.target.closest(".tree, dialog")) { event.preventDefault(); current.move(event.key === "ArrowDown" ? 1 : -1); }
  else if (event.key === "/") { event.preventDefault(); const box = document.querySelector("textarea"); if (box) box.select(); else document.querySelector(".choose")?.focus(); }
  else if (event.key === "s") byId("png").click();
  else if (event.key === "?") byId("help").click();
}

// a saved picture says what it shows
const caption = () => ({ title: `${VIEWS[name][0]} · ${app.run().title}`, about: last, says: document.querySelector("#view .sentence").textContent });

async function save(make, ending) {
  app.busy("Saving");
  try {
    download(await make(), `regard-${name}.${ending}`);
    app.done(`Saved regard-${name}.${ending}`, last);
  } catch (error) { app.fail(error); }
}

export async function start() {
  const kept = byId("kept");
  if (kept) {
    const state = JSON.parse(kept.content.textContent);
    restore(state.kept);
    freeze(state.hash);
    theme = state.theme;
    byId("html").hidden = true;
    byId("link").hidden = true;
  }
  theme = THEMES.includes(get().theme) ? get().theme : theme;
  paint();
  app.busy("Opening the models");
  try {
    about = (await ask("about")).meta;
  } catch (error) {
    byId("view").replaceChildren(problem(error));
    app.fail(error);
    return;
  }
  for (const run of about.runs) byId("run").append(el("option", { value: run.name }, run.title));
  byId("run").addEventListener("change", () => {
    const run = about.runs.find((one) => one.name === byId("run").value);
    // the first view of this run if it does not have the current one
    const view = views(run).includes(name) ? get().view : null;
    set({ run: run.name, view, text: null, target: null, image: null, word: null, layer: null, head: null, pin: null, at: null, place: null, role: null, scheme: null }, true);
  });
  byId("theme").addEventListener("click", () => { theme = THEMES[(THEMES.indexOf(theme) + 1) % 3]; set({ theme: theme === "auto" ? null : theme }); paint(); current.repaint(); app.done(`Theme: ${theme}`, last); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => current.repaint());
  byId("help").addEventListener("click", () => byId("keys").showModal());
  byId("png").addEventListener("click", () => save(() => png(current.picture(), caption()), "png"));
  byId("svg").addEventListener("click", () => save(() => svg(current.picture(), caption()), "svg"));
  byId("html").addEventListener("click", () => save(() => exported(document.title, hash(), theme), "html"));
  byId("link").addEventListener("click", (event) => {
    event.preventDefault();
    if (navigator.clipboard) navigator.clipboard.writeText(location.href).then(() => app.done("The link is in the clipboard.", last), () => app.done(location.href, last));
  });
  document.addEventListener("keydown", keys);
  on(update);
  // for tests and measurements
  window.regard = { get view() { return current; }, get saved() { return isSaved(); } };
  await update();
}
