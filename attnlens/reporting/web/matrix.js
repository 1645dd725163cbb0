// @ts-check
// Matrices: parts, sums over words, means, differences.

/** @typedef {{ rows: number, columns: number, values: Float64Array }} Matrix */

/**
 * @param {number} rows
 * @param {number} columns
 * @param {(row: number, column: number) => number} value
 * @returns {Matrix}
 */
export function matrix(rows, columns, value) {
  const values = new Float64Array(rows * columns);
  for (let i = 0, place = 0; i < rows; i++) for (let j = 0; j < columns; j++) values[place++] = value(i, j);
  return { rows, columns, values };
}

/** @param {Matrix} m @param {number} row @param {number} column */
export const entry = (m, row, column) => m.values[row * m.columns + column];

/** @param {Matrix} m @param {number} row */
export const rowOf = (m, row) => m.values.subarray(row * m.columns, (row + 1) * m.columns);

/** @param {Matrix} m @param {number} column */
export const columnOf = (m, column) => Float64Array.from({ length: m.rows }, (_, i) => entry(m, i, column));

/** @param {Matrix[]} all of one shape @returns {Matrix} */
export function meanOf(all) {
  const values = new Float64Array(all[0].values.length);
  for (const { values: addend } of all) for (let i = 0; i < values.length; i++) values[i] += addend[i] / all.length;
  return { ...all[0], values };
}

/** @param {Matrix} a @param {Matrix} b of the same shape @returns {Matrix} */
export const difference = (a, b) => ({ ...a, values: a.values.map((value, i) => value - b.values[i]) });

/** @param {Matrix} m @param {ArrayLike<number>} weights of the columns @returns {Matrix} */
export const weighted = (m, weights) => ({ ...m, values: m.values.map((value, i) => value * weights[i % m.columns]) });

/**
 * Attention between groups of tokens: to a word it is summed, from a word it is averaged
 * (Clark et al. 2019). A group of one token is that token.
 * @param {Matrix} m
 * @param {number[][]} rows positions in each group
 * @param {number[][]} columns
 */
export function grouped(m, rows, columns) {
  if ([...rows, ...columns].every((group) => group.length === 1)) {
    return matrix(rows.length, columns.length, (i, j) => m.values[rows[i][0] * m.columns + columns[j][0]]);
  }
  return matrix(rows.length, columns.length, (i, j) => {
    let sum = 0;
    for (const row of rows[i]) for (const column of columns[j]) sum += m.values[row * m.columns + column];
    return sum / rows[i].length;
  });
}

/**
 * What each row must be multiplied with to have the sum it had with all its columns.
 * @param {Matrix} part what is left of the columns
 * @param {Matrix} whole the same rows with all columns
 */
export function rowFactors(part, whole) {
  return Float64Array.from({ length: part.rows }, (_, i) => {
    const [left, all] = [part, whole].map((m) => rowOf(m, i).reduce((sum, value) => sum + value, 0));
    return left === 0 ? 1 : all / left;
  });
}

/** @param {Matrix} m @param {Float64Array} factors of the rows @returns {Matrix} */
export const scaled = (m, factors) => ({ ...m, values: m.values.map((value, i) => value * factors[Math.floor(i / m.columns)]) });

/**
 * Keys that get at least a share of attention, averaged over the rows from them on that pay any.
 * @param {Matrix} raw
 * @param {boolean} causal whether rows see the keys up to their own alone
 * @param {number} [first] position of the first row
 * @param {number} [share]
 */
export function sinks(raw, causal, first = 0, share = 0.3) {
  return Array.from({ length: raw.columns }, (_, j) => j).filter((j) => {
    const start = causal ? Math.max(0, j - first) : 0;
    let sum = 0;
    for (let i = start; i < raw.rows; i++) sum += entry(raw, i, j);
    return start < raw.rows && sum >= share * (raw.rows - start);
  });
}
