// @ts-check
// What of a head's maps is shown: which tokens, as words or not, rescaled or not.

import { Content } from "./content.js";
import { grouped, rowFactors, scaled, sinks } from "./matrix.js";
import { nameOf, pieces, words } from "./tokens.js";

/** @typedef {import("./content.js").Example} Example */
/** @typedef {import("./content.js").Maps} Maps */
/** @typedef {import("./content.js").Place} Place */
/** @typedef {import("./fragment.js").State} State */
/** @typedef {import("./matrix.js").Matrix} Matrix */
/** @typedef {import("./tokens.js").Piece} Piece */
/** @typedef {{ pieces: Piece[], groups: number[][], names: string[] }} Axis
 *  groups of positions, each with its name */
/** @typedef {{ example: Example, maps: Maps, queries: Axis, keys: Axis,
 *   parts: Record<string, Matrix>, errors: Record<string, number> }} Shown */
/** @typedef {{ content: Content, state: State, dark: boolean,
 *   choose: (change: Partial<State>) => void }} Page */

/** What each part is called. */
export const TITLES = /** @type {Record<string, string>} */ ({
  raw: "raw A", effective: "effective A⊥", null: "null A − A⊥",
  "norm-weighted": "norm-weighted ‖A T‖", "least-norm": "least-norm a*",
});

/** @param {State} state @returns {Place} */
export const placeOf = ({ model, example, layer, head }) => ({ model, example, layer, head });

/**
 * Positions that stay, and how they are grouped.
 * @param {Piece[]} all
 * @param {State} state
 * @param {(position: number) => boolean} stays
 * @returns {Axis}
 */
export function axisOf(all, state, stays) {
  const groups = (state.words ? words(all) : all.map((_, i) => [i]))
    .map((group) => group.filter(stays)).filter((group) => group.length);
  return { pieces: all, groups, names: groups.map((group) => nameOf(all, group)) };
}

/**
 * @param {Content} content
 * @param {State} state
 * @param {Place} place
 * @param {{ most?: number, only?: string }} [choice] tokens on each axis, and the only part
 * @returns {Shown | null} null where the maps are not in the file
 */
export function shown(content, state, place, { most = Infinity, only } = {}) {
  const maps = content.maps(place);
  if (!maps) return null;
  const { block } = maps;
  const example = content.document.examples[place.example];
  const axes = Content.axes(example, block.kind);
  const [queries, keys] = [axes.queries, axes.keys].map(pieces);
  const { first } = block; // rows may begin later than columns
  const drains = state.hide === "sinks" ? sinks(maps.parts.raw, block.kind === "decoder", block.first) : [];
  const paired = pairTest(example, state.pairs, block.kind);
  const rows = axisOf(queries.slice(first), state, (i) =>
    i < Math.min(block.rows, most) && !(state.hide !== "nothing" && queries[first + i].special) && paired(first + i, 0));
  const columns = axisOf(keys, state, (j) =>
    j < Math.min(block.columns, most) && !(state.hide !== "nothing" && keys[j].special) && !drains.includes(j) && paired(j, 1));
  const whole = Array.from({ length: block.columns }, (_, j) => [j]);
  const wanted = Object.entries(maps.parts).filter(([name]) => only === undefined || name === only);
  const largest = Math.max(1, ...columns.groups.map((group) => group.length));
  /** @type {Record<string, Matrix>} */
  const parts = {};
  /** @type {Record<string, number>} */
  const errors = {};
  for (const [name, part] of wanted) {
    parts[name] = grouped(part, rows.groups, columns.groups);
    errors[name] = maps.errors[name] * largest;
    if (!state.rescale) continue;
    const factors = rowFactors(parts[name], grouped(part, rows.groups, whole));
    parts[name] = scaled(parts[name], factors);
    errors[name] *= Math.max(1, ...factors.map(Math.abs));
  }
  return { example, maps, queries: rows, keys: columns, parts, errors };
}

/**
 * Whether a position passes a filter of sentence pairs.
 * @param {Example} example
 * @param {string} pairs such as `A→B`, or `all`
 * @param {string} kind
 * @returns {(position: number, side: number) => boolean} side 0 are queries, 1 keys
 */
function pairTest(example, pairs, kind) {
  const { segments } = example;
  const sides = pairs.split("→").map((letter) => "AB".indexOf(letter));
  if (!segments || kind === "cross" || sides.length < 2) return () => true;
  return (position, side) => segments[position] === sides[side];
}

/**
 * The group that a position is in, or −1.
 * @param {Axis} axis
 * @param {number} position
 */
export const groupOf = (axis, position) => axis.groups.findIndex((group) => group.includes(position));

/**
 * How a place is called.
 * @param {Content} content
 * @param {Place} place
 */
export function titleOf(content, { model, example, layer, head }) {
  const { models, layers, examples } = content.document;
  return [
    ...(models.length > 1 ? [models[model]] : []), `layer ${layers[layer]}`,
    head < 0 ? "mean over heads" : `head ${head}`, ...(examples.length ? [`example ${example + 1}`] : []),
  ].join(", ");
}

/** Said where there is no map. */
export const ABSENT = "The maps of this head and example are not in the file; the notes above say how to get them.";
