// Small pieces of DOM. Text goes in as text nodes only: whatever a token holds, it is shown and never read as markup.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list" && name !== "form") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// a short number, with all its digits on hover
export function number(value, digits = 3) {
  const size = Math.abs(value);
  const short = size >= 1e5 || (size > 0 && size < 1e-4) ? value.toExponential(1) : size > 0 && size < 10 ** -digits ? value.toPrecision(1) : value.toFixed(digits);
  return el("data", { value: String(value), title: String(value) }, short);
}

export function plainToken(token) {
  return token.replace(/^[▁Ġ]/, "") || "␣";
}

// numbers equal tokens from 1; a token that occurs once has 0
const counted = new WeakMap();
export function numbering(tokens) {
  if (!counted.has(tokens)) {
    const [all, sofar] = [new Map(), new Map()];
    for (const token of tokens) all.set(token, (all.get(token) || 0) + 1);
    counted.set(tokens, tokens.map((token) => {
      sofar.set(token, (sofar.get(token) || 0) + 1);
      return all.get(token) > 1 ? sofar.get(token) : 0;
    }));
  }
  return counted.get(tokens);
}

// whether the tokens of the current run are pieces of words that mark where a word begins
let pieces = true;
export function inPieces(on) {
  pieces = on;
}

const starts = (token) => /^[▁Ġ]/.test(token);
export const special = (token) => /^<\/?[a-z]+>$/.test(token) || /^\[[A-Za-z]+\]$/.test(token);

// punctuation gets no mark: it follows a word anyway
const isInside = (token) => pieces && !special(token) && !starts(token) && /[\p{L}\p{N}]/u.test(token);

// a token as text; one that continues a word is marked, equal ones are numbered, and a very long one is cut by the style
// and whole on hover
export function tokenNode(token, attributes = {}, nth = 0) {
  const node = el("span", { ...attributes, title: token, dir: "auto" },
    isInside(token) ? el("i", { className: "dot" }, "·") : null, plainToken(token), nth ? el("sub", {}, String(nth)) : null);
  node.className = `token${special(token) ? " special" : ""} ${attributes.className || ""}`.trim();
  return node;
}

// a token in a sentence, numbered if it occurs more than once
export function word(tokens, at) {
  const nth = numbering(tokens)[at];
  return el("b", { dir: "auto" }, isInside(tokens[at]) ? el("i", { className: "dot" }, "·") : null, plainToken(tokens[at]), nth ? el("sub", {}, String(nth)) : null);
}

// a number with its noun: 1 token, 2 tokens
export function count(number_, noun) {
  return `${number_.toLocaleString("en")} ${noun}${number_ === 1 ? "" : "s"}`;
}

export function select(options, value, onchange, label) {
  const node = el("select", { onchange: () => onchange(node.value), "aria-label": label });
  for (const [key, text] of options) node.append(el("option", { value: key, selected: key === value }, text));
  return node;
}

export function slider(value, least, most, step, onchange, label) {
  const shown = el("output", {}, String(value));
  const node = el("input", { type: "range", min: least, max: most, step, "aria-label": label });
  node.value = value;
  node.addEventListener("input", () => { shown.textContent = node.value; });
  node.addEventListener("change", () => onchange(Number(node.value)));
  return el("span", { className: "slider" }, node, shown);
}

export function chips(options, value, onchange, label) {
  const box = el("div", { className: `chips${options.length > 9 ? " many" : ""}`, role: "group", "aria-label": label });
  for (const option of options) {
    const chip = el("button", { type: "button", onclick: () => onchange(option.key), title: option.title || "" }, option.text);
    chip.setAttribute("aria-pressed", String(option.key === value));
    if (option.colour) { chip.style.setProperty("--mark", option.colour); chip.classList.add("marked"); }
    box.append(chip);
  }
  return box;
}

// replaces the nodes of a host; the keyboard focus moves from an old node to the new one of the same name
export function renew(host, ...nodes) {
  const nameOf = (node) => `${node.closest("[aria-label]")?.getAttribute("aria-label")}/${node.tagName}/${node.matches("select, input, textarea") ? "" : node.textContent}`;
  const named = (name) => [...host.querySelectorAll("button, input, select, summary, textarea, [tabindex]")].filter((node) => nameOf(node) === name);
  const focused = host.contains(document.activeElement) ? document.activeElement : null;
  const name = focused && nameOf(focused);
  const at = focused ? named(name).indexOf(focused) : -1;
  host.replaceChildren(...nodes);
  if (focused) named(name)[at]?.focus({ preventScroll: true });
}

export function control(name, node) {
  return el("div", { className: "control" }, el("span", { className: "quiet" }, name), node);
}

// the frame that all views share: the input above, the picture, and beside it a sentence, controls and numbers; on a
// narrow page the controls are folded if the picture matters more (`folds`)
export function layout(host, sentence, formula, folds = true) {
  const input = el("section", { className: "input", "aria-label": "Input" });
  const picture = el("section", { className: "picture", "aria-label": "Picture" });
  const words = el("p", { className: "sentence" }, sentence);
  const controls = el("div", { className: "controls" });
  const narrow = matchMedia("(max-width: 820px)");
  const panel = el("details", { className: "panel", open: !folds || !narrow.matches }, el("summary", {}, "Controls"), controls);
  // on a wide page the summary that would open it is hidden
  narrow.addEventListener("change", () => { panel.open ||= !narrow.matches; });
  const numbers = el("div", { className: "numbers", "aria-live": "polite" });
  const notice = el("p", { className: "notice", role: "status", hidden: true });
  const side = el("aside", { className: "side", "aria-label": "What is seen" }, words, formula ? el("details", { className: "formula" },
    el("summary", {}, "Formula"), el("code", {}, formula)) : null, panel, numbers);
  host.replaceChildren(notice, input, el("div", { className: "split" }, picture, side));
  return { input, picture, side, words, controls, numbers };
}

// a text to type: Enter runs, Shift+Enter breaks the line, examples below
export function textBox(value, examples, onrun, placeholder, label = "Text", optional = false) {
  const box = el("textarea", { rows: 1, placeholder, maxLength: 60000, "aria-label": label, spellcheck: false, dir: "auto" });
  box.className = "text";
  box.value = value;
  const warning = el("div", { role: "alert" });
  const go = (text) => {
    const empty = !optional && text.trim() === "";
    warning.replaceChildren(...(empty ? [problem(new Error("There is nothing to read yet: type some words."))] : []));
    if (!empty) onrun(text);
  };
  const grow = () => { box.style.height = "auto"; box.style.height = `${Math.min(box.scrollHeight + 2, 112)}px`; };
  box.addEventListener("input", grow);
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); go(box.value); }
  });
  requestAnimationFrame(grow);
  const row = el("div", { className: "typed" }, box, el("button", { type: "button", className: "run", onclick: () => go(box.value) }, "Run"));
  const list = el("div", { className: "examples" });
  for (const example of examples) {
    list.append(el("button", { type: "button", className: "example", dir: "auto", title: example, onclick: () => onrun(example) }, example));
  }
  return el("div", {}, row, warning, examples.length ? list : null);
}

export function problem(error) {
  return el("p", { className: "problem", role: "alert" }, error.message || String(error));
}
