// @ts-check
// Colour scales: of one sign, or around zero; clipped ones say so.

import { interpolateCividis, interpolateRgb, piecewise } from "./vendor.js";

/** @typedef {{ low: number, high: number, signed: boolean, above: boolean, below: boolean,
 *   table: Uint8ClampedArray }} Scale
 *  `above` and `below` tell whether there are values beyond the ends */

const STEPS = 256;
/** @type {Map<string, Uint8ClampedArray>} */
const tables = new Map();

/** @param {(place: number) => string} colour @returns {Uint8ClampedArray} red, green, blue of each step */
function tabulated(colour) {
  const table = new Uint8ClampedArray(3 * STEPS);
  for (let i = 0; i < STEPS; i++) {
    const rgb = /** @type {string[]} */ (colour(i / (STEPS - 1)).match(/\d+/g));
    table.set(rgb.slice(0, 3).map(Number), 3 * i);
  }
  return table;
}

/**
 * Blue to orange is distinct with every kind of colour vision; the middle is the ground.
 * @param {"cividis" | "light" | "dark"} name
 */
export function tableOf(name) {
  const made = tables.get(name) ?? tabulated(
    name === "cividis" ? interpolateCividis
      : piecewise(interpolateRgb, name === "light"
        ? ["#08519c", "#6baed6", "#ffffff", "#fd9a4a", "#a63603"]
        : ["#8ccbff", "#2f7fc1", "#14171b", "#c96a1c", "#ffc078"]),
  );
  tables.set(name, made);
  return made;
}

/**
 * A scale around zero.
 * @param {ArrayLike<number>[]} all values that share it
 * @param {boolean} dark
 * @param {number} [share] of the sizes that must lie within; the rest is clipped
 * @returns {Scale}
 */
export function signedScale(all, dark, share = 1) {
  const sizes = new Float64Array(all.reduce((sum, values) => sum + values.length, 0));
  let count = 0;
  let [least, most] = [0, 0];
  for (const values of all) {
    for (let i = 0; i < values.length; i++) {
      if (!Number.isFinite(values[i])) continue;
      sizes[count++] = Math.abs(values[i]);
      [least, most] = [Math.min(least, values[i]), Math.max(most, values[i])];
    }
  }
  const sorted = sizes.subarray(0, count).sort();
  const largest = sorted[count - 1] || 1;
  const high = share < 1 ? sorted[Math.floor(share * (count - 1))] || largest : largest;
  return { low: -high, high, signed: true, above: most > high, below: least < -high, table: tableOf(dark ? "dark" : "light") };
}

/**
 * A scale from the least to the largest value, or from and to given ends.
 * @param {ArrayLike<number>} values
 * @param {{ low?: number, high?: number }} [ends]
 * @returns {Scale}
 */
export function plainScale(values, ends = {}) {
  let [least, most] = [Infinity, -Infinity];
  for (let i = 0; i < values.length; i++) {
    if (Number.isFinite(values[i])) [least, most] = [Math.min(least, values[i]), Math.max(most, values[i])];
  }
  if (least > most) [least, most] = [0, 1];
  const low = ends.low ?? least;
  const high = ends.high ?? (most > low ? most : low + 1);
  return { low, high, signed: false, above: most > high, below: least < low, table: tableOf("cividis") };
}

/** @param {Scale} scale @param {number} value @returns {number} a step of its table */
const stepOf = (scale, value) => Math.round(Math.min(1, Math.max(0, (value - scale.low) / (scale.high - scale.low))) * (STEPS - 1));

/**
 * Write the colours of values into the pixels of a picture; what is missing stays clear.
 * @param {Scale} scale
 * @param {ArrayLike<number>} values
 * @param {Uint8ClampedArray} pixels four for each value
 */
export function paint(scale, values, pixels) {
  const { table } = scale;
  for (let i = 0; i < values.length; i++) {
    if (!Number.isFinite(values[i])) continue;
    const step = 3 * stepOf(scale, values[i]);
    for (let channel = 0; channel < 3; channel++) pixels[4 * i + channel] = table[step + channel];
    pixels[4 * i + 3] = 255;
  }
}

/**
 * Colour of a value, and of text upon it.
 * @param {Scale} scale
 * @param {number} value
 */
export function colours(scale, value) {
  if (!Number.isFinite(value)) return { ground: "transparent", ink: "currentColor" };
  const step = 3 * stepOf(scale, value);
  const [red, green, blue] = scale.table.subarray(step, step + 3);
  const linear = [red, green, blue].map((channel) => ((channel / 255 + 0.055) / 1.055) ** 2.4);
  const light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return { ground: `rgb(${red} ${green} ${blue})`, ink: light > 0.18 ? "#000000" : "#ffffff" };
}
