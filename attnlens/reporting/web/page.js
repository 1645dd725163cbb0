// @ts-check
// What a person chooses, and what follows from it.

import { attributionView } from "./attribution.js";
import { besideView } from "./beside.js";
import { Content, MEAN } from "./content.js";
import { curvesView } from "./curves.js";
import { at, html, offer } from "./elements.js";
import { DEFAULTS, read, written } from "./fragment.js";
import { headsView, scopes } from "./heads.js";
import { linesView } from "./lines.js";
import { mapsView } from "./maps.js";
import { modelView, sortings } from "./model.js";
import { saveAs } from "./saving.js";
import { textView } from "./text.js";
import { TITLES } from "./shown.js";
import { nameOf, pieces, visible } from "./tokens.js";

/** @typedef {import("./content.js").Document} Document */
/** @typedef {import("./fragment.js").State} State */
/** @typedef {{ draw: () => void, table: () => string[][] }} View */

/** @type {[string, string, (page: import("./shown.js").Page, host: HTMLElement) => View, (document: Document) => boolean][]} */
const VIEWS = [
  ["maps", "Maps", mapsView, ({ maps }) => maps.length > 0],
  ["text", "Text", textView, ({ maps, attribution }) => maps.length + attribution.length > 0],
  ["model", "All heads", modelView, ({ maps }) => maps.length > 0],
  ["lines", "Lines", linesView, ({ maps }) => maps.length > 0],
  ["beside", "Side by side", besideView, ({ maps }) => maps.length > 0],
  ["attribution", "Attribution", attributionView, ({ attribution }) => attribution.length > 0],
  ["curves", "By layer", curvesView, ({ curves }) => curves.length > 0],
];

const content = new Content(JSON.parse(at("content").textContent ?? ""));
const all = content.document;
const darkness = matchMedia("(prefers-color-scheme: dark)");
const present = VIEWS.filter(([, , , there]) => there(all));
/** @type {State} */
const state = { ...DEFAULTS };
/** @type {State} */
let opening = { ...DEFAULTS };
/** @type {Map<string, View>} */
const views = new Map();
const page = { content, state, get dark() { return darkness.matches; }, choose };
const heads = all.grids.length ? headsView(page) : null;
const controls = /** @type {(HTMLSelectElement | HTMLInputElement)[]} */ (Array.from(document.querySelectorAll("[data-state]")));

const layersWithHeads = [...new Set([
  ...all.grids.flatMap((grid) => grid.layers), ...all.maps.map((block) => block.layer),
])].sort((a, b) => a - b);
const headCount = Math.max(0, ...all.grids.map((grid) => grid.values[0].length), ...all.maps.flatMap((block) => block.heads).map((head) => head + 1));

/** Tokens that can be followed: of the queries or of the keys of what is shown. */
function tokens() {
  const example = all.examples[state.example];
  if (!example) return [];
  const kind = content.block(state)?.kind ?? "encoder";
  return Content.axes(example, kind)[state.direction === "from" ? "queries" : "keys"];
}

/**
 * Change what is chosen, and show it.
 * @param {Partial<State>} change
 */
function choose(change) {
  Object.assign(state, change);
  settle();
  try {
    history.replaceState(null, "", `#${written(state, opening)}`);
  } catch { /* a page within a page may have no address of its own */ }
  draw();
}

/** Keep every choice within what there is. */
function settle() {
  const last = (/** @type {number} */ value, /** @type {number} */ count) => Math.max(0, Math.min(value, count - 1));
  if (!present.some(([id]) => id === state.view)) state.view = present[0]?.[0] ?? "";
  for (const [name, count] of /** @type {const} */ ([
    ["model", all.models.length], ["model2", all.models.length], ["example", all.examples.length], ["example2", all.examples.length],
    ["field", all.grids.length], ["curve", all.curves.length],
  ])) state[name] = last(state[name], count);
  for (const name of /** @type {const} */ (["layer", "layer2"])) if (!layersWithHeads.includes(state[name])) state[name] = layersWithHeads[0] ?? 0;
  for (const name of /** @type {const} */ (["head", "head2"])) if (state[name] !== MEAN) state[name] = last(state[name], headCount);
  state.token = last(state.token, tokens().length);
  for (const name of /** @type {const} */ (["part", "direction", "hide", "pairs"])) {
    const select = /** @type {HTMLSelectElement} */ (at(name));
    if (!Array.from(select.options).some((option) => option.value === state[name])) state[name] = DEFAULTS[name];
  }
}

