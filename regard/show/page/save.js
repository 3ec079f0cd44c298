// The picture of any view as PNG or SVG: its canvases and its text, where they stand.

function gather(root) {
  const origin = root.getBoundingClientRect();
  const items = [];
  const walk = (node) => {
    if (node.nodeType === Node.TEXT_NODE) {
      const style = getComputedStyle(node.parentElement);
      for (const match of node.textContent.matchAll(/\S+/g)) {
        const range = document.createRange();
        range.setStart(node, match.index);
        range.setEnd(node, match.index + match[0].length);
        const box = range.getBoundingClientRect();
        const room = node.parentElement.getBoundingClientRect();
        // a word that the page cuts is cut here too
        const cut = style.textOverflow === "ellipsis" && box.width > room.width + 1;
        const text = cut ? `${match[0].slice(0, Math.max(1, Math.floor(match[0].length * room.width / box.width) - 1))}…` : match[0];
        if (box.width) items.push({ text, x: (cut ? room : box).left - origin.left, y: box.top - origin.top, height: box.height, width: (cut ? room : box).width, font: `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`, size: style.fontSize, family: style.fontFamily, weight: style.fontWeight, colour: style.color, alpha: Number(style.opacity), upright: style.writingMode !== "horizontal-tb" });
      }
      return;
    }
    if (node.nodeType !== Node.ELEMENT_NODE || node.hidden) return;
    const style = getComputedStyle(node);
    if (style.display === "none" || style.visibility === "hidden") return;
    const box = node.getBoundingClientRect();
    const at = { x: box.left - origin.left, y: box.top - origin.top, width: box.width, height: box.height };
    if (node.tagName === "CANVAS") { if (box.width) items.push({ ...at, canvas: node }); return; }
    if (node !== root && box.width) {
      const [line, width] = [style.borderTopStyle, parseFloat(style.borderLeftWidth) && parseFloat(style.borderTopWidth)];
      const edge = width ? { line: style.borderTopColor, width, dash: line === "dashed" ? [3, 3] : [] } : null;
      const fill = style.backgroundColor === "rgba(0, 0, 0, 0)" ? null : style.backgroundColor;
      if (edge || fill) items.push({ ...at, box: { fill, edge, round: parseFloat(style.borderTopLeftRadius) || 0 } });
    }
    // what is folded away still has a place
    const folded = node.tagName === "DETAILS" && !node.open;
    node.childNodes.forEach((child) => { if (!folded || child.tagName === "SUMMARY") walk(child); });
  };
  walk(root);
  const inside = items.filter((item) => item.y < root.scrollHeight && item.y + item.height > 0);
  const height = Math.max(...inside.map((item) => item.y + item.height), 40) + 12;
  return { items: inside, width: origin.width, height, paper: getComputedStyle(document.body).backgroundColor };
}

export async function png(root) {
  const { items, width, height, paper } = gather(root);
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(width * 2);
  canvas.height = Math.round(height * 2);
  const context = canvas.getContext("2d");
  context.scale(2, 2);
  context.fillStyle = paper;
  context.fillRect(0, 0, width, height);
  for (const item of items) {
    if (item.canvas) context.drawImage(item.canvas, item.x, item.y, item.width, item.height);
    else if (item.box) {
      const { fill, edge, round } = item.box;
      context.beginPath();
      context.roundRect(item.x, item.y, item.width, item.height, round);
      if (fill) { context.fillStyle = fill; context.fill(); }
      if (edge) { context.strokeStyle = edge.line; context.lineWidth = edge.width; context.setLineDash(edge.dash); context.stroke(); }
    } else {
      context.font = item.font;
      context.fillStyle = item.colour;
      context.globalAlpha = item.alpha;
      context.textBaseline = "middle";
      context.save();
      context.translate(item.x, item.y + item.height / 2);
      // names of columns read from below
      if (item.upright) { context.translate(item.width / 2, item.height / 2); context.rotate(-Math.PI / 2); }
      context.fillText(item.text, 0, 0, (item.upright ? item.height : item.width) + 2);
      context.restore();
      context.globalAlpha = 1;
    }
  }
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

export async function svg(root) {
  const { items, width, height, paper } = gather(root);
  const space = "http://www.w3.org/2000/svg";
  const make = (name, attributes) => {
    const node = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const picture = make("svg", { xmlns: space, width, height, viewBox: `0 0 ${width} ${height}` });
  picture.append(make("rect", { width, height, fill: paper }));
  for (const { x, y, width: wide, height: tall, ...item } of items) {
    if (item.canvas) picture.append(make("image", { x, y, width: wide, height: tall, href: item.canvas.toDataURL() }));
    else if (item.box) {
      const { fill, edge, round } = item.box;
      const drawn = edge ? { stroke: edge.line, "stroke-width": edge.width, "stroke-dasharray": edge.dash.join(" ") } : {};
      picture.append(make("rect", { x, y, width: wide, height: tall, rx: round, fill: fill || "none", ...drawn }));
    } else {
      const text = make("text", { x, y: y + tall / 2, "dominant-baseline": "central", fill: item.colour, opacity: item.alpha, "font-size": item.size, "font-family": item.family, "font-weight": item.weight });
      if (item.upright) {
        text.setAttribute("x", 0);
        text.setAttribute("y", 0);
        text.setAttribute("transform", `translate(${x + wide / 2} ${y + tall}) rotate(-90)`);
      }
      text.textContent = item.text;
      picture.append(text);
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
