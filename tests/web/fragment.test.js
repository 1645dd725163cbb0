import assert from "node:assert/strict";
import { test } from "node:test";
import { DEFAULTS, read, written } from "../../attnlens/reporting/web/fragment.js";

test("a state returns from its fragment", () => {
  const state = { ...DEFAULTS, view: "text", head: -1, pairs: "A→B", words: true, clip: false, least: "0.5", example: 3 };
  assert.deepEqual({ ...DEFAULTS, ...read(`#${written(state, DEFAULTS)}`) }, state);
  assert.equal(written(DEFAULTS, DEFAULTS), "");
});

test("what is unknown or of another type is left out", () => {
  assert.deepEqual(read("#head=x&words=1&nothing=3&__proto__=1&toString=1&layer=2&example=1e3"), { layer: 2 });
  assert.deepEqual(read(""), {});
});
