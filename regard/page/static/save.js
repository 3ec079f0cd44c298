// The picture of any view as PNG or SVG: its canvases and its text in their places, under a title. Lines and words that
// were drawn on a canvas are written as vectors and text.

import { draw } from "./chart.js";

const EDGE = 24;
// a list of tokens of up to this many pixels is drawn whole, however much of it is on the screen
const TALLEST = 8000;

// any CSS colour in a form that every program reads
const known = new Map();
function plain(colour) {
  if (!known.has(colour)) {
    const context = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    known.set(colour, { colour: `rgb(${r}, ${g}, ${b})`, alpha: a / 255 });
  }
  return known.get(colour);
}

// one frame for the layout, one in which a picture is told its size, one in which it is drawn
const frames = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => requestAnimationFrame(done))));

// the content of a root, with lists of tokens at their full height
async function gather(root, caption) {
  const lists = [...root.querySelectorAll(".lanes")].filter((list) => list.scrollHeight < TALLEST);
  for (const list of lists) list.style.maxHeight = "none";
  if (lists.length) await frames();
  try {
    return measure(root, caption);
  } finally {
    for (const list of lists) list.style.maxHeight = "";
  }
}

function measure(root, caption) {
  const origin = root.getBoundingClientRect();
  const items = [];
  const add = (box, item) => items.push({ x: box.left - origin.left, y: box.top - origin.top, width: box.width, height: box.height, ...item });
  const lettered = (style) => ({ font: `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`, size: style.fontSize, family: style.fontFamily, weight: style.fontWeight, slant: style.fontStyle, fill: plain(style.color), upright: style.writingMode !== "horizontal-tb" });

  function words(node, clip) {
    const style = getComputedStyle(node.parentElement);
    if (style.visibility === "hidden") return;
    for (const match of node.textContent.matchAll(/\S+/g)) {
      const range = document.createRange();
      range.setStart(node, match.index);
      range.setEnd(node, match.index + match[0].length);
      const box = range.getBoundingClientRect();
      if (!box.width || outside(box, clip)) continue;
      // a word that is cut on the page is cut here too
      const upright = style.writingMode !== "horizontal-tb";
      const over = !upright && box.right > clip.right + 1;
      const share = (clip.right - box.left) / box.width;
      const text = over ? `${match[0].slice(0, Math.max(1, Math.floor(match[0].length * share) - 1))}…` : match[0];
      add(over ? { left: box.left, top: box.top, width: clip.right - box.left, height: box.height } : box, { text, ...lettered(style) });
    }
  }

  function boxOf(node, style, box) {
    const width = parseFloat(style.borderLeftWidth) && parseFloat(style.borderTopWidth);
    const ring = /inset/.test(style.boxShadow) ? { line: plain(style.boxShadow.match(/^[a-z]+\([^)]*\)/)?.[0] || style.color), width: 2, dash: [] } : null;
    const edge = width && style.borderTopStyle !== "none" ? { line: plain(style.borderTopColor), width, dash: style.borderTopStyle === "dashed" ? [3, 3] : [] } : ring;
    const fill = plain(style.backgroundColor);
    const seen = fill.alpha > 0 || (edge && edge.line.alpha > 0);
    const round = Math.min(parseFloat(style.borderTopLeftRadius) || 0, box.width / 2, box.height / 2);
    if (seen && box.width && box.height) add(box, { box: { fill: fill.alpha ? fill : null, edge, round: style.borderTopLeftRadius.endsWith("%") ? Math.min(box.width, box.height) / 2 : round } });
  }

  // the value of a field is not a text node
  function field(node, style, box) {
    if (node.type === "range") {
      const share = (node.value - node.min) / (node.max - node.min || 1);
      const [middle, accent] = [box.top + box.height / 2, plain(getComputedStyle(document.documentElement).getPropertyValue("--accent"))];
      add({ left: box.left, top: middle - 2, width: box.width, height: 4 }, { box: { fill: plain(getComputedStyle(document.documentElement).getPropertyValue("--cell")), edge: null, round: 2 } });
      add({ left: box.left + share * (box.width - 12), top: middle - 6, width: 12, height: 12 }, { box: { fill: accent, edge: null, round: 6 } });
      return;
    }
    boxOf(node, style, box);
    const text = node.tagName === "SELECT" ? node.selectedOptions[0]?.textContent : node.value || node.placeholder;
    const inside = parseFloat(style.paddingLeft) + parseFloat(style.borderLeftWidth);
    if (text) add({ left: box.left + inside, top: box.top, width: box.width - 2 * inside, height: box.height }, { text, ...lettered(style) });
  }

  function walk(node, clip) {
    if (node.nodeType === Node.TEXT_NODE) { words(node, clip); return; }
    if (node.nodeType !== Node.ELEMENT_NODE || node.hidden) return;
    const style = getComputedStyle(node);
    if (style.display === "none" || style.visibility === "hidden") return;
    const box = node.getBoundingClientRect();
    if (style.display !== "contents" && outside(box, clip) && style.position === "absolute") return;
    if (node.tagName === "CANVAS") { if (box.width && !outside(box, clip)) add(box, { canvas: node }); return; }
    if (/^(INPUT|SELECT)$/.test(node.tagName)) { field(node, style, box); return; }
    if (node !== root) boxOf(node, style, box);
    if (node.tagName === "LI" && style.listStyleType === "decimal") {
      const number = `${[...node.parentElement.children].indexOf(node) + 1}.`;
      add({ left: box.left - 18, top: box.top, width: 16, height: parseFloat(style.lineHeight) || 24 }, { text: number, ...lettered(style) });
    }
    // a folded element still has a box
    const folded = node.tagName === "DETAILS" && !node.open;
    const inner = style.overflowX === "visible" || node.dataset.whole ? clip : { left: Math.max(clip.left, box.left), right: Math.min(clip.right, box.right), top: Math.max(clip.top, box.top), bottom: Math.min(clip.bottom, box.bottom) };
    node.childNodes.forEach((child) => { if (!folded || child.tagName === "SUMMARY") walk(child, inner); });
  }

  walk(root, { left: -Infinity, right: Infinity, top: -Infinity, bottom: Infinity });
  const right = Math.max(origin.width, ...items.map((item) => item.x + item.width + EDGE));
  const title = heading(caption, right - 2 * EDGE);
  for (const item of items) item.y += title.height;
  const height = Math.max(...items.map((item) => item.y + item.height), title.height) + EDGE;
  return { items: [...title.items, ...items], width: Math.ceil(right), height: Math.ceil(height), paper: plain(getComputedStyle(root).backgroundColor).colour };
}

