// @ts-check
// Quantities by layer.

import { at, html, svg, themed } from "./elements.js";
import { digits } from "./numbers.js";
import { line, scaleLinear } from "./vendor.js";

/** @typedef {import("./shown.js").Page} Page */

const LINES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a66f00", "#3a86b8"];
const BRIGHT_LINES = ["#56b4e9", "#ff8c42", "#2fc99b", "#e8a4cc", "#f0c14b", "#b3b3ff"];
const HIGH = 260;

/**
 * @param {Page} page
 * @param {HTMLElement} host
 */
export function curvesView(page, host) {
  const stage = html("div", { class: "stage", tabindex: 0, role: "application" });
  const [key, readout] = [html("ul", { class: "key" }), html("p", { class: "readout", role: "status" })];
  host.replaceChildren(stage, key, readout);
  const cursor = { line: 0, place: 0 };
  const curve = () => page.content.document.curves[page.state.curve];

  function say() {
    const { labels, layers, values } = curve();
    cursor.line = Math.min(Math.max(cursor.line, 0), labels.length - 1);
    cursor.place = Math.min(Math.max(cursor.place, 0), layers.length - 1);
    for (const dot of stage.querySelectorAll("circle")) dot.setAttribute("r", dot.id === `dot-${cursor.line}-${cursor.place}` ? "7" : "4");
    const value = digits(values[cursor.line][cursor.place], 4);
    readout.textContent = [labels[cursor.line], `layer ${page.content.document.layers[layers[cursor.place]]}: ${value}`].filter(Boolean).join(", ");
  }

  stage.addEventListener("focus", say);
  stage.addEventListener("pointerover", (event) => {
    const place = event.target instanceof Element && /^dot-(\d+)-(\d+)$/.exec(event.target.id);
    if (!place) return;
    Object.assign(cursor, { line: Number(place[1]), place: Number(place[2]) });
    say();
  });
  stage.addEventListener("keydown", (event) => {
    const [by, along] = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key] ?? [0, 0];
    if (!by && !along) return;
    event.preventDefault();
    Object.assign(cursor, { line: cursor.line + by, place: cursor.place + along });
    say();
  });

  return {
    draw() {
      const { labels, layers, values, meaning, name } = curve();
      at("curve-meaning").textContent = meaning;
      const width = Math.max(240, Math.min(900, stage.clientWidth));
      const known = values.flat().filter((value) => value !== null);
      const y = scaleLinear().domain([Math.min(0, ...known), Math.max(...known, 0) || 1]).nice().range([HIGH - 34, 8]);
      const x = scaleLinear().domain([0, Math.max(1, layers.length - 1)]).range([56, width - 16]);
      const inks = page.dark ? BRIGHT_LINES : LINES;
      const step = Math.ceil((layers.length * 24) / width);
      const path = line().x((/** @type {any} */ p) => x(p[0])).y((/** @type {any} */ p) => y(p[1])).defined((/** @type {any} */ p) => p[1] !== null);
      stage.setAttribute("aria-label", `${name} by layer. Arrow keys go from point to point.`);
      stage.replaceChildren(svg(
        "svg", { width, height: HIGH, "aria-hidden": "true", style: "font: 11px system-ui, 'DejaVu Sans', sans-serif", fill: themed("--ink") },
        ...y.ticks(5).flatMap((tick) => [
          svg("line", { x1: 56, x2: width - 16, y1: y(tick), y2: y(tick), stroke: themed("--line") }),
          svg("text", { x: 50, y: y(tick), "text-anchor": "end", "dominant-baseline": "central" }, y.tickFormat(5)(tick)),
        ]),
        ...layers.flatMap((layer, i) => (i % step ? [] : [svg("text", { x: x(i), y: HIGH - 18, "text-anchor": "middle" }, page.content.document.layers[layer])])),
        svg("text", { x: width / 2, y: HIGH - 4, "text-anchor": "middle", fill: themed("--soft") }, "layer"),
        ...values.flatMap((row, i) => {
          const ink = inks[i % inks.length];
          const dash = labels[i].startsWith("control") ? "2 4" : "none";
          return [
            svg("path", { d: path(row.map((value, j) => /** @type {any} */ ([j, value]))) ?? "", fill: "none", stroke: ink, "stroke-width": 2, "stroke-dasharray": dash }),
            ...row.flatMap((value, j) => (value === null ? [] : [svg("circle", { id: `dot-${i}-${j}`, cx: x(j), cy: y(value), r: 4, fill: ink })])),
          ];
        }),
      ));
      key.replaceChildren(...(labels.length > 1 ? labels : []).map((text, i) => html("li", { style: `--ink-of-line: ${inks[i % inks.length]}` }, text)));
      readout.textContent = " ";
      host.setAttribute("aria-label", `${name} by layer`);
    },
    table() {
      const { labels, layers, values, name } = curve();
      return [[name, ...layers.map((layer) => page.content.document.layers[layer])], ...values.map((row, i) => [labels[i], ...row.map((value) => String(value ?? ""))])];
    },
  };
}
