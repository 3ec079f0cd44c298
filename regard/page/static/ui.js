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

// a number to read, with all its digits for whoever asks
export function number(value, digits = 3) {
  const size = Math.abs(value);
  const short = size >= 1e5 || (size > 0 && size < 1e-4) ? value.toExponential(1) : size > 0 && size < 10 ** -digits ? value.toPrecision(1) : value.toFixed(digits);
  return el("data", { value: String(value), title: String(value) }, short);
}

export function plainToken(token) {
  return token.replace(/^[▁Ġ]/, "") || "␣";
}

// how often each token was there before, from 1; 0 where it is there once only
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

// whether tokens are pieces of words, so that one that goes on inside a word can be told: said of the run that is seen
let pieces = true;
export function inPieces(on) {
  pieces = on;
}

const starts = (token) => /^[▁Ġ]/.test(token);
export const special = (token) => /^<\/?[a-z]+>$/.test(token) || /^\[[A-Za-z]+\]$/.test(token);

// of signs, which stand close to a word anyway, a mark would only be one sign more
const isInside = (token) => pieces && !special(token) && !starts(token) && /[\p{L}\p{N}]/u.test(token);

// a token as text; what goes on inside a word is marked, one of several that are alike is numbered, and a very long one is
// cut by the style, whole on hover
export function tokenNode(token, attributes = {}, nth = 0) {
  const node = el("span", { ...attributes, title: token, dir: "auto" },
    isInside(token) ? el("i", { className: "dot" }, "·") : null, plainToken(token), nth ? el("sub", {}, String(nth)) : null);
  node.className = `token${special(token) ? " special" : ""} ${attributes.className || ""}`.trim();
  return node;
}

// one of several tokens in a sentence: no other can be meant
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

// new nodes in the place of old ones: whoever works one of them by keyboard goes on with the one that follows it
export function renew(host, ...nodes) {
  const name = (node) => `${node.closest("[aria-label]")?.getAttribute("aria-label")}/${node.tagName}/${node.matches("select, input, textarea") ? "" : node.textContent}`;
  const alike = (wanted) => [...host.querySelectorAll("button, input, select, summary, textarea, [tabindex]")].filter((node) => name(node) === wanted);
  const old = host.contains(document.activeElement) ? document.activeElement : null;
  const wanted = old && name(old);
  const at = old ? alike(wanted).indexOf(old) : -1;
  host.replaceChildren(...nodes);
  if (old) alike(wanted)[at]?.focus({ preventScroll: true });
}

export function control(name, node) {
  return el("div", { className: "control" }, el("span", { className: "quiet" }, name), node);
}

// the frame all views share: input above, the picture, and beside it what is seen, controls and numbers; on a narrow page
// the controls are folded where the picture matters more (`folds`)
export function layout(host, sentence, formula, folds = true) {
  const input = el("section", { className: "input", "aria-label": "Input" });
  const picture = el("section", { className: "picture", "aria-label": "Picture" });
  const words = el("p", { className: "sentence" }, sentence);
  const controls = el("div", { className: "controls" });
  const narrow = matchMedia("(max-width: 820px)");
  const panel = el("details", { className: "panel", open: !folds || !narrow.matches }, el("summary", {}, "Controls"), controls);
  // on a wide page there is nothing to open it by
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