const outside = (box, clip) => box.right <= clip.left || box.left >= clip.right || box.bottom <= clip.top || box.top >= clip.bottom;

// the title of a picture, its status and its sentence, in as many lines as needed
function heading({ title, about, says }, width) {
  const style = getComputedStyle(document.body);
  const context = document.createElement("canvas").getContext("2d");
  const items = [];
  let y = EDGE - 6;
  for (const [text, size, weight, colour] of [[title, 17, "650", style.color], [about, 13, "400", style.getPropertyValue("--quiet")], [says, 13, "400", style.getPropertyValue("--quiet")]]) {
    const letters = { font: `${weight} ${size}px ${style.fontFamily}`, size: `${size}px`, family: style.fontFamily, weight, slant: "normal", fill: plain(colour), upright: false };
    context.font = letters.font;
    const lines = [];
    for (const word of (text || "").split(/\s+/).filter(Boolean)) {
      const longer = lines.length ? `${lines[lines.length - 1]} ${word}` : word;
      if (!lines.length || context.measureText(longer).width > width) lines.push(word);
      else lines[lines.length - 1] = longer;
    }
    for (const line of lines) {
      items.push({ x: EDGE, y, width, height: size * 1.5, text: line, ...letters });
      y += size * 1.5;
    }
  }
  return { items, height: y };
}