function draw() {
  at("page").setAttribute("aria-busy", "true");
  fillTokens();
  for (const control of controls) {
    const value = state[/** @type {keyof State} */ (control.dataset.state)];
    if (control instanceof HTMLInputElement && control.type === "checkbox") control.checked = Boolean(value);
    else if (control.value !== String(value)) control.value = String(value);
    const views_ = control.closest("label")?.dataset.views?.split(" ");
    const label = control.closest("label");
    if (label) label.hidden = label.dataset.absent === "true" || (views_ !== undefined && !views_.includes(state.view));
  }
  heads?.draw();
  at("status").replaceChildren(...scopes(page).map((text) => html("span", {}, text)));
  for (const [id, , make] of present) {
    const host = at(`view-${id}`);
    const here = id === state.view;
    at(`panel-${id}`).hidden = !here;
    const tab = at(`tab-${id}`);
    tab.setAttribute("aria-selected", String(here));
    tab.tabIndex = here ? 0 : -1;
    if (!here) continue;
    const view = views.get(id) ?? make(page, host);
    views.set(id, view);
    view.draw();
  }
  at("page").setAttribute("aria-busy", "false");
}

let listed = "";

function fillTokens() {
  const names = tokens();
  const key = names.join("\n");
  if (key === listed) return;
  listed = key;
  const parts = pieces(names);
  offer(/** @type {HTMLSelectElement} */ (at("token")), names.map((_, i) => [i, `${i}: ${nameOf(parts, [i])}`]));
}

/** @param {string[]} tokens_ */
function preview(tokens_) {
  const text = pieces(tokens_.slice(0, 14)).filter((piece) => !piece.special).map((piece) => visible(piece.text)).join("").trim();
  return text.length > 48 ? `${text.slice(0, 48)}…` : text;
}

