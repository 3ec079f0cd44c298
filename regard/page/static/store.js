// The state of the page is its address: a reload or a shared link shows the same view.

let listeners = [];
let frozen = null;
let told = location.hash;

export function get() {
  const hash = frozen === null ? location.hash : frozen;
  return Object.fromEntries(new URLSearchParams(hash.replace(/^#/, "")));
}

// a change to null removes its key; `push` adds a step to the history
export function set(changes, push = false) {
  const state = { ...get(), ...changes };
  for (const key of Object.keys(state)) if (state[key] === null || state[key] === "") delete state[key];
  const hash = `#${new URLSearchParams(state)}`;
  if (frozen !== null) frozen = hash;
  else if (hash !== location.hash) history[push ? "pushState" : "replaceState"](null, "", hash);
  told = location.hash;
  for (const listener of listeners) listener(get(), changes);
}

// the same without telling the listeners, for what is shown already
export function note(changes) {
  const told = listeners;
  listeners = [];
  set(changes);
  listeners = told;
}

// an integer from the address, within bounds; the default if it is none, as in a link that was typed
export function whole(text, usual, least, most) {
  const number = text === undefined ? NaN : Math.round(Number(text));
  return Number.isNaN(number) ? usual : Math.min(Math.max(number, least), most);
}

export function on(listener) {
  listeners.push(listener);
}

// a saved file may be in a frame without an address of its own
export function freeze(hash) {
  frozen = hash;
}

export function hash() {
  return frozen === null ? location.hash : frozen;
}

// Back, Forward and a pasted link: a browser fires two events for one such move, in either order
function moved() {
  if (frozen !== null || location.hash === told) return;
  told = location.hash;
  for (const listener of listeners) listener(get(), null);
}
addEventListener("popstate", moved);
addEventListener("hashchange", moved);
