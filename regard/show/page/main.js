// The frame around the views: address, runs, keys, status, saving.

import { el, problem } from "./ui.js";
import { get, set, note, on, freeze, hash } from "./store.js";
import { ask, exported, isSaved, leave, restore } from "./client.js";
import { png, svg, download } from "./save.js";
import { mount as translate, title as translateTitle } from "./views/translate.js";
import { mount as heads, title as headsTitle } from "./views/heads.js";
import { mount as steps, title as stepsTitle } from "./views/steps.js";
import { mount as mechanisms, title as mechanismsTitle } from "./views/mechanisms.js";
import { mount as positions, title as positionsTitle } from "./views/positions.js";
import { mount as results, title as resultsTitle } from "./views/results.js";

const VIEWS = {
  translate: [translateTitle, translate],
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
  run(task) {
    const runs = task ? about.runs.filter((run) => run.task === task) : about.runs;
    return runs.find((run) => run.name === get().run) || runs[0];
  },
  example: (run = app.run()) => run.examples[1] || run.examples[0] || "the quick brown fox jumps over the lazy dog",
  busy(words, work = null) {
    clearTimeout(slow);
    byId("view").setAttribute("aria-busy", "true");
    byId("status").className = "";
    byId("cancel").hidden = !work;
    byId("cancel").onclick = () => { if (work) work.abort(); app.done("Cancelled."); };
    // what is quick need not flicker; what takes longer tells each step
    began ??= performance.now();
    slow = setTimeout(() => { byId("status").textContent = `${words}…`; }, 250 - (performance.now() - began));
  },
  progress(share, words, stop) {
    const bar = byId("progress");
    // what was said since it was done stays
    if (share >= 1 && bar.hidden) return;
    bar.hidden = share >= 1;
    bar.value = share;
    byId("cancel").hidden = share >= 1;
    byId("cancel").onclick = () => { stop(); app.done("Cancelled."); };
    byId("status").textContent = share < 1 ? `${words}: ${Math.round(100 * share)} %` : last;
  },
  done(words) {
    clearTimeout(slow);
    began = null;
    byId("view").removeAttribute("aria-busy");
    byId("cancel").hidden = true;
    byId("progress").hidden = true;
    byId("status").className = "";
    last = words;
    byId("status").textContent = words;
    byId("link").href = hash() || "#";
  },
  fail(error) {
    // who gave it up knows
    if (error.name === "AbortError") return;
    app.done(error.message);
    byId("status").className = "wrong";
  },
};

function views() {
  const needs = { translate: "translate", results: "classify" };
  const shown = Object.entries(VIEWS).filter(([key]) => !needs[key] || about.runs.some((run) => run.task === needs[key]));
  return Object.fromEntries(shown);
}

function paint() {
  document.documentElement.dataset.theme = theme;
}

async function update() {
  const state = get();
  const known = views();
  const view = known[state.view] ? state.view : Object.keys(known)[0];
  if (view !== name) {
    if (name) leave();
    name = view;
    current = known[view][1](byId("view"), app);
    byId("view").dataset.view = view;
    document.title = `Regard · ${known[view][0]}`;
  }
  for (const button of byId("views").children) button.setAttribute("aria-current", button.dataset.view === view ? "page" : "false");
  byId("run").value = app.run().name;
  byId("link").href = hash() || "#";
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
    else set({ pin: null });
    return;
  }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const list = Object.keys(views());
  if (/^[1-9]$/.test(event.key) && list[event.key - 1]) set({ view: list[event.key - 1], pin: null, at: null }, true);
  else if (event.key === "j") step("layer", 1);
  else if (event.key === "k") step("layer", -1);
  else if (event.key === "l") step("head", 1);
  else if (event.key === "h") step("head", -1);
  else if (event.key === "ArrowDown" && !event.defaultPrevented && event.target === document.body) { event.preventDefault(); current.move(1); }
  else if (event.key === "ArrowUp" && !event.defaultPrevented && event.target === document.body) { event.preventDefault(); current.move(-1); }
  else if (event.key === "/") { event.preventDefault(); const box = document.querySelector("textarea"); if (box) box.select(); }
  else if (event.key === "s") byId("png").click();
  else if (event.key === "?") byId("help").click();
}

async function save(make, ending) {
  app.busy("Saving");
  try {
    download(await make(), `regard-${name}.${ending}`);
    app.done(`Saved regard-${name}.${ending}`);
  } catch (error) { app.fail(error); }
}

export async function start() {
  const kept = byId("kept");
  if (kept) {
    const raw = Uint8Array.from(atob(kept.content.textContent.trim()), (letter) => letter.charCodeAt(0));
    const state = JSON.parse(new TextDecoder().decode(raw));
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
  byId("run").addEventListener("change", () => set({ run: byId("run").value, text: null, target: null, layer: null, head: null, pin: null, at: null, place: null }, true));
  Object.entries(views()).forEach(([key, [title]], at) => {
    byId("views").append(el("button", { type: "button", "data-view": key, title: `${title} (${at + 1})`, onclick: () => set({ view: key, pin: null, at: null }, true) }, title));
  });
  byId("theme").addEventListener("click", () => { theme = THEMES[(THEMES.indexOf(theme) + 1) % 3]; set({ theme: theme === "auto" ? null : theme }); paint(); dispatchEvent(new Event("resize")); app.done(`Theme: ${theme}`); });
  byId("help").addEventListener("click", () => byId("keys").showModal());
  byId("png").addEventListener("click", () => save(() => png(current.picture()), "png"));
  byId("svg").addEventListener("click", () => save(() => svg(current.picture()), "svg"));
  byId("html").addEventListener("click", () => save(() => exported(document.title, hash(), theme), "html"));
  byId("link").addEventListener("click", (event) => {
    event.preventDefault();
    if (navigator.clipboard) navigator.clipboard.writeText(location.href).then(() => app.done("The link is in the clipboard."), () => app.done(location.href));
  });
  document.addEventListener("keydown", keys);
  on(update);
  // for those who measure: the view that is seen
  window.regard = { get view() { return current; }, get saved() { return isSaved(); } };
  await update();
}
