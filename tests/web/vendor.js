// What the report needs of kept libraries.
export { csvFormatRows } from "d3-dsv";
export { interpolateRgb, piecewise } from "d3-interpolate";
export { scaleLinear } from "d3-scale";
export { default as interpolateCividis } from "./node_modules/d3-scale-chromatic/src/sequential-multi/cividis.js";
export { line } from "d3-shape";
export { unzlibSync } from "fflate";
