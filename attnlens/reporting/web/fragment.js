// @ts-check
// The state of the page in its address, so that a view can be linked.

/** What a person can choose, and what is chosen at first. */
export const DEFAULTS = {
  view: "maps", model: 0, example: 0, layer: 0, head: 0, token: 0,
  model2: 0, example2: 0, layer2: 0, head2: 0,
  field: 0, curve: 0, part: "effective", direction: "from", hide: "nothing", pairs: "all",
  rescale: false, words: false, clip: true, sort: -1, descending: true, least: "", most: "", step: 0,
};
/** @typedef {typeof DEFAULTS} State */

/**
 * @param {State} state
 * @param {State} first what the page opens with
 */
export function written(state, first) {
  const changed = Object.entries(state).filter(([name, value]) => value !== first[/** @type {keyof State} */ (name)]);
  return new URLSearchParams(changed.map(([name, value]) => [name, String(value)])).toString();
}

/**
 * Read a fragment; what is not known, or of another type, is left out.
 * @param {string} fragment
 * @returns {Partial<State>}
 */
export function read(fragment) {
  /** @type {Record<string, string | number | boolean>} */
  const state = {};
  for (const [name, text] of new URLSearchParams(fragment.replace(/^#/, ""))) {
    const type = Object.hasOwn(DEFAULTS, name) && typeof DEFAULTS[/** @type {keyof State} */ (name)];
    if (type === "string") state[name] = text;
    else if (type === "boolean" && /^(true|false)$/.test(text)) state[name] = text === "true";
    else if (type === "number" && /^-?\d{1,9}$/.test(text)) state[name] = Number(text);
  }
  return state;
}
