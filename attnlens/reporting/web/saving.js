// @ts-check
// What a view shows as a picture or a table in a file.

import { html, svg, themed } from "./elements.js";
import { csvFormatRows } from "./vendor.js";

/**
 * Offer a file.
 * @param {string} name
 * @param {Blob} blob
 */
function save(name, blob) {
  const address = URL.createObjectURL(blob);
  html("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/**
 * A table as CSV; what a spreadsheet would take for a formula is text.
 * @param {string[][]} rows
 */
export function csv(rows) {
  const safe = (/** @type {string} */ cell) => (/^[=+@\t\r]|^-(?![\d.]|Infinity)/.test(cell) ? `'${cell}` : cell);
  return `${csvFormatRows(rows.map((row) => row.map(safe)))}\n`;
}

/**
 * Everything a view shows, as one SVG: its drawings, its pictures and its words where they stand.
 * @param {HTMLElement} view
 */
export function pictured(view) {
  const origin = view.getBoundingClientRect();
  const drawing = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width: Math.ceil(origin.width), height: Math.ceil(origin.height) });
  drawing.append(svg("rect", { width: "100%", height: "100%", fill: themed("--panel") }));
  /** @param {Element} element */
  const add = (element) => {
    const box = element.getBoundingClientRect();
    const place = { x: box.x - origin.x, y: box.y - origin.y, width: box.width, height: box.height };
    if (!box.width || !box.height) return;
    if (element instanceof SVGElement) {
      const copy = /** @type {SVGElement} */ (element.cloneNode(true));
      for (const [name, value] of Object.entries(place)) copy.setAttribute(name, String(value));
      drawing.append(copy);
    } else if (element instanceof HTMLCanvasElement || element instanceof HTMLImageElement) {
      const href = element instanceof HTMLCanvasElement ? element.toDataURL() : element.src;
      drawing.append(svg("image", { ...place, href, preserveAspectRatio: "none", style: "image-rendering: pixelated" }));
    } else {
      const style = getComputedStyle(element);
      if (style.backgroundColor !== "rgba(0, 0, 0, 0)") {
        for (const each of element.getClientRects()) {
          drawing.append(svg("rect", { x: each.x - origin.x, y: each.y - origin.y, width: each.width, height: each.height, fill: style.backgroundColor, opacity: style.opacity }));
        }
      }
      for (const node of element.childNodes) if (node instanceof Text) words(node, style);
      for (const child of element.children) add(child);
    }
  };
  /** @param {Text} node @param {CSSStyleDeclaration} style */
  const words = (node, style) => {
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getClientRects()[0];
    if (!box || !(node.textContent ?? "").trim()) return;
    drawing.append(svg("text", {
      x: box.x - origin.x, y: box.y - origin.y + box.height / 2, "dominant-baseline": "central", fill: style.color,
      style: `font: ${style.fontWeight} ${style.fontSize} system-ui, 'DejaVu Sans', sans-serif; white-space: pre`,
    }, node.textContent ?? ""));
  };
  for (const child of view.children) add(child);
  return new XMLSerializer().serializeToString(drawing);
}

/**
 * @param {string} name of the file, without its ending
 * @param {string} drawing
 */
async function savePng(name, drawing) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(drawing)}`;
  await image.decode();
  const [width, height] = [image.width, image.height];
  const surface = /** @type {HTMLCanvasElement} */ (html("canvas", { width: 2 * width, height: 2 * height }));
  const context = /** @type {CanvasRenderingContext2D} */ (surface.getContext("2d"));
  context.scale(2, 2);
  context.drawImage(image, 0, 0, width, height);
  surface.toBlob((blob) => { if (blob) save(`${name}.png`, blob); }, "image/png");
}

/**
 * Write what is shown to a file.
 * @param {"png" | "svg" | "csv"} kind
 * @param {string} name
 * @param {HTMLElement} view
 * @param {string[][]} table
 */
export async function saveAs(kind, name, view, table) {
  if (kind === "csv") save(`${name}.csv`, new Blob([csv(table)], { type: "text/csv" }));
  else if (kind === "svg") save(`${name}.svg`, new Blob([pictured(view)], { type: "image/svg+xml" }));
  else await savePng(name, pictured(view));
}
