import assert from "node:assert/strict";
import { test } from "node:test";
import { zlibSync } from "fflate";
import { Content, MEAN, integers } from "../../attnlens/reporting/web/content.js";

/** Pack as Python does. */
function packed(numbers, bits) {
  const width = Math.ceil(bits / 8);
  const folded = numbers.map((n) => (Number.isNaN(n) ? 2 ** bits - 1 : n < 0 ? -2 * n - 1 : 2 * n));
  const bytes = Array.from({ length: width }, (_, byte) => folded.map((n) => Math.floor(n / 256 ** byte) % 256)).flat();
  return Buffer.from(zlibSync(Uint8Array.from(bytes))).toString("base64");
}

test("integers of any number of bits come back", () => {
  for (const bits of [8, 10, 12, 16, 20, 24, 32]) {
    const most = 2 ** (bits - 1) - 1;
    const numbers = [0, 1, -1, 5, -5, most, -most, NaN];
    assert.deepEqual(Array.from(integers(packed(numbers, bits), bits)), numbers, String(bits));
  }
  assert.equal(integers(packed([], 8), 8).length, 0);
});

const head = (raw, none, more = {}) => ({ unit: 0.01, packed: packed([...raw, ...none], 8), fraction: 0.5, entropy: 1, ...more });
const block = (maps, heads) => ({ model: 0, example: 0, layer: 1, kind: "encoder", first: 0, rows: 2, columns: 2, bits: 8, heads, maps });
const document_ = (maps) => ({ maps, attribution: [], examples: [{ tokens: ["a", "b"], length: 2 }] });
const place = { model: 0, example: 0, layer: 1 };

test("maps are raw, null, their difference and norm-weighted", () => {
  const content = new Content(document_([block([head([50, 50, 100, 0], [10, 0, 0, 0], { norms: [2, 3] })], [4])]));
  const { parts, errors } = content.maps({ ...place, head: 4 });
  const near = (m) => Array.from(m.values, (value) => Number(value.toFixed(9)));
  assert.deepEqual(near(parts.raw), [0.5, 0.5, 1, 0]);
  assert.deepEqual(near(parts.effective), [0.4, 0.5, 1, 0]);
  assert.deepEqual(near(parts["norm-weighted"]), [1, 1.5, 2, 0]);
  assert.deepEqual([errors.raw, errors.effective, errors["norm-weighted"]], [0.005, 0.01, 0.015]);
  assert.equal(content.maps({ ...place, head: 3 }), null);
  assert.equal(content.maps({ ...place, layer: 0, head: 4 }), null);
});

test("the mean over heads is that of those in the file", () => {
  const content = new Content(document_([block([head([50, 50, 100, 0], [0, 0, 0, 0]), head([0, 100, 0, 100], [0, 0, 0, 0])], [0, 2])]));
  const { parts, fraction } = content.maps({ ...place, head: MEAN });
  assert.deepEqual(Array.from(parts.raw.values, (value) => Number(value.toFixed(9))), [0.25, 0.75, 0.5, 0.5]);
  assert.equal(fraction, null);
});

test("least-norm attention is a third plane, where there is one", () => {
  const content = new Content(document_([block([head([50, 50, 100, 0], [0, 0, 0, 0, 40, 60, 90, 10])], [0])]));
  assert.deepEqual(Array.from(content.maps({ ...place, head: 0 }).parts["least-norm"].values, (value) => Number(value.toFixed(9))), [0.4, 0.6, 0.9, 0.1]);
});

test("contributions stand by target and source", () => {
  const attribution = { example: 0, layers: [0, 1], sources: [0, 1], targets: [1], packed: packed([1000, 9000, 2500, 7500], 32) };
  const content = new Content({ ...document_([]), attribution: [attribution] });
  const m = content.contributions(content.attribution(0), 1);
  assert.deepEqual(Array.from(m.values), [NaN, NaN, 0.25, 0.75]);
  assert.equal(content.contributions(attribution, 5), null);
  assert.equal(content.attribution(1), undefined);
});

test("axes are those of the kind of attention", () => {
  const example = { tokens: ["a"], targets: ["b"], length: 1 };
  assert.deepEqual(Content.axes(example, "cross"), { queries: ["b"], keys: ["a"] });
  assert.deepEqual(Content.axes(example, "decoder"), { queries: ["b"], keys: ["b"] });
  assert.deepEqual(Content.axes(example, "encoder"), { queries: ["a"], keys: ["a"] });
  assert.deepEqual(Content.axes({ tokens: ["a"], length: 1 }, "decoder"), { queries: ["a"], keys: ["a"] });
});
