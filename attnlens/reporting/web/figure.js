// @ts-check
// A matrix as a figure: colours, labels, a cell under the pointer or the arrow keys, a legend.

import { colours, paint } from "./colours.js";
import { canvas, html, svg, themed } from "./elements.js";
import { entry } from "./matrix.js";
import { digits } from "./numbers.js";

/** @typedef {import("./colours.js").Scale} Scale */
/** @typedef {import("./matrix.js").Matrix} Matrix */
/** @typedef {{ title: string, matrix: Matrix, scale: Scale, rows: string[], columns: string[],
 *   across: string, down: string, say: (row: number, column: number) => string,
 *   choose?: (row: number, column: number) => void, cursor?: [number, number],
 *   follow?: "row" | "column", texts?: string[], cell?: number, dots?: [number, number][] }} Spec
 *  `across` and `down` name the axes; `texts` stand in the cells; `follow` frames the row or column
 *  of the cursor instead of its cell; `cell` is the height of a row, by default that of a column */

const FONT = "11px system-ui, 'DejaVu Sans', sans-serif";
const LETTERS = 14; // of a label
const GAP = 12; // between the labels of neighbours, in pixels

/** @param {string} text */
const short = (text) => (Array.from(text).length > LETTERS ? `${Array.from(text).slice(0, LETTERS - 1).join("")}…` : text);

/** @type {{ context: CanvasRenderingContext2D | null }} */
const measure = { context: null };

/** @param {string[]} labels @returns {number} pixels of the widest */
function widest(labels) {
  measure.context ??= /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));
  measure.context.font = FONT;
  return Math.max(0, ...labels.map((label) => /** @type {CanvasRenderingContext2D} */ (measure.context).measureText(short(label)).width));
}

/** A place for a figure, which keeps its focus when it is drawn again. */
export class Figure {
  /** @param {HTMLElement} host */
  constructor(host) {
    this.readout = html("p", { class: "readout", role: "status" });
    this.stage = html("div", { class: "stage", tabindex: 0, role: "application" });
    this.heading = html("h3");
    this.legend = html("div", { class: "legend" });
    host.replaceChildren(this.heading, this.stage, this.legend, this.readout);
    this.cursor = { row: 0, column: 0 };
    this.stage.addEventListener("pointermove", (event) => this.point(event));
    this.stage.addEventListener("pointerleave", () => this.rest());
    this.stage.addEventListener("click", (event) => { if (this.point(event)) this.choose(); });
    this.stage.addEventListener("focus", () => this.say());
    this.stage.addEventListener("keydown", (event) => this.key(event));
  }

  /** @param {Spec} spec */
  draw(spec) {
    this.spec = spec;
    const [row, column] = spec.cursor ?? [0, 0];
    this.cursor = { row: Math.max(0, row), column: Math.max(0, column) };
    this.heading.textContent = spec.title;
    const keys = spec.choose ? "Arrow keys move, Enter chooses." : "Arrow keys move.";
    this.stage.setAttribute("aria-label", `${spec.title}: ${spec.down} down, ${spec.across} across. ${keys}`);
    this.stage.replaceChildren(this.drawing(spec));
    this.legend.replaceChildren(legend(spec.scale));
    this.rest();
  }

  /** @param {Spec} spec */
  drawing(spec) {
    const { rows, columns } = spec.matrix;
    const left = Math.ceil(widest(spec.rows)) + 26;
    const room = Math.max(120, this.stage.clientWidth - left - 4);
    const wide = Math.min(spec.texts ? 90 : 40, room / columns);
    const high = spec.cell ?? wide;
    const [width, height] = [wide * columns, high * rows];
    const upright = columns * GAP <= width && widest(spec.columns) < wide - 2;
    const below = (upright ? 16 : widest(spec.columns.filter((_, i) => i % every(columns, width) === 0)) + 8) + 16;
    this.box = { left, top: 2, wide, high };
    const picture = canvas(columns, rows, (context) => {
      const image = context.createImageData(columns, rows);
      paint(spec.scale, spec.matrix.values, image.data);
      context.putImageData(image, 0, 0);
    });
    this.frame = svg("rect", { fill: "none", "stroke-width": 2, stroke: themed("--mark") });
    const label = (/** @type {string} */ text, /** @type {Record<string, string | number>} */ more) => svg("text", more, short(text));
    return svg(
      "svg",
      { width: left + width + 4, height: 2 + height + below, "aria-hidden": "true", font: FONT, style: `font: ${FONT}`, fill: themed("--ink") },
      svg("image", { x: left, y: 2, width, height, href: picture.toDataURL(), preserveAspectRatio: "none", style: "image-rendering: pixelated" }),
      svg("rect", { x: left, y: 2, width, height, fill: "none", stroke: themed("--line") }),
      ...(spec.texts ?? []).map((text, i) => svg("text", {
        x: left + (i % columns + 0.5) * wide, y: 2 + (Math.floor(i / columns) + 0.5) * high, "text-anchor": "middle",
        "dominant-baseline": "central", fill: colours(spec.scale, spec.matrix.values[i]).ink.replace("currentColor", themed("--ink")),
      }, text)),
      ...(spec.dots ?? []).map(([row, column]) => svg("circle", {
        cx: left + (column + 1) * wide - 6, cy: 2 + row * high + 6, r: 3, fill: "#ffffff", stroke: "#000000",
      })),
      ...spec.rows.flatMap((text, i) => (i % every(rows, height) ? [] : [label(text, {
        x: left - 5, y: 2 + (i + 0.5) * high, "text-anchor": "end", "dominant-baseline": "central",
      })])),
      ...spec.columns.flatMap((text, i) => (i % every(columns, width) ? [] : [label(text, upright
        ? { x: left + (i + 0.5) * wide, y: height + 16, "text-anchor": "middle" }
        : { x: 0, y: 0, "text-anchor": "end", "dominant-baseline": "central", transform: `translate(${left + (i + 0.5) * wide} ${height + 8}) rotate(-90)` })])),
      svg("text", { x: left + width / 2, y: height + below - 2, "text-anchor": "middle", fill: themed("--soft") }, spec.across),
      svg("text", { x: 0, y: 0, "text-anchor": "middle", fill: themed("--soft"), transform: `translate(10 ${2 + height / 2}) rotate(-90)` }, spec.down),
      this.frame,
    );
  }

