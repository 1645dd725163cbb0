import assert from "node:assert/strict";
import { test } from "node:test";
import { columnOf, difference, grouped, matrix, meanOf, rowFactors, rowOf, scaled, sinks, weighted } from "../../attnlens/reporting/web/matrix.js";

const m = matrix(2, 3, (i, j) => 10 * i + j);
const list = ({ values }) => Array.from(values);

test("rows, columns, weights, means and differences", () => {
  assert.deepEqual(Array.from(rowOf(m, 1)), [10, 11, 12]);
  assert.deepEqual(Array.from(columnOf(m, 2)), [2, 12]);
  assert.deepEqual(list(weighted(m, [1, 0, 2])), [0, 0, 4, 10, 0, 24]);
  assert.deepEqual(list(meanOf([m, matrix(2, 3, () => 2)])), [1, 1.5, 2, 6, 6.5, 7]);
  assert.deepEqual(list(meanOf([m])), list(m));
  assert.deepEqual(list(difference(m, m)), [0, 0, 0, 0, 0, 0]);
});

test("attention to a word is summed, from a word averaged", () => {
  assert.deepEqual(list(grouped(m, [[0, 1]], [[0, 1], [2]])), [(0 + 1 + 10 + 11) / 2, (2 + 12) / 2]);
  assert.deepEqual(list(grouped(m, [[0], [1]], [[0], [1], [2]])), list(m));
  assert.deepEqual(grouped(m, [], [[0]]), { rows: 0, columns: 1, values: new Float64Array(0) });
});

test("scaled rows have the sums they had", () => {
  const left = grouped(m, [[0], [1]], [[1], [2]]);
  const factors = rowFactors(left, m);
  assert.deepEqual(Array.from(factors), [3 / 3, 33 / 23]);
  assert.deepEqual(list(scaled(left, factors)), [1, 2, 11 * (33 / 23), 12 * (33 / 23)]);
  assert.deepEqual(Array.from(rowFactors(matrix(1, 1, () => 0), m)), [1]);
});

test("sinks get much of the attention of the rows that see them", () => {
  const causal = matrix(4, 4, (i, j) => (j > i ? 0 : j === 0 ? 0.5 : 0.5 / i || 1));
  assert.deepEqual(sinks(causal, true), [0, 1]);
  assert.deepEqual(sinks(matrix(4, 4, (_, j) => (j === 2 ? 0.7 : 0.1)), false), [2]);
  assert.deepEqual(sinks(matrix(1, 4, (_, j) => (j === 2 ? 0.7 : 0.1)), true, 3), [2]);
  assert.deepEqual(sinks(matrix(4, 4, () => 0.25), false), []);
});
