// @ts-check
// Which tokens made a hidden state, layer by layer.

import { plainScale } from "./colours.js";
import { html } from "./elements.js";
import { Figure } from "./figure.js";
import { entry, matrix } from "./matrix.js";
import { decimal } from "./numbers.js";
import { nameOf, pieces } from "./tokens.js";

/** @typedef {import("./shown.js").Page} Page */

const EXACT = 5e-3; // percent: what a stored share may be off

/**
 * @param {Page} page
 * @param {HTMLElement} host
 */
export function attributionView(page, host) {
  const [place, words] = [html("div", { class: "figure wide" }), html("p", { class: "hint" })];
  host.replaceChildren(place, words);
  const figure = new Figure(place);
  return {
    draw() {
      const { content, state } = page;
      const block = content.attribution(state.example);
      const all = pieces(content.document.examples[state.example].tokens);
      const name = (/** @type {number} */ i) => (all[i] ? nameOf(all, [i]) : String(i));
      const layers = block?.layers.map((layer) => content.contributions(block, layer)) ?? [];
      const there = block?.targets.includes(state.token) ?? false;
      place.hidden = !there;
      words.textContent = there ? "Contribution of every token to the hidden state of the chosen one. Click a token to follow it."
        : "There is no attribution to this token in the file.";
      if (!block || !there) return;
      const m = matrix(layers.length, block.sources.length, (l, s) => {
        const shares = layers[l];
        return shares ? 100 * entry(shares, state.token, block.sources[s]) : NaN;
      });
      const others = m.values.filter((_, i) => block.sources[i % m.columns] !== state.token);
      const high = Math.max(0, ...others.filter(Number.isFinite));
      const largest = Math.max(...m.values.filter(Number.isFinite));
      const scale = plainScale(m.values, { low: 0, ...(high > 0 ? { high } : {}) });
      figure.draw({
        title: `Contributions to ${name(state.token)} (position ${state.token}), in %; the largest is ${decimal(largest, EXACT)} %`,
        matrix: m, scale, rows: block.layers.map((layer) => content.document.layers[layer]), columns: block.sources.map(name),
        across: "token", down: "layer", cell: 26, cursor: [0, block.sources.indexOf(state.token)], follow: "column",
        say: (l, s) => `${name(block.sources[s])} in layer ${content.document.layers[block.layers[l]]} contributes ${decimal(entry(m, l, s), EXACT)} %`,
        choose: (_, s) => page.choose({ token: block.sources[s] }),
      });
      if (scale.above) words.textContent += ` Colours end at the largest contribution of another token; what is above, as its own often is, has the colour of “≥”.`;
    },
    table: () => figure.table(),
  };
}
