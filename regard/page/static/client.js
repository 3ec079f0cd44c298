// The client of the server, or of the replies that a saved file holds.

const TYPES = { float32: Float32Array, int32: Int32Array, uint8: Uint8Array, int8: Int8Array };
const answers = new Map();
let kept = null;
let asked = new Map();
let view = new AbortController();

const key = (name, values) => name + JSON.stringify(Object.keys(values).sort().map((field) => [field, values[field]]));

const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

// numbers of 32 bits whose first bytes stand before all second ones
function joined(planes, Type) {
  const [count, whole] = [planes.length / 4, new Uint8Array(planes.length)];
  for (let plane = 0; plane < 4; plane += 1) for (let at = 0; at < count; at += 1) whole[4 * at + plane] = planes[plane * count + at];
  return new Type(whole.buffer);
}

// `byPlanes`: a reply of a saved file, see wire.py
export function decode(buffer, byPlanes = false) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const arrays = {};
  let at = 4 + length;
  for (const { name, dtype, shape } of header.arrays) {
    const count = shape.reduce((product, size) => product * size, 1);
    const Type = TYPES[dtype];
    const array = byPlanes && Type.BYTES_PER_ELEMENT === 4 ? joined(new Uint8Array(buffer, at, 4 * count), Type) : new Type(buffer, at, count);
    arrays[name] = { values: array, shape };
    at += Math.ceil(array.byteLength / 8) * 8;
  }
  return { meta: header.meta, arrays };
}

// what a saved file holds in base64: deflated
async function inflate(text) {
  const stream = new Blob([bytes(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

export function restore(questions) {
  kept = new Map(questions.map(({ name, values, reply }) => [key(name, values), reply]));
}

export const isSaved = () => kept !== null;

const MISSING = "This saved file does not hold that part. Open the page with 'regard show' to see it.";

function clean(values) {
  return Object.fromEntries(Object.entries(values).filter(([, value]) => value !== null && value !== undefined));
}

async function fail(response) {
  let words = `The server answered ${response.status}.`;
  try { words = (await response.json()).error || words; } catch { /* not JSON of ours: the status must suffice */ }
  throw new Error(words);
}

async function post(name, values, signal) {
  let response;
  try {
    response = await fetch(`/api/${name}`, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(values), signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is 'regard show' still running in its terminal?");
  }
  if (response.status === 503) {
    await new Promise((resolve) => setTimeout(resolve, 500));
    return post(name, values, signal);
  }
  if (!response.ok) await fail(response);
  return response;
}

// a signal that aborts when the view is left, or when `signal` does
function orLeaving(signal, onabort = () => {}) {
  const request = new AbortController();
  const abort = () => { request.abort(); onabort(); };
  for (const one of [signal, view.signal]) if (one) one.addEventListener("abort", abort, { once: true });
  return request.signal;
}

// the view changes: nobody waits for the questions of the old one any more
export function leave() {
  view.abort();
  view = new AbortController();
}

// {meta, arrays} of a question; equal questions are sent once
export async function ask(name, values = {}, signal) {
  values = clean(values);
  const id = key(name, values);
  asked.delete(id);
  asked.set(id, { name, values });
  if (kept !== null) {
    if (!kept.has(id)) throw new Error(MISSING);
    if (!answers.has(id)) answers.set(id, inflate(kept.get(id)).then((raw) => decode(raw, true)));
    return answers.get(id);
  }
  if (!answers.has(id)) {
    if (answers.size > 400) answers.delete(answers.keys().next().value);
    // an aborted question is forgotten at once: it may be asked again before its promise is rejected
    const drop = () => { if (answers.get(id) === reply) answers.delete(id); };
    const reply = post(name, values, orLeaving(signal, drop)).then((response) => response.arrayBuffer()).then(decode);
    answers.set(id, reply);
    reply.catch(drop);
  }
  return answers.get(id);
}

// the bytes of an image file that the server takes
const MOST_UPLOADED = 8 << 20;

// gives the server an image file; the reply names it
export async function upload(file) {
  if (file.size > MOST_UPLOADED) throw new Error(`${file.name} has ${(file.size / 2 ** 20).toFixed(1)} MiB, at most ${MOST_UPLOADED >> 20} are taken: scale it down first.`);
  if (file.size === 0) throw new Error(`${file.name} is empty: choose an image.`);
  const data = await new Promise((done, fail_) => {
    const reader = Object.assign(new FileReader(), { onload: () => done(reader.result), onerror: () => fail_(new Error(`${file.name} cannot be read.`)) });
    reader.readAsDataURL(file);
  });
  return decode(await (await post("upload", { data: data.slice(data.indexOf(",") + 1) }, view.signal)).arrayBuffer());
}

// calls `onrecord` with each step of a translation as it comes; the last record has `hypotheses`
export async function stream(values, onrecord, signal) {
  asked.set(key("translate", values), { name: "translate", values });
  if (kept !== null) {
    const id = key("translate", values);
    if (!kept.has(id)) throw new Error(MISSING);
    for (const record of JSON.parse(new TextDecoder().decode(await inflate(kept.get(id))))) onrecord(record);
    return;
  }
  const reader = (await post("translate", values, orLeaving(signal))).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const record = JSON.parse(line);
      if (record.error) throw new Error(record.error);
      onrecord(record);
    }
  }
}

// a new picture begins: the questions of the last one do not belong to it
export function forget() {
  asked = new Map();
}

// the order in which a saved file takes questions: texts, the whole picture, then what was zoomed into or pointed at
const rank = ({ name, values }) => ({ tile: 20 - values.level, rows: 40, top: 40, glance: 40 })[name] || 0;

// the current view as one HTML file
export async function exported(title, hash, theme) {
  const about = { name: "about", values: {} };
  const others = [...asked.values()].filter(({ name }) => name !== "about").reverse().sort((one, two) => rank(one) - rank(two));
  // the server takes 64 questions in 4 MiB, and a character may have three bytes
  const questions = [about];
  let room = 1.3e6;
  for (const question of others) {
    room -= JSON.stringify(question).length;
    if (room > 0 && questions.length < 64) questions.push(question);
  }
  return (await post("export", { title, hash, theme, questions })).blob();
}
