import assert from "node:assert/strict";
import { test } from "node:test";
import { cellTexts, decimal, decimalsOf, digits } from "../../attnlens/reporting/web/numbers.js";

test("a value is written to the decimals that are known", () => {
  assert.equal(decimal(0.12345, 0.0004), "0.123");
  assert.equal(decimal(0.12345, 1e-9), "0.123450");
  assert.equal(decimal(0.7, 0.5), "1");
  assert.equal(decimal(-0.5, 0.01), "−0.5");
  assert.equal(decimal(-0.0001, 0.01), "0.0");
  assert.equal(decimal(NaN, 0.01), "–");
  for (const error of [3e-1, 4.9e-2, 5e-4, 1e-5]) assert.ok(error <= 0.5 * 10 ** -decimalsOf(error));
});

test("digits are significant, and what is missing is a dash", () => {
  assert.deepEqual([0.000123456, 1234.5, -2, 0].map((value) => digits(value)), ["0.000123", "1230", "−2", "0"]);
  assert.deepEqual([null, undefined, NaN, Infinity].map((value) => digits(value)), ["–", "–", "–", "–"]);
});

test("cells have as many decimals as tell them apart", () => {
  assert.deepEqual(cellTexts([0.5, null, -0.25]), ["0.500", "–", "−0.250"]);
  assert.deepEqual(cellTexts([32, 7]), ["32", "7"]);
  assert.deepEqual(cellTexts([123.4, 7]), ["123", "7"]);
  assert.deepEqual(cellTexts([null]), ["–"]);
  assert.deepEqual(cellTexts([]), []);
});
