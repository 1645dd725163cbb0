import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { vendored } from "./build.js";

test("the vendored library is what is built", async () => {
  assert.equal(readFileSync(new URL("../../attnlens/reporting/web/vendor.js", import.meta.url), "utf-8"), await vendored());
});