function offerAll() {
  const { examples, maps, layers, models } = all;
  const mapped = new Set(maps.map((block) => block.example)).size;
  const stepped = examples.some((example) => example.steps); // their grids count steps
  const counted = Math.max(0, ...(stepped ? [] : all.grids.map((grid) => grid.examples ?? 0)), examples.length);
  const count = `${counted} example${counted === 1 ? "" : "s"}`;
  at("subject").textContent = [
    all.model, counted ? (maps.length && mapped < counted ? `${count}, maps of ${mapped === 1 ? "the first" : `the first ${mapped}`}` : count) : "",
  ].filter(Boolean).join(" · ");
  const select = (/** @type {string} */ id, /** @type {[string | number, string][]} */ entries) => offer(/** @type {HTMLSelectElement} */ (at(id)), entries);
  const headNames = /** @type {[number, string][]} */ ([...Array.from({ length: headCount }, (_, head) => [head, String(head)]), ...(maps.length ? [[MEAN, "mean"]] : [])]);
  for (const suffix of ["", "2"]) {
    select(`model${suffix}`, models.map((name, i) => [i, name]));
    select(`example${suffix}`, examples.map((example, i) => [i, `${i + 1}: ${preview(example.tokens)}`]));
    select(`layer${suffix}`, layersWithHeads.map((layer) => [layer, layers[layer]]));
    select(`head${suffix}`, headNames);
  }
  select("field", all.grids.map((grid, i) => [i, grid.name]));
  select("curve", all.curves.map((curve, i) => [i, curve.name]));
  select("sort", sortings(all.grids));
  const first = maps.length ? Object.keys(content.parts(maps[0], 0)) : [];
  select("part", [...first.map((name) => /** @type {[string, string]} */ ([name, TITLES[name] ?? name])), ...(all.attribution.length ? [/** @type {[string, string]} */ (["attribution", "attribution"])] : [])]);
  const absent = {
    model: models.length < 2, model2: models.length < 2, example: !examples.length, token: !examples.length, layer: !headCount, head: !headCount,
    pairs: !examples.some((example) => example.segments?.includes(1)),
  };
  for (const [id, missing] of Object.entries(absent)) {
    const label = at(id).closest("label");
    if (label) label.dataset.absent = String(missing);
  }
  at("heads-section").hidden = !all.grids.length;
  at("views-section").hidden = !present.length;
  at("tabs").replaceChildren(...present.map(([id, name]) => html(
    "button", { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": `panel-${id}` }, name,
  )));
  for (const [id] of VIEWS) at(`panel-${id}`).hidden = true;
}

function note() {
  at("notes").hidden = !all.notes.length;
  at("notes").replaceChildren(...all.notes.map((text) => html("li", {}, text)));
  at("facts").replaceChildren(...Object.entries({ ...all.settings, ...all.versions }).flatMap(([key, value]) => [
    html("dt", {}, key), html("dd", {}, value !== null && typeof value === "object" ? JSON.stringify(value) : String(value ?? "–")),
  ]));
}

function listen() {
  for (const control of controls) {
    control.addEventListener("change", () => {
      const name = /** @type {keyof State} */ (control.dataset.state);
      const checkbox = control instanceof HTMLInputElement && control.type === "checkbox";
      const value = checkbox ? control.checked : typeof DEFAULTS[name] === "number" ? Number(control.value) : typeof DEFAULTS[name] === "boolean" ? control.value === "true" : control.value;
      choose({ [name]: value });
    });
  }
  const tabs = present.map(([id]) => id);
  at("tabs").addEventListener("click", (event) => {
    const tab = event.target instanceof Element && event.target.closest("[role=tab]");
    if (tab) choose({ view: tab.id.replace("tab-", "") });
  });
  at("tabs").addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    choose({ view: tabs[(tabs.indexOf(state.view) + step + tabs.length) % tabs.length] });
    at(`tab-${state.view}`).focus();
  });
  for (const kind of /** @type {const} */ (["png", "svg", "csv"])) {
    at(`save-${kind}`).addEventListener("click", () => {
      const name = ["attnlens", state.view, `layer${state.layer}`, `head${state.head}`, `example${state.example + 1}`].join("-");
      saveAs(kind, name, at(`view-${state.view}`), views.get(state.view)?.table() ?? []);
    });
  }
  const help = /** @type {HTMLDialogElement} */ (at("help"));
  at("help-open").addEventListener("click", () => help.showModal());
  at("help-close").addEventListener("click", () => help.close());
  document.addEventListener("keydown", (event) => {
    const typing = event.target instanceof Element && event.target.matches("input, select");
    if (event.key === "?" && !typing && !help.open) help.showModal();
  });
  darkness.addEventListener("change", draw);
  addEventListener("hashchange", () => { Object.assign(state, opening, read(location.hash)); settle(); draw(); });
  let width = at("page").clientWidth;
  new ResizeObserver(() => { if (width !== at("page").clientWidth) { width = at("page").clientWidth; draw(); } }).observe(at("page"));
}

/** What to begin with: the longest example with maps, and of its heads the one with the most null. */
function beginning() {
  const places = all.maps.length ? [...new Set(all.maps.map((block) => block.example))] : all.examples.map((_, i) => i);
  const example = places.reduce((a, b) => (all.examples[b].length > all.examples[a].length ? b : a), places[0] ?? 0);
  const there = all.maps.filter((block) => block.example === example && block.model === 0)
    .flatMap((block) => block.maps.map((map, i) => ({ layer: block.layer, head: block.heads[i], fraction: map.fraction ?? 1 })));
  const best = there.reduce((a, b) => (b.fraction < a.fraction ? b : a), there[0] ?? { layer: layersWithHeads[0] ?? 0, head: 0, fraction: 1 });
  const two = all.models.length > 1;
  const view = two ? "beside" : all.examples[example]?.steps ? "text" : present[0]?.[0] ?? "";
  const { layer, head } = best;
  const second = { model2: two ? 1 : 0, example2: example, layer2: layer, head2: two ? head : (head + 1) % Math.max(1, headCount) };
  return { ...DEFAULTS, view, example, layer, head, ...second };
}

offerAll();
note();
Object.assign(state, beginning());
settle();
opening = { ...state };
Object.assign(state, read(location.hash));
settle();
at("loading").hidden = true;
at("page").hidden = false;
listen();
draw();
