// @ts-check
// The example as running text, shaded by what a token attends to, or by what attends to it.

import { Content } from "./content.js";
import { colours, plainScale, signedScale } from "./colours.js";
import { html } from "./elements.js";
import { legend } from "./figure.js";
import { columnOf, grouped, rowOf } from "./matrix.js";
import { decimal } from "./numbers.js";
import { ABSENT, TITLES, axisOf, groupOf, placeOf, shown, titleOf } from "./shown.js";
import { directionOf, pieces, visible } from "./tokens.js";

/** @typedef {import("./content.js").Picture} Picture */
/** @typedef {import("./matrix.js").Matrix} Matrix */
/** @typedef {import("./shown.js").Axis} Axis */
/** @typedef {import("./shown.js").Page} Page */
/** @typedef {{ queries: Axis, keys: Axis, parts: Record<string, Matrix>,
 *   errors: Record<string, number>, first: number, kind: string, picture?: Picture, apart: boolean }} Shading
 *  `first` is the position of the first query; queries and keys that are `apart` have lists of their
 *  own */
/** @typedef {{ element: HTMLElement, spans: HTMLElement[], axis: Axis, side: "queries" | "keys" }} List */

const STRONGEST = 10; // tokens in the table

/**
 * What to shade by: attention, or attribution.
 * @param {Page} page
 * @returns {Shading | null}
 */
function shadingOf({ content, state }) {
  const example = content.document.examples[state.example];
  if (state.part === "attribution") {
    const block = content.attribution(state.example);
    // hidden states are of layers, attention of modules in them: they share their label
    const { layers } = content.document;
    const layer = block?.layers.find((each) => layers[each] === layers[state.layer]) ?? block?.layers[0];
    const shares = block && content.contributions(block, layer ?? 0);
    if (!shares) return null;
    const axis = axisOf(pieces(example.tokens).slice(0, shares.rows), state, () => true);
    const parts = { attribution: grouped(shares, axis.groups, axis.groups) };
    return { queries: axis, keys: axis, parts, errors: { attribution: 5e-5 }, first: 0, kind: "encoder", apart: false, picture: example.picture };
  }
  const what = shown(content, state, placeOf(state));
  if (!what) return null;
  const { block } = what.maps;
  const cross = block.kind === "cross";
  const apart = cross || (example.segments !== undefined && ["A→B", "B→A"].includes(state.pairs));
  return { ...what, apart, first: block.first, kind: block.kind, picture: example.picture };
}

/**
 * @param {Page} page
 * @param {HTMLElement} host
 */
