// @ts-check
// Thumbnails of all heads of an example.

import { paint, signedScale } from "./colours.js";
import { canvas, html } from "./elements.js";
import { digits } from "./numbers.js";
import { ABSENT, TITLES, placeOf, shown } from "./shown.js";

/** @typedef {import("./content.js").Grid} Grid */
/** @typedef {import("./shown.js").Page} Page */
/** @typedef {{ layer: number, head: number, value: number | null }} Entry */

/**
 * The heads to show, filtered and in order.
 * @param {Entry[]} heads with the quantity that they are sorted by
 * @param {{ sort: number, descending: boolean, least: string, most: string }} choice
 */
export function arranged(heads, { sort, descending, least, most }) {
  if (sort < 0) return heads;
  const [low, high] = [least === "" ? -Infinity : Number(least), most === "" ? Infinity : Number(most)];
  const known = heads.filter(({ value }) => value !== null && value >= low && value <= high);
  return known.sort((a, b) => (descending ? -1 : 1) * (/** @type {number} */ (a.value) - /** @type {number} */ (b.value)));
}

/**
 * @param {Page} page
 * @param {HTMLElement} host
 */
export function modelView(page, host) {
  const [count, thumbs] = [html("p", { class: "hint", role: "status" }), html("div", { class: "thumbs" })];
  host.replaceChildren(count, thumbs);
  /** @type {string[][]} */
  let table = [];
  let drawn = ""; // what the thumbnails that are there show
  return {
    draw() {
      const { content, state, dark } = page;
      const { grids, layers, maps } = content.document;
      const blocks = maps.filter((block) => block.model === state.model && block.example === state.example);
      const grid = grids[state.sort];
      const heads = blocks.flatMap(({ layer, heads: all }) => all.map((head) => ({
        layer, head, value: grid?.values[grid.layers.indexOf(layer)]?.[head] ?? null,
      })));
      const order = arranged(heads, state);
      const part = ["raw", "effective", "null", "norm-weighted", "least-norm"].includes(state.part) ? state.part : "effective";
      count.textContent = heads.length ? `${order.length} of ${heads.length} heads, ${TITLES[part]}, each with colours of its own` : ABSENT;
      const wide = Math.max(1, ...blocks.map((block) => block.heads.length));
      thumbs.style.setProperty("--wide", String(state.sort < 0 ? wide : Math.min(wide, order.length)));
      const choice = [state.model, state.example, part, state.hide, state.rescale, state.words, state.pairs, state.clip, dark];
      const key = JSON.stringify([choice, order]);
      if (key !== drawn) thumbs.replaceChildren(...order.map((entry) => thumb(entry, part, grid)));
      drawn = key;
      for (const each of thumbs.children) {
        each.setAttribute("aria-pressed", String(each.getAttribute("data-head") === `${state.layer}/${state.head}`));
      }
      table = [["layer", "head", grid?.name ?? ""], ...order.map(({ layer, head, value }) => [layers[layer], String(head), String(value ?? "")])];
      host.setAttribute("aria-label", `All heads in example ${state.example + 1}`);
    },
    table: () => table,
  };

  /** @param {Entry} entry @param {string} part @param {Grid | undefined} grid */
  function thumb({ layer, head, value }, part, grid) {
    const { content, state, dark } = page;
    const { layers } = content.document;
    const m = shown(content, state, { ...placeOf(state), layer, head }, { only: part })?.parts[part];
    const picture = m && m.rows && m.columns ? canvas(m.columns, m.rows, (context) => {
      const image = context.createImageData(m.columns, m.rows);
      paint(signedScale([m.values], dark, state.clip ? 0.97 : 1), m.values, image.data);
      context.putImageData(image, 0, 0);
    }) : html("span", {}, "–");
    const fact = grid && value !== null ? digits(value) : "";
    const label = `Open layer ${layers[layer]}, head ${head}${grid && fact ? `: ${grid.name} ${fact}` : ""}`;
    const button = html(
      "button", { type: "button", class: "thumb", "data-head": `${layer}/${head}`, "aria-label": label },
      picture, html("span", {}, `${layers[layer]} · ${head}${fact ? `: ${fact}` : ""}`),
    );
    button.addEventListener("click", () => page.choose({ layer, head, view: "maps" }));
    button.addEventListener("keydown", step);
    return button;
  }

  /** Arrow keys go from head to head. @param {KeyboardEvent} event */
  function step(event) {
    const wide = Number(thumbs.style.getPropertyValue("--wide"));
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide }[event.key];
    const buttons = Array.from(thumbs.children);
    if (by === undefined) return;
    event.preventDefault();
    const next = buttons[buttons.indexOf(/** @type {Element} */ (event.currentTarget)) + by];
    if (next instanceof HTMLElement) next.focus();
  }
}

/** Lists of the quantities to sort by. @param {Grid[]} grids @returns {[number, string][]} */
export const sortings = (grids) => [[-1, "their place"], ...grids.map((grid, i) => /** @type {[number, string]} */ ([i, grid.name]))];
