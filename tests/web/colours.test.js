import assert from "node:assert/strict";
import { test } from "node:test";
import { colours, paint, plainScale, signedScale } from "../../attnlens/reporting/web/colours.js";

test("a clipped scale says that there are values beyond its ends", () => {
  const values = Float64Array.from({ length: 100 }, (_, i) => i / 100);
  const { high, above, below } = signedScale([values], false, 0.97);
  assert.deepEqual([high, above, below], [0.96, true, false]);
  assert.deepEqual(signedScale([values], false), { ...signedScale([values], false), high: 0.99, above: false, below: false });
  assert.equal(signedScale([values.map((value) => -value)], false, 0.9).below, true);
  assert.equal(signedScale([[0, 0]], false).high, 1);
  assert.equal(signedScale([[]], true).high, 1);
  // a few values among many zeros do not make a scale of nothing
  assert.equal(signedScale([[...Array(99).fill(0), 0.5]], false, 0.97).high, 0.5);
});

test("a plain scale goes from the least to the largest", () => {
  assert.deepEqual({ ...plainScale([2, 4, NaN]), table: 0 }, { low: 2, high: 4, signed: false, above: false, below: false, table: 0 });
  assert.equal(plainScale([1, 2, 9], { high: 3 }).above, true);
  assert.deepEqual([plainScale([]).low, plainScale([5, 5]).high], [0, 6]);
});

test("zero is the ground, what is missing stays clear, and text is legible", () => {
  const scale = signedScale([[-1, 1]], false);
  const pixels = new Uint8ClampedArray(8);
  paint(scale, [0, NaN], pixels);
  assert.deepEqual(Array.from(pixels.subarray(3)), [255, 0, 0, 0, 0]);
  assert.ok(Math.min(...pixels.subarray(0, 3)) > 250);
  assert.equal(colours(scale, 1).ink, "#ffffff");
  assert.equal(colours(scale, 0).ink, "#000000");
  assert.equal(colours(scale, NaN).ground, "transparent");
});
