// @ts-check
// All heads by a quantity.

import { plainScale, signedScale } from "./colours.js";
import { at } from "./elements.js";
import { Figure } from "./figure.js";
import { cellTexts, digits } from "./numbers.js";

/** @typedef {import("./content.js").Grid} Grid */
/** @typedef {import("./shown.js").Page} Page */

/**
 * What a grid is averaged over; each step of a generated text counts by itself.
 * @param {Page} page
 * @param {Grid} grid
 */
function scopeOf({ content }, grid) {
  if (grid.examples === undefined) return "";
  const unit = content.document.examples.some((example) => example.steps) ? "step" : "example";
  return ` over ${grid.examples} ${unit}${grid.examples === 1 ? "" : "s"}`;
}

/** @param {(number | null)[][]} values */
const flat = (values) => values.flat().map((value) => value ?? NaN);

/** @param {Page} page */
export function headsView(page) {
  const figure = new Figure(at("heads"));
  return {
    draw() {
      const { content, state, dark } = page;
      const { grids, layers, maps } = content.document;
      const grid = grids[state.field];
      at("meaning").textContent = grid.meaning;
      const values = flat(grid.values);
      const [rows, columns] = [grid.layers.length, grid.values[0].length];
      const known = values.filter(Number.isFinite);
      const change = Math.min(...known) < 0 && Math.max(...known) > 0;
      const mapped = new Set(maps.flatMap((block) => block.heads.map((head) => `${block.layer}/${head}`)));
      const dots = /** @type {[number, number][]} */ (grid.layers.flatMap((layer, row) =>
        Array.from({ length: columns }, (_, head) => [row, head]).filter(([, head]) => mapped.has(`${layer}/${head}`))));
      const every = !maps.length || dots.length === rows * columns;
      at("dots").hidden = every;
      figure.draw({
        title: `${grid.name}${scopeOf(page, grid)}`,
        matrix: { rows, columns, values: Float64Array.from(values) },
        scale: change ? signedScale([values], dark) : plainScale(values),
        rows: grid.layers.map((layer) => layers[layer]), columns: Array.from({ length: columns }, (_, head) => String(head)),
        across: "head", down: "layer", cell: 30, cursor: [grid.layers.indexOf(state.layer), state.head],
        ...(columns <= 24 && at("heads").clientWidth / columns > 40 ? { texts: cellTexts(grid.values.flat()) } : {}),
        dots: every ? [] : dots,
        say: (row, head) => `layer ${layers[grid.layers[row]]}, head ${head}: ${grid.name} ${digits(grid.values[row][head], 4)}${scopeOf(page, grid)}`,
        choose: (row, head) => page.choose({ layer: grid.layers[row], head }),
      });
    },
    table: () => figure.table(),
  };
}

/**
 * The numbers of the chosen head: over all examples, and in the one that is shown.
 * @param {Page} page
 * @returns {string[]}
 */
export function scopes(page) {
  const { content, state } = page;
  const { grids, examples } = content.document;
  const telling = ["effective fraction", "rank", "entropy", "importance"];
  const facts = grids.filter((grid) => telling.includes(grid.name)).map((grid) => {
    const value = grid.values[grid.layers.indexOf(state.layer)]?.[state.head];
    return value === null || value === undefined ? "" : `${grid.name} ${digits(value)}`;
  }).filter(Boolean);
  const grid = grids.find((each) => telling.includes(each.name));
  const lines = facts.length && grid ? [`This head${scopeOf(page, grid) || " over all examples"}: ${facts.join(" · ")}`] : [];
  const maps = state.head < 0 ? null : content.maps(state);
  if (maps) {
    const { tokens, length } = examples[state.example];
    const part = tokens.length < length ? `, first ${tokens.length} tokens` : "";
    lines.push(`In example ${state.example + 1}${part}: effective fraction ${digits(maps.fraction)} · entropy ${digits(maps.entropy)}`);
  }
  return lines;
}