export function textView(page, host) {
  const [absent, texts, side] = [html("p", { class: "hint" }), html("div", { class: "texts" }), html("div", { class: "strongest" })];
  const [steps, readout, key] = [html("div", { class: "bar" }), html("p", { class: "readout", role: "status" }), html("div", { class: "legend" })];
  host.replaceChildren(absent, steps, html("div", { class: "beside" }, html("div", {}, texts, key, readout), side));
  /** @type {Shading | null} */
  let shading = null;
  /** @type {List[]} */
  let lists = [];
  /** @type {string[][]} */
  let table = [];

  /** @param {"queries" | "keys"} name @param {Axis} axis */
  function list(name, axis) {
    const first = name === "queries" && shading ? shading.first : 0;
    const picture = shading?.picture;
    const spans = axis.groups.map((group, i) => {
      const text = group.map((position) => axis.pieces[position].text).join("");
      const patch = picture && group[0] + first >= picture.first && group[0] + first < picture.first + picture.columns * picture.rows;
      return html("span", {
        role: "option", id: `${name}-${i}`, class: patch ? "patch" : "token", "data-group": i, "aria-selected": "false",
        ...(patch ? { "aria-label": axis.names[i] } : {}),
      }, patch ? "" : visible(i ? text : text.trimStart() || text));
    });
    const words = shading?.apart ? name : "text";
    const element = html("div", {
      role: "listbox", tabindex: 0, class: "text", dir: directionOf(axis.pieces),
      "aria-label": `Tokens of the ${picture ? "picture" : words}. Arrow keys move.`,
    });
    const patches = spans.filter((span) => span.className === "patch");
    if (picture && patches.length) {
      const image = html("img", { src: picture.source, alt: "", role: "presentation" });
      const overlay = html("div", { class: "patches", role: "presentation", style: `grid-template-columns: repeat(${picture.columns}, 1fr)` }, ...patches);
      element.append(...spans.filter((span) => span.className !== "patch"), html("div", { class: "picture", role: "presentation" }, image, overlay));
    } else element.append(...spans);
    const entry = { element, spans, axis, side: name };
    const groupAt = (/** @type {Event} */ event) => {
      const span = event.target instanceof HTMLElement && event.target.closest("[data-group]");
      return span instanceof HTMLElement ? Number(span.dataset.group) : -1;
    };
    element.addEventListener("pointerover", (event) => { if (groupAt(event) >= 0) paint(entry, groupAt(event)); });
    element.addEventListener("pointerleave", () => rest());
    element.addEventListener("focus", () => rest());
    element.addEventListener("click", (event) => { if (groupAt(event) >= 0) follow(entry, groupAt(event)); });
    element.addEventListener("keydown", (event) => move(entry, event));
    return entry;
  }

  /** @param {List} entry @param {number} group */
  function follow(entry, group) {
    const first = entry.side === "queries" && shading ? shading.first : 0;
    const direction = shading?.apart ? (entry.side === "queries" ? "from" : "to") : page.state.direction;
    page.choose({ token: entry.axis.groups[group][0] + first, direction });
  }

  /** @param {List} entry @param {KeyboardEvent} event */
  function move(entry, event) {
    const turned = entry.element.getAttribute("dir") === "rtl" ? -1 : 1;
    const step = { ArrowLeft: -turned, ArrowRight: turned, ArrowUp: -1, ArrowDown: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const [last, at] = [entry.axis.groups.length - 1, focused()];
    follow(entry, Math.min(last, Math.max(0, (at.entry === entry ? at.group : 0) + step)));
  }

  /** The list and group that the chosen token is in. */
  function focused() {
    const from = page.state.direction === "from";
    const entry = lists.find((each) => each.side === (from ? "queries" : "keys")) ?? lists[0];
    const first = entry.side === "queries" && shading ? shading.first : 0;
    return { entry, group: Math.max(0, groupOf(entry.axis, page.state.token - first)) };
  }

  function rest() {
    const { entry, group } = focused();
    paint(entry, group);
  }

  /**
   * Shade all tokens for one of them.
   * @param {List} entry
   * @param {number} group
   */
  function paint(entry, group) {
    if (!shading || !entry.axis.groups.length) return;
    const { state, dark } = page;
    const { queries, keys, parts, first } = shading;
    const from = shading.apart ? entry.side === "queries" : state.direction === "from";
    const painted = shading.apart ? lists[from ? 1 : 0] : entry;
    const positions = (/** @type {List} */ each) => each.axis.groups.map((tokens) => tokens[0] + (each.side === "queries" ? first : 0));
    const rowAt = (/** @type {number} */ position) => groupOf(queries, position - first);
    const columnAt = (/** @type {number} */ position) => groupOf(keys, position);
    const chosen = (from ? rowAt : columnAt)(positions(entry)[group]);
    const index = positions(painted).map(from ? columnAt : rowAt); // of each group, or −1
    const names = Object.keys(parts);
    const part = names.includes(state.part) ? state.part : names[0];
    const values = Object.fromEntries(names.map((name) => {
      const line = chosen < 0 ? [] : from ? rowOf(parts[name], chosen) : columnOf(parts[name], chosen);
      return [name, index.map((i) => line[i] ?? NaN)];
    }));
    const scale = part === "attribution" || part === "norm-weighted"
      ? plainScale(values[part].filter((_, i) => part !== "attribution" || i !== group), { low: 0 })
      : signedScale([values[part]], dark);
    scale.above ||= values[part].some((value) => value > scale.high);
    key.replaceChildren(legend(scale));
    for (const each of lists) {
      each.spans.forEach((span, i) => {
        const { ground, ink } = colours(scale, each === painted ? values[part][i] : NaN);
        span.style.background = ground;
        span.style.color = ink;
        span.setAttribute("aria-selected", String(each === entry && i === group));
      });
    }
    entry.element.setAttribute("aria-activedescendant", entry.spans[group].id);
    strongest(`${from ? "from" : "to"} ${entry.axis.names[group]}`, painted.axis.names, part, values);
  }

  /**
   * A table of the tokens with the largest values.
   * @param {string} of the token that the others are shaded for
   * @param {string[]} tokens
   * @param {string} part that orders them
   * @param {Record<string, number[]>} values
   */
  function strongest(of, tokens, part, values) {
    readout.textContent = `${TITLES[part] ?? part} ${of}`;
    const names = Object.keys(values);
    const { errors } = /** @type {Shading} */ (shading);
    const order = tokens.map((_, i) => i).filter((i) => Number.isFinite(values[part][i]))
      .sort((a, b) => Math.abs(values[part][b]) - Math.abs(values[part][a]));
    const head = ["token", ...names.map((name) => TITLES[name] ?? name)];
    side.replaceChildren(html(
      "table", {}, html("caption", {}, `The strongest, ${of}`),
      html("thead", {}, html("tr", {}, ...head.map((text) => html("th", { scope: "col" }, text)))),
      html("tbody", {}, ...order.slice(0, STRONGEST).map((i) => html(
        "tr", {}, html("th", { scope: "row" }, tokens[i]), ...names.map((name) => html("td", {}, decimal(values[name][i], errors[name]))),
      ))),
    ));
    table = [[of, ...names], ...tokens.map((token, i) => [token, ...names.map((name) => String(values[name][i]))])];
  }

  return {
    draw() {
      const { content, state } = page;
      shading = shadingOf(page);
      const had = lists.findIndex((each) => each.element === document.activeElement);
      absent.hidden = Boolean(shading);
      absent.textContent = state.part === "attribution" ? "There is no attribution of this layer and example in the file." : ABSENT;
      texts.parentElement?.parentElement?.toggleAttribute("hidden", !shading);
      steps.replaceChildren();
      if (!shading) return;
      lists = shading.apart ? [list("queries", shading.queries), list("keys", shading.keys)]
        : [shading.first ? list("keys", shading.keys) : list("queries", shading.queries)];
      texts.replaceChildren(...lists.map((each) => each.element));
      stepping(content.document.examples[state.example].steps);
      rest();
      if (had >= 0) lists[Math.min(had, lists.length - 1)].element.focus();
      host.setAttribute("aria-label", `Text shaded by ${titleOf(content, placeOf(state))}`);
    },
    table: () => table,
  };

  /**
   * Steps of a generation: which token was read last, and which was written.
   * @param {number[] | undefined} rows the last row of each step
   */
  function stepping(rows) {
    if (!rows?.length || !shading || shading.kind === "encoder") return;
    const { state, content } = page;
    const step = Math.min(state.step, rows.length - 1);
    const all = pieces(Content.axes(content.document.examples[state.example], "decoder").queries);
    const name = (/** @type {number} */ i) => (all[i] ? visible(all[i].text).trim() || "␣" : "(the end)");
    const range = html("input", { type: "range", min: 0, max: rows.length - 1, value: step, id: "step", "aria-label": "Step of the generation" });
    range.addEventListener("input", () => {
      const next = Number(/** @type {HTMLInputElement} */ (range).value);
      page.choose({ step: next, token: rows[next], direction: "from" });
      document.getElementById("step")?.focus();
    });
    steps.append(range, html("p", { class: "hint", id: "step-said" }, `Step ${step + 1} of ${rows.length}: read ${name(rows[step])}, wrote ${name(rows[step] + 1)}`));
    for (const { spans, axis, side: whose } of lists) {
      if (shading.kind === "cross" && whose === "keys") continue;
      spans.forEach((span, i) => span.classList.toggle("later", axis.groups[i][0] > rows[step]));
    }
  }
}
