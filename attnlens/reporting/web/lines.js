// @ts-check
// Lines from queries to the keys they attend to, raw beside effective.

import { canvas, html, svg, themed } from "./elements.js";
import { entry } from "./matrix.js";
import { said } from "./maps.js";
import { digits } from "./numbers.js";
import { ABSENT, TITLES, groupOf, placeOf, shown, titleOf } from "./shown.js";

/** @typedef {import("./matrix.js").Matrix} Matrix */
/** @typedef {import("./shown.js").Page} Page */
/** @typedef {import("./shown.js").Shown} Shown */

const MOST = 64; // tokens
const HIGH = 17; // pixels of a token
const SIDE = 120; // pixels of the names
const RESOLUTION = 2;
const FAINT = 0.02; // of the largest: what is less is not drawn

/**
 * The lines of a query, of a key, or all.
 * @param {Matrix} m
 * @param {number} row that is followed, or −1
 * @param {number} column likewise
 * @returns {[number, number, number][]} row, column, attention
 */
export function strokes(m, row, column) {
  /** @type {[number, number, number][]} */
  const all = [];
  for (let i = 0; i < m.rows; i++) {
    for (let j = 0; j < m.columns; j++) {
      if ((row < 0 || i === row) && (column < 0 || j === column)) all.push([i, j, entry(m, i, j)]);
    }
  }
  return all;
}

/** @param {[number, number, number][]} lines */
const largestOf = (lines) => lines.reduce((largest, [, , value]) => Math.max(largest, Math.abs(value)), 0);

/**
 * @param {Page} page
 * @param {HTMLElement} host
 */
