import assert from "node:assert/strict";
import { test } from "node:test";
import { DEFAULTS } from "../../attnlens/reporting/web/fragment.js";
import { matrix } from "../../attnlens/reporting/web/matrix.js";
import { groupOf, shown, titleOf } from "../../attnlens/reporting/web/shown.js";

const tokens = ["[CLS]", "un", "##do", "it", "[SEP]", "now", "[SEP]"];
const segments = [0, 0, 0, 0, 0, 1, 1];
const raw = matrix(7, 7, (i, j) => (j === 0 ? 0.4 : 0.1));
const block = { rows: 7, columns: 7, kind: "encoder", first: 0 };
const content = {
  document: { examples: [{ tokens, segments, length: 7 }], models: ["m"], layers: ["0"] },
  maps: ({ head }) => (head ? null : { block, parts: { raw, effective: raw }, errors: { raw: 0.1, effective: 0.2 } }),
};
const place = { model: 0, example: 0, layer: 0, head: 0 };
const names = (change) => {
  const { queries, keys, parts } = shown(content, { ...DEFAULTS, ...change }, place);
  return [queries.names.join(" "), keys.names.join(" "), Array.from(parts.raw.values.subarray(0, keys.names.length), (value) => Number(value.toFixed(6)))];
};

test("everything is shown at first", () => {
  const all = "[CLS] un do it [SEP] now [SEP]";
  assert.deepEqual(names({}), [all, all, [0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]]);
  assert.equal(shown(content, DEFAULTS, { ...place, head: 1 }), null);
});

test("words add up, and so do their errors", () => {
  assert.deepEqual(names({ words: true })[2], [0.4, 0.2, 0.1, 0.1, 0.1, 0.1]);
  const what = shown(content, { ...DEFAULTS, words: true }, place);
  assert.deepEqual(what.errors, { raw: 0.2, effective: 0.4 });
  assert.equal(groupOf(what.keys, 2), 1);
  assert.equal(groupOf(what.keys, 9), -1);
});

test("special tokens are hidden, and rows rescaled on request", () => {
  assert.deepEqual(names({ hide: "special" }), ["un do it now", "un do it now", [0.1, 0.1, 0.1, 0.1]]);
  assert.deepEqual(names({ hide: "special", rescale: true })[2], [0.25, 0.25, 0.25, 0.25]);
  const { errors } = shown(content, { ...DEFAULTS, hide: "special", rescale: true }, place);
  assert.ok(Math.abs(errors.raw - 0.25) < 1e-12); // as the entries, so their errors
});

test("pairs are filtered by side", () => {
  assert.deepEqual(names({ pairs: "A→B" }).slice(0, 2), ["[CLS] un do it [SEP]", "now [SEP]"]);
  assert.deepEqual(names({ pairs: "B→A", hide: "special", words: true }).slice(0, 2), ["now", "undo it"]);
  assert.deepEqual(names({ pairs: "B→B" }).slice(0, 2), ["now [SEP]", "now [SEP]"]);
});

test("no more tokens than asked for", () => {
  assert.equal(shown(content, DEFAULTS, place, { most: 3 }).parts.raw.values.length, 9);
  assert.deepEqual(Object.keys(shown(content, DEFAULTS, place, { only: "raw" }).parts), ["raw"]);
});

test("places have names", () => {
  assert.equal(titleOf(content, place), "layer 0, head 0, example 1");
  assert.equal(titleOf(content, { ...place, head: -1 }), "layer 0, mean over heads, example 1");
});
