// Builds the report's vendored library: node build.js writes it.
import { writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const TARGET = fileURLToPath(new URL("../../attnlens/reporting/web/vendor.js", import.meta.url));
const NOTICE = "/* d3-scale, d3-shape, d3-interpolate, d3-dsv (ISC, Mike Bostock) and fflate (MIT, Arjun Barrett): built by tests/web/build.js */";

/** The text of the library. */
export async function vendored() {
  const { outputFiles } = await build({
    entryPoints: [fileURLToPath(new URL("vendor.js", import.meta.url))],
    bundle: true, minify: true, format: "esm", legalComments: "none", banner: { js: NOTICE }, write: false,
  });
  return outputFiles[0].text;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) writeFileSync(TARGET, await vendored());