export function linesView(page, host) {
  const [panels, readout] = [html("div"), html("p", { class: "readout", role: "status" })];
  const words = html("p", { class: "hint" });
  host.replaceChildren(readout, panels, words);
  /** @type {Shown | null} */
  let what = null;

  /** @param {string} name @param {number} row @param {number} column */
  function panel(name, row, column) {
    const { queries, keys, parts: { [name]: m } } = /** @type {Shown} */ (what);
    const drawn = strokes(m, row, column);
    const largest = largestOf(drawn);
    const width = Math.max(280, Math.min(620, (panels.clientWidth - 20) / (panels.clientWidth > 700 ? 2 : 1)));
    const height = HIGH * Math.max(m.rows, m.columns) + 4;
    const middle = width - 2 * SIDE;
    const picture = canvas(middle * RESOLUTION, height * RESOLUTION, (context) => {
      context.scale(RESOLUTION, RESOLUTION);
      for (const [i, j, value] of drawn) {
        if (Math.abs(value) < FAINT * largest) continue;
        context.globalAlpha = Math.abs(value) / largest;
        context.strokeStyle = value < 0 ? themed("--minus") : themed("--plus");
        context.lineWidth = 1.6;
        context.beginPath();
        context.moveTo(0, (i + 0.5) * HIGH);
        context.lineTo(middle, (j + 0.5) * HIGH);
        context.stroke();
      }
    });
    const label = (/** @type {string} */ text, /** @type {number} */ i, /** @type {"queries" | "keys"} */ side, /** @type {boolean} */ chosen) => svg("text", {
      x: side === "queries" ? SIDE - 6 : width - SIDE + 6, y: (i + 0.5) * HIGH, "dominant-baseline": "central",
      "text-anchor": side === "queries" ? "end" : "start", "data-side": side, "data-group": i,
      ...(chosen ? { fill: themed("--mark"), "font-weight": "bold" } : {}),
    }, text.length > 14 ? `${Array.from(text).slice(0, 13).join("")}…` : text);
    const drawing = svg(
      "svg", { width, height, "aria-hidden": "true", style: "font: 12px system-ui, 'DejaVu Sans', sans-serif", fill: themed("--ink") },
      ...queries.names.map((text, i) => label(text, i, "queries", i === row)),
      ...keys.names.map((text, j) => label(text, j, "keys", j === column)),
    );
    Object.assign(picture.style, { left: `${SIDE}px`, width: `${middle}px`, height: `${height}px` });
    return html("div", { class: "figure" }, html("h3", {}, `${TITLES[name]}, the strongest line ${digits(largest)}`), html("div", { class: "lines" }, picture, drawing));
  }

  function render() {
    if (!what) return;
    const { state } = page;
    const { first } = what.maps.block;
    const from = state.direction === "from";
    const row = from ? groupOf(what.queries, state.token - first) : -1;
    const column = from ? -1 : groupOf(what.keys, state.token);
    const had = panels.contains(document.activeElement);
    const all = [hover.row, hover.column].some((place) => place >= 0) ? hover : { row, column };
    const stage = html("div", {
      class: "pair", tabindex: 0, role: "application", "aria-label": "Lines from queries, left, to keys, right. Arrow keys go from token to token.",
    }, ...["raw", "effective"].map((name) => panel(name, all.row, all.column)));
    panels.replaceChildren(stage);
    if (had) stage.focus();
    stage.addEventListener("pointerover", (event) => {
      const label = event.target instanceof Element ? event.target.closest("[data-side]") : null;
      const group = Number(label?.getAttribute("data-group") ?? -1);
      const next = { row: label?.getAttribute("data-side") === "queries" ? group : -1, column: label?.getAttribute("data-side") === "keys" ? group : -1 };
      if (next.row === hover.row && next.column === hover.column) return;
      hover = next;
      render();
    });
    stage.addEventListener("click", () => {
      if (hover.row >= 0 || hover.column >= 0) follow(hover.row >= 0 ? "from" : "to", Math.max(hover.row, hover.column));
    });
    stage.addEventListener("keydown", (event) => {
      const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      const side = { ArrowLeft: "from", ArrowRight: "to" }[event.key];
      if (step === undefined && side === undefined) return;
      event.preventDefault();
      hover = { row: -1, column: -1 };
      const axis = /** @type {Shown} */ (what)[(side ?? state.direction) === "from" ? "queries" : "keys"];
      const place = Math.max(0, from ? row : column);
      follow(side ?? state.direction, Math.min(axis.groups.length - 1, Math.max(0, place + (step ?? 0))));
    });
    readout.textContent = strongest(all.row, all.column);
  }

  let hover = { row: -1, column: -1 };

  /** @param {string} direction @param {number} group */
  function follow(direction, group) {
    if (!what) return;
    const first = direction === "from" ? what.maps.block.first : 0;
    hover = { row: -1, column: -1 };
    page.choose({ direction, token: what[direction === "from" ? "queries" : "keys"].groups[group][0] + first });
  }

  /** The strongest line of those that are drawn. @param {number} row @param {number} column */
  function strongest(row, column) {
    if (!what) return "";
    const all = strokes(what.parts.effective, row, column);
    const largest = largestOf(all);
    const line = all.find(([, , value]) => Math.abs(value) === largest);
    if (!line) return "";
    const [i, j] = line;
    return `Strongest: ${said(what, "effective", i, j)}; ${said(what, "raw", i, j).split(": ").at(-1)}`;
  }

  return {
    draw() {
      const { content, state } = page;
      what = shown(content, state, placeOf(state), { most: MOST });
      hover = { row: -1, column: -1 };
      panels.hidden = !what;
      readout.hidden = !what;
      const longest = what ? Math.max(what.maps.block.rows, what.maps.block.columns) : 0;
      words.textContent = !what ? ABSENT : longest > MOST ? `The first ${MOST} of ${longest} tokens. The other views show all.` : "";
      render();
      host.setAttribute("aria-label", `Lines of ${titleOf(content, placeOf(state))}`);
    },
    table() {
      if (!what) return [];
      const { queries, keys, parts } = what;
      return [["query", "key", "raw", "effective"], ...queries.names.flatMap((query, i) => keys.names.map((key, j) => [
        query, key, String(entry(parts.raw, i, j)), String(entry(parts.effective, i, j)),
      ]))];
    },
  };
}