  /** Frame the cursor, and the row or column that is followed. */
  mark() {
    if (!this.spec || !this.box || !this.frame) return;
    const { rows, columns } = this.spec.matrix;
    const { left, top, wide, high } = this.box;
    const { row, column } = this.cursor;
    const [i, j] = [Math.min(row, rows - 1), Math.min(column, columns - 1)];
    const whole = this.resting ? this.spec.follow : undefined;
    const box = whole === "row" ? [0, i, columns, 1] : whole === "column" ? [j, 0, 1, rows] : [j, i, 1, 1];
    const sides = { x: left + box[0] * wide, y: top + box[1] * high, width: box[2] * wide, height: box[3] * high };
    for (const [name, value] of Object.entries(sides)) this.frame.setAttribute(name, String(value));
  }

  /** Show what is chosen. */
  rest() {
    this.resting = true;
    const [row, column] = this.spec?.cursor ?? [0, 0];
    this.cursor = { row: Math.max(0, row), column: Math.max(0, column) };
    this.mark();
    this.readout.textContent = " ";
  }

  /** Say what is under the cursor. */
  say() {
    if (!this.spec) return;
    this.resting = false;
    const { rows, columns } = this.spec.matrix;
    this.cursor = { row: Math.min(this.cursor.row, rows - 1), column: Math.min(this.cursor.column, columns - 1) };
    this.mark();
    this.readout.textContent = this.spec.say(this.cursor.row, this.cursor.column);
  }

  /** @param {PointerEvent | MouseEvent} event @returns {boolean} whether it is over a cell */
  point(event) {
    const drawing = this.stage.firstElementChild;
    if (!this.spec || !this.box || !drawing) return false;
    const corner = drawing.getBoundingClientRect();
    const column = Math.floor((event.clientX - corner.left - this.box.left) / this.box.wide);
    const row = Math.floor((event.clientY - corner.top - this.box.top) / this.box.high);
    if (row < 0 || column < 0 || row >= this.spec.matrix.rows || column >= this.spec.matrix.columns) return false;
    this.cursor = { row, column };
    this.say();
    return true;
  }

  choose() {
    this.spec?.choose?.(this.cursor.row, this.cursor.column);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (!this.spec) return;
    const { rows, columns } = this.spec.matrix;
    const { row, column } = this.cursor;
    /** @type {Record<string, [number, number]>} */
    const targets = {
      ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1],
      Home: [row, 0], End: [row, columns - 1], PageUp: [0, column], PageDown: [rows - 1, column],
    };
    if (event.key === "Enter" || event.key === " ") this.choose();
    else if (targets[event.key]) {
      const within = (/** @type {number} */ value, /** @type {number} */ count) => Math.min(Math.max(value, 0), count - 1);
      this.cursor = { row: within(targets[event.key][0], rows), column: within(targets[event.key][1], columns) };
    } else return;
    event.preventDefault();
    this.say();
  }

  /** What the figure shows, as rows of a table. @returns {string[][]} */
  table() {
    const spec = this.spec;
    if (!spec) return [];
    return [[spec.title, ...spec.columns], ...spec.rows.map((name, i) => [
      name, ...spec.columns.map((_, j) => String(entry(spec.matrix, i, j))),
    ])];
  }
}

/** Every how manyth label there is room for. @param {number} count @param {number} room */
const every = (count, room) => Math.max(1, Math.ceil((count * GAP) / room));

/**
 * Ends of a scale and the colours between; an end beyond which there are values says so.
 * @param {Scale} scale
 */
export function legend(scale) {
  const picture = canvas(64, 1, (context) => {
    const image = context.createImageData(64, 1);
    const values = Array.from({ length: 64 }, (_, i) => scale.low + ((scale.high - scale.low) * i) / 63);
    paint(scale, values, image.data);
    context.putImageData(image, 0, 0);
  });
  const low = `${scale.below ? "≤ " : ""}${digits(scale.low)}`;
  const high = `${scale.above ? "≥ " : ""}${digits(scale.high)}`;
  return html("span", { class: "scale" }, html("span", {}, low), picture, html("span", {}, high));
}
