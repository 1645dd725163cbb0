// @ts-check
// Raw, effective and null attention of a head side by side, and the others that are known.

import { plainScale, signedScale } from "./colours.js";
import { html } from "./elements.js";
import { Figure } from "./figure.js";
import { entry } from "./matrix.js";
import { decimal, decimalsOf } from "./numbers.js";
import { ABSENT, TITLES, groupOf, placeOf, shown, titleOf } from "./shown.js";

/** @typedef {import("./shown.js").Page} Page */
/** @typedef {import("./shown.js").Shown} Shown */

const CLIPPED = 0.97; // of the entries lie within the colours of a clipped scale

/**
 * A row of figures in a host, as many as are asked for.
 * @param {HTMLElement} host
 */
export class Row {
  /** @param {HTMLElement} host */
  constructor(host) {
    this.host = host;
    /** @type {Figure[]} */
    this.figures = [];
  }

  /** @param {number} count */
  of(count) {
    if (this.figures.length !== count) {
      const hosts = Array.from({ length: count }, () => html("div", { class: "figure" }));
      this.host.replaceChildren(...hosts);
      this.figures = hosts.map((host) => new Figure(host));
    }
    return this.figures;
  }

  table() {
    return this.figures.flatMap((figure) => [...figure.table(), []]).slice(0, -1);
  }
}

/**
 * How an entry of a part is said.
 * @param {Shown} what
 * @param {string} part
 * @param {number} row
 * @param {number} column
 */
export const said = (what, part, row, column) =>
  `${what.queries.names[row]} → ${what.keys.names[column]}: ${TITLES[part]} = ${decimal(entry(what.parts[part], row, column), what.errors[part])}`;

/**
 * Words on how exact the numbers of maps are.
 * @param {Shown} what
 */
export function exactness({ errors, maps }) {
  const places = decimalsOf(errors.raw);
  return `Stored in ${maps.block.bits} bits; raw and null are right to ±${errors.raw.toPrecision(1)}, effective to ±${errors.effective.toPrecision(1)}${places ? "" : ", so no decimals are shown"}.`;
}

/**
 * @param {Page} page
 * @param {HTMLElement} host
 */
export function mapsView(page, host) {
  const [row, words] = [html("div", { class: "figures" }), html("p", { class: "hint" })];
  host.replaceChildren(row, words);
  const figures = new Row(row);
  return {
    draw() {
      const { content, state, dark } = page;
      const place = placeOf(state);
      const what = shown(content, state, place);
      row.hidden = !what;
      words.textContent = what ? exactness(what) : ABSENT;
      if (!what) return;
      const names = Object.keys(what.parts);
      const share = state.clip ? CLIPPED : 1;
      const common = signedScale(["raw", "effective", "null"].map((name) => what.parts[name].values), dark, share);
      const axis = state.direction === "from" ? what.queries : what.keys;
      const token = groupOf(axis, state.token - (state.direction === "from" ? what.maps.block.first : 0));
      const all = figures.of(names.length);
      names.forEach((name, i) => {
        const blank = name === "null" && what.parts.null.values.every((value) => value === 0);
        all[i].draw({
          title: `${TITLES[name]}${blank ? ": zero to all digits, all of this head's attention counts" : ""}`,
          matrix: what.parts[name],
          scale: name === "norm-weighted" ? plainScale(what.parts[name].values, { low: 0, high: signedScale([what.parts[name].values], dark, share).high }) : common,
          rows: what.queries.names, columns: what.keys.names, across: "keys", down: "queries",
          cursor: state.direction === "from" ? [token, 0] : [0, token],
          ...(token < 0 ? {} : { follow: state.direction === "from" ? "row" : "column" }),
          say: (i_, j) => said(what, name, i_, j),
          choose: (i_, j) => page.choose({ token: (state.direction === "from" ? what.queries.groups[i_] : what.keys.groups[j])[0] }),
        });
      });
      host.setAttribute("aria-label", `Attention maps of ${titleOf(content, place)}`);
    },
    table: () => figures.table(),
  };
}
