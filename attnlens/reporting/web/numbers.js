// @ts-check
// Numbers as words: no more digits than are known.

/** @param {string} text */
const minus = (text) => text.replace("-", "−");

/**
 * How many decimals of a value are known.
 * @param {number} error how far the value may be off
 */
export function decimalsOf(error) {
  return error > 0 ? Math.min(6, Math.max(0, Math.floor(-Math.log10(2 * error)))) : 6;
}

/**
 * A value to the decimals that are known; a dash where there is none.
 * @param {number} value
 * @param {number} error how far it may be off
 */
export function decimal(value, error) {
  if (!Number.isFinite(value)) return "–";
  const text = value.toFixed(decimalsOf(error));
  return minus(Number(text) === 0 ? text.replace("-", "") : text);
}

/**
 * A value to so many significant digits; a dash where there is none.
 * @param {number | null | undefined} value
 * @param {number} [count]
 */
export function digits(value, count = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return minus(String(Number(value.toPrecision(count))));
}

/**
 * The cells of a grid, to as many decimals as tell them apart.
 * @param {(number | null)[]} values
 */
export function cellTexts(values) {
  const known = values.filter((value) => value !== null);
  const largest = Math.max(...known.map(Math.abs), 0) || 1;
  const places = known.every(Number.isInteger) ? 0
    : Math.min(3, Math.max(0, 2 - Math.floor(Math.log10(largest))));
  return values.map((value) => (value === null ? "–" : minus(value.toFixed(places))));
}