export async function png(root, caption) {
  const { items, width, height, paper } = await gather(root, caption);
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(width * 2);
  canvas.height = Math.round(height * 2);
  const context = canvas.getContext("2d");
  context.scale(2, 2);
  context.fillStyle = paper;
  context.fillRect(0, 0, width, height);
  for (const item of items) {
    context.save();
    if (item.canvas) {
      context.imageSmoothingEnabled = false;
      if (!item.canvas.shapes) context.drawImage(item.canvas, item.x, item.y, item.width, item.height);
      else {
        context.beginPath();
        context.rect(item.x, item.y, item.width, item.height);
        context.clip();
        context.translate(item.x, item.y);
        context.scale(item.width / parseFloat(item.canvas.style.width), item.height / parseFloat(item.canvas.style.height));
        draw(context, item.canvas.shapes);
      }
    } else if (item.box) {
      const { fill, edge, round } = item.box;
      context.beginPath();
      context.roundRect(item.x, item.y, item.width, item.height, round);
      if (fill) { context.globalAlpha = fill.alpha; context.fillStyle = fill.colour; context.fill(); }
      if (edge) { context.globalAlpha = edge.line.alpha; context.strokeStyle = edge.line.colour; context.lineWidth = edge.width; context.setLineDash(edge.dash); context.stroke(); }
    } else {
      context.font = item.font;
      context.fillStyle = item.fill.colour;
      context.textBaseline = "middle";
      context.translate(item.x, item.y + item.height / 2);
      // names of columns are read from below
      if (item.upright) { context.translate(item.width / 2, item.height / 2); context.rotate(-Math.PI / 2); }
      context.fillText(item.text, 0, 0, (item.upright ? item.height : item.width) + 2);
    }
    context.restore();
  }
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

export async function svg(root, caption) {
  const { items, width, height, paper } = await gather(root, caption);
  const space = "http://www.w3.org/2000/svg";
  const make = (name, attributes, text = null) => {
    const node = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined && value !== "") node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    return node;
  };
  const picture = make("svg", { xmlns: space, width, height, viewBox: `0 0 ${width} ${height}` });
  picture.append(make("title", {}, caption.title), make("rect", { width, height, fill: paper }));
  // the shapes of a canvas: a group of its size
  const drawn = ({ x, y, width: wide, height: tall, canvas }) => {
    const [w, h] = [parseFloat(canvas.style.width), parseFloat(canvas.style.height)];
    const group = make("svg", { x, y, width: wide, height: tall, viewBox: `0 0 ${w} ${h}`, preserveAspectRatio: "none" });
    for (const shape of canvas.shapes) {
      if (shape.text !== undefined) group.append(make("text", { transform: `translate(${shape.x} ${shape.y})${shape.turn ? ` rotate(${shape.turn})` : ""}`, "text-anchor": shape.anchor || "start", "dominant-baseline": "central", fill: plain(shape.fill).colour, "font-size": shape.size || 11, "font-family": "system-ui, sans-serif" }, shape.text));
      else group.append(make("path", { d: shape.d, fill: shape.fill ? plain(shape.fill).colour : "none", stroke: shape.stroke ? plain(shape.stroke).colour : null, "stroke-width": shape.stroke ? shape.width || 1 : null, "stroke-linecap": shape.stroke ? "round" : null, "stroke-dasharray": (shape.dash || []).join(" "), opacity: shape.alpha === undefined || shape.alpha === 1 ? null : shape.alpha.toFixed(3) }));
    }
    return group;
  };
  for (const item of items) {
    const { x, y, width: wide, height: tall } = item;
    if (item.canvas) picture.append(item.canvas.shapes ? drawn(item) : make("image", { x, y, width: wide, height: tall, preserveAspectRatio: "none", href: item.canvas.toDataURL(), "image-rendering": "pixelated" }));
    else if (item.box) {
      const { fill, edge, round } = item.box;
      picture.append(make("rect", { x, y, width: wide, height: tall, rx: round || null, ry: round || null, fill: fill ? fill.colour : "none", "fill-opacity": fill && fill.alpha < 1 ? fill.alpha : null, stroke: edge ? edge.line.colour : null, "stroke-width": edge ? edge.width : null, "stroke-dasharray": edge ? edge.dash.join(" ") : null }));
    } else {
      const at = item.upright ? { transform: `translate(${x + wide / 2} ${y + tall}) rotate(-90)` } : { x, y: y + tall / 2 };
      picture.append(make("text", { ...at, "dominant-baseline": "central", fill: item.fill.colour, "font-size": item.size, "font-family": item.family, "font-weight": item.weight, "font-style": item.slant === "normal" ? null : item.slant }, item.text));
    }
  }
  return new Blob([new XMLSerializer().serializeToString(picture)], { type: "image/svg+xml" });
}

export function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
