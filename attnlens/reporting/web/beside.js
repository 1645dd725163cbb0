// @ts-check
// Two heads, two examples or two models side by side, with their difference.

import { signedScale } from "./colours.js";
import { html } from "./elements.js";
import { Row } from "./maps.js";
import { difference, entry } from "./matrix.js";
import { decimal } from "./numbers.js";
import { ABSENT, TITLES, placeOf, shown, titleOf } from "./shown.js";

/** @typedef {import("./shown.js").Page} Page */

/**
 * @param {Page} page
 * @param {HTMLElement} host
 */
export function besideView(page, host) {
  const [row, words] = [html("div", { class: "figures" }), html("p", { class: "hint" })];
  host.replaceChildren(row, words);
  const figures = new Row(row);
  return {
    draw() {
      const { content, state, dark } = page;
      const places = [placeOf(state), { model: state.model2, example: state.example2, layer: state.layer2, head: state.head2 }];
      const [a, b] = places.map((place) => shown(content, state, place));
      row.hidden = !a || !b;
      words.textContent = ABSENT;
      if (!a || !b) return;
      const part = state.part in a.parts && state.part in b.parts ? state.part : "effective";
      const [one, other] = [a.parts[part], b.parts[part]];
      const alike = one.rows === other.rows && one.columns === other.columns;
      const renamed = alike && [a.queries.names, a.keys.names].join("\n") !== [b.queries.names, b.keys.names].join("\n");
      words.textContent = alike ? (renamed ? "The difference is taken place by place; the tokens differ." : "")
        : `There is no difference of ${one.rows} × ${one.columns} and ${other.rows} × ${other.columns} entries.`;
      const share = state.clip ? 0.97 : 1;
      const common = signedScale([one.values, other.values], dark, share);
      const apart = alike ? [{ what: a, m: difference(one, other), error: a.errors[part] + b.errors[part], title: "first − second", scale: null }] : [];
      const all = [
        { what: a, m: one, error: a.errors[part], title: `first: ${titleOf(content, places[0])}`, scale: common },
        { what: b, m: other, error: b.errors[part], title: `second: ${titleOf(content, places[1])}`, scale: common },
        ...apart,
      ];
      const drawn = figures.of(all.length);
      all.forEach(({ what, m, error, title, scale }, i) => drawn[i].draw({
        title, matrix: m, scale: scale ?? signedScale([m.values], dark, share), rows: what.queries.names, columns: what.keys.names,
        across: "keys", down: "queries",
        say: (r, c) => `${what.queries.names[r]} → ${what.keys.names[c]}: ${title.split(":")[0]}, ${TITLES[part]} = ${decimal(entry(m, r, c), error)}`,
      }));
      host.setAttribute("aria-label", `${TITLES[part]} of two heads side by side`);
    },
    table: () => figures.table(),
  };
}
