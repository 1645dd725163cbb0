import assert from "node:assert/strict";
import { test } from "node:test";
import { strokes } from "../../attnlens/reporting/web/lines.js";
import { matrix } from "../../attnlens/reporting/web/matrix.js";
import { arranged } from "../../attnlens/reporting/web/model.js";
import { csv } from "../../attnlens/reporting/web/saving.js";

const heads = [0.2, null, 0.9, 0.5].map((value, head) => ({ layer: 0, head, value }));
const order = (choice) => arranged(heads, { sort: 0, descending: true, least: "", most: "", ...choice }).map(({ head }) => head);

test("heads are sorted and filtered by a quantity", () => {
  assert.deepEqual(order({}), [2, 3, 0]);
  assert.deepEqual(order({ descending: false }), [0, 3, 2]);
  assert.deepEqual(order({ least: "0.5" }), [2, 3]);
  assert.deepEqual(order({ most: "0.5" }), [3, 0]);
  assert.deepEqual(order({ sort: -1, least: "0.5" }), [0, 1, 2, 3]);
});

test("lines are those of a query, of a key, or all", () => {
  const m = matrix(2, 2, (i, j) => i + j / 10);
  assert.deepEqual(strokes(m, 1, -1), [[1, 0, 1], [1, 1, 1.1]]);
  assert.deepEqual(strokes(m, -1, 0), [[0, 0, 0], [1, 0, 1]]);
  assert.equal(strokes(m, -1, -1).length, 4);
});

test("no token is a formula of a spreadsheet", () => {
  assert.equal(csv([["=1+1", "@a", "-x", "+y", "-0.5", "a,\"b"]]), "'=1+1,'@a,'-x,'+y,-0.5,\"a,\"\"b\"\n");
});
