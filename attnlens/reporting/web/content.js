// @ts-check
// What the page holds, and its maps unpacked when they are first shown.

import { matrix, meanOf, weighted } from "./matrix.js";
import { unzlibSync } from "./vendor.js";

/** @typedef {import("./matrix.js").Matrix} Matrix */
/** @typedef {{ source: string, columns: number, rows: number, first: number }} Picture
 *  an image, the patches across and down, and the position of the first patch */
/** @typedef {{ tokens: string[], length: number, targets?: string[], segments?: number[],
 *   steps?: number[], picture?: Picture }} Example
 *  `targets` are the decoder's tokens where it has its own, `segments` the text of a pair that each
 *  token is of, `steps` the first row of each step of a generation */
/** @typedef {{ name: string, meaning: string, layers: number[], values: (number | null)[][],
 *   examples?: number }} Grid */
/** @typedef {{ name: string, meaning: string, layers: number[], labels: string[],
 *   values: (number | null)[][] }} Curve */
/** @typedef {{ unit: number, packed: string, norms?: number[], fraction: number | null,
 *   entropy: number | null }} HeadMap */
/** @typedef {{ model: number, example: number, layer: number, kind: string, rows: number,
 *   columns: number, bits: number, heads: number[], maps: HeadMap[], first: number }} Block
 *  `first` is the position of the first query */
/** @typedef {{ example: number, layers: number[], sources: number[], targets: number[],
 *   packed: string }} Attribution */
/** @typedef {{ model: string, models: string[], settings: Record<string, unknown>,
 *   versions: Record<string, unknown>, layers: string[], examples: Example[], grids: Grid[],
 *   curves: Curve[], maps: Block[], attribution: Attribution[], notes: string[] }} Document */
/** @typedef {{ model: number, example: number, layer: number, head: number }} Place
 *  head −1 is the mean over the heads that are there */
/** @typedef {{ block: Block, parts: Record<string, Matrix>, errors: Record<string, number>,
 *   fraction: number | null, entropy: number | null }} Maps
 *  `errors` say how far an entry of each part may be off */

export const MEAN = -1;
const MOST_UNPACKED = 300; // maps that stay unpacked

/**
 * Rounding of each part: effective attention is the difference of two rounded numbers.
 * @param {HeadMap} map
 */
function errorsOf({ unit, norms }) {
  const half = unit / 2;
  /** @type {Record<string, number>} */
  const errors = { raw: half, effective: unit, null: half, "least-norm": half };
  return norms ? { ...errors, "norm-weighted": half * Math.max(...norms) } : errors;
}

/** @param {string} text */
function bytesOf(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return unzlibSync(bytes);
}

/**
 * Signed numbers from planes of their bytes, lowest first; the sign is the lowest bit, and the
 * largest number is what is missing.
 * @param {string} text
 * @param {number} bits
 */
export function integers(text, bits) {
  const planes = bytesOf(text);
  const width = Math.ceil(bits / 8);
  const count = planes.length / width;
  const missing = 2 ** bits - 1;
  const numbers = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    let folded = 0;
    for (let byte = width - 1; byte >= 0; byte--) folded = folded * 256 + planes[i + byte * count];
    numbers[i] = folded === missing ? NaN : folded % 2 ? -(folded + 1) / 2 : folded / 2;
  }
  return numbers;
}

/**
 * Raw, effective, null and, where the norms of the values are known, norm-weighted attention.
 * @param {Block} block
 * @param {HeadMap} map
 */
function unpacked(block, map) {
  const { rows, columns } = block;
  const numbers = integers(map.packed, block.bits).map((value) => value * map.unit);
  const size = rows * columns;
  const plane = (/** @type {number} */ i) => ({ rows, columns, values: numbers.subarray(i * size, (i + 1) * size) });
  const [raw, null_] = [plane(0), plane(1)];
  const effective = { rows, columns, values: raw.values.map((value, i) => value - null_.values[i]) };
  /** @type {Record<string, Matrix>} */
  const parts = { raw, effective, null: null_ };
  if (map.norms) parts["norm-weighted"] = weighted(raw, map.norms);
  if (numbers.length === 3 * size) parts["least-norm"] = plane(2);
  return parts;
}

export class Content {
  /** @param {Document} document_ */
  constructor(document_) {
    this.document = document_;
    /** @type {Map<string, Block>} */
    this.blocks = new Map(document_.maps.map((block) => [`${block.model}/${block.example}/${block.layer}`, block]));
    /** @type {Map<string, Record<string, Matrix>>} */
    this.unpacked = new Map();
    /** @type {Map<Attribution, Float64Array>} */
    this.shares = new Map();
  }

  /** @param {Place} place @returns {Block | undefined} */
  block({ model, example, layer }) {
    return this.blocks.get(`${model}/${example}/${layer}`);
  }

  /** @param {Block} block @param {number} index of the head within the block */
  parts(block, index) {
    const key = `${block.model}/${block.example}/${block.layer}/${index}`;
    const parts = this.unpacked.get(key) ?? unpacked(block, block.maps[index]);
    this.unpacked.delete(key); // the latest last
    this.unpacked.set(key, parts);
    if (this.unpacked.size > MOST_UNPACKED) this.unpacked.delete(/** @type {string} */ (this.unpacked.keys().next().value));
    return parts;
  }

  /**
   * The maps of a head, or the means over the heads of a layer.
   * @param {Place} place
   * @returns {Maps | null} null where they are not in the file
   */
  maps(place) {
    const block = this.block(place);
    if (!block) return null;
    if (place.head === MEAN) {
      const heads = block.maps.map((_, i) => this.parts(block, i));
      const parts = Object.fromEntries(Object.keys(heads[0]).map((name) => [name, meanOf(heads.map((each) => each[name]))]));
      const all = block.maps.map(errorsOf);
      const errors = Object.fromEntries(Object.keys(parts).map((name) => [name, Math.max(...all.map((each) => each[name]))]));
      return { block, parts, errors, fraction: null, entropy: null };
    }
    const index = block.heads.indexOf(place.head);
    if (index < 0) return null;
    const { fraction, entropy } = block.maps[index];
    return { block, parts: this.parts(block, index), errors: errorsOf(block.maps[index]), fraction, entropy };
  }

  /** @param {number} example @returns {Attribution | undefined} */
  attribution(example) {
    return this.document.attribution.find((each) => each.example === example);
  }

  /**
   * Contributions of all positions (columns) to the hidden state of each (rows) after a layer.
   * @param {Attribution} block
   * @param {number} layer
   * @returns {Matrix | null}
   */
  contributions(block, layer) {
    const row = block.layers.indexOf(layer);
    if (row < 0) return null;
    const numbers = this.shares.get(block) ?? integers(block.packed, 32);
    this.shares.set(block, numbers);
    const [sources, targets] = [block.sources.length, block.targets.length];
    const size = Math.max(...block.sources, ...block.targets) + 1;
    const places = [block.targets, block.sources].map((all) => Array.from({ length: size }, (_, i) => all.indexOf(i)));
    return matrix(size, size, (i, j) => {
      const [target, source] = [places[0][i], places[1][j]];
      return target < 0 || source < 0 ? NaN : numbers[(row * sources + source) * targets + target] / 1e4;
    });
  }

  /** Tokens of the queries and of the keys of an attention call. @param {Example} example @param {string} kind */
  static axes(example, kind) {
    const targets = example.targets ?? example.tokens;
    return { queries: kind === "encoder" ? example.tokens : targets, keys: kind === "decoder" ? targets : example.tokens };
  }
}
