// What a person chooses, and what follows from it.

let turn = 0;

async function draw() {
  const mine = ++turn;
  at("page").setAttribute("aria-busy", "true");
  const [parts, attribution] = await Promise.all([
    mapsOf(state.example, state.layer, state.head), attributionOf(state.example),
  ]);
  if (mine !== turn) return; // something else has been chosen meanwhile
  if (content.grids.length) drawOverview();
  if (content.maps.length) drawMaps(parts);
  if (content.attribution.length) drawAttribution(attribution);
  if (content.curves.length) drawCurves();
  drawStatus();
  at("page").setAttribute("aria-busy", "false");
}

function drawStatus() {
  const facts = content.grids.filter((grid) => ["effective fraction", "rank", "entropy", "importance"].includes(grid.name)).map((grid) => {
    const row = grid.layers.indexOf(state.layer);
    const value = row < 0 ? null : grid.values[row][state.head];
    return value === null || value === undefined ? "" : `${grid.name} ${digits(value, 3)}`;
  });
  at("status").textContent = facts.filter(Boolean).join(" · ");
}

function fill(select, entries, chosen) {
  select.replaceChildren(...entries.map(([value, text]) => {
    const option = document.createElement("option");
    option.value = value;
    option.textContent = text;
    return option;
  }));
  select.value = String(chosen);
}

function headCount() {
  const wide = content.grids.map((grid) => grid.values[0].length);
  return Math.max(0, ...wide, ...content.maps.flatMap((block) => block.heads).map((head) => head + 1));
}

const headLayers = () => [...new Set([
  ...content.grids.flatMap((grid) => grid.layers), ...content.maps.map((block) => block.layer),
])].sort((a, b) => a - b);

function choose(change) {
  Object.assign(state, change);
  if ("example" in change) {
    state.token = Math.min(state.token, Math.max(0, tokens().length - 1));
    fill(at("token"), tokens().map((_, i) => [i, `${i}: ${name(i)}`]), state.token);
  }
  for (const id of ["example", "layer", "head", "token"]) at(id).value = String(state[id]);
  return draw();
}

function preview(example) {
  const text = example.tokens.slice(0, 12).map(visible).join(" ");
  return text.length > 48 ? `${text.slice(0, 48)}…` : text;
}

function offer() {
  const count = content.examples.length;
  at("subject").textContent = [content.model, count ? `${count} example${count > 1 ? "s" : ""}` : ""].filter(Boolean).join(" · ");
  fill(at("example"), content.examples.map((example, i) => [i, `${i + 1}: ${preview(example)}`]), 0);
  fill(at("layer"), headLayers().map((layer) => [layer, content.layers[layer]]), 0);
  fill(at("head"), Array.from({ length: headCount() }, (_, head) => [head, head]), 0);
  fill(at("field"), content.grids.map((grid, i) => [i, grid.name]), 0);
  fill(at("curve"), content.curves.map((curve, i) => [i, curve.name]), 0);
  const shown = {
    "overview-section": content.grids.length, "maps-section": content.maps.length,
    "attribution-section": content.attribution.length, "curves-section": content.curves.length,
  };
  for (const [id, present] of Object.entries(shown)) at(id).hidden = !present;
  for (const id of ["example", "token"]) at(id).parentElement.hidden = !count;
  for (const id of ["layer", "head"]) at(id).parentElement.hidden = !headCount();
}

function notes() {
  at("notes").hidden = !content.notes.length;
  at("notes").replaceChildren(...content.notes.map((note) => {
    const item = document.createElement("li");
    item.textContent = note;
    return item;
  }));
  const facts = { ...content.settings, ...content.versions };
  at("facts").replaceChildren(...Object.entries(facts).flatMap(([key, value]) => {
    const [term, detail] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = key;
    detail.textContent = value !== null && typeof value === "object" ? JSON.stringify(value) : String(value ?? "–");
    return [term, detail];
  }));
}

function listen() {
  for (const id of ["example", "layer", "head", "token"]) {
    at(id).addEventListener("change", (event) => choose({ [id]: Number(event.target.value) }));
  }
  for (const id of ["field", "curve", "clip", "row", "column"]) at(id).addEventListener("change", draw);
  const click = (id, then) => at(id).on && at(id).on("plotly_click", (event) => then(event.points[0]));
  click("overview", (point) => choose({ layer: content.grids[Number(at("field").value)].layers[point.y], head: point.x }));
  click("maps", (point) => choose({ token: at("row").checked ? point.y : point.x }));
  click("focus", (point) => choose({ token: point.x }));
  click("attribution", (point) => choose({ token: point.x }));
  at("overview").addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const grid = content.grids[Number(at("field").value)];
    const within = (value, count) => Math.min(Math.max(value, 0), count - 1);
    const row = within(grid.layers.indexOf(state.layer) + step[0], grid.layers.length);
    choose({ layer: grid.layers[row], head: within(state.head + step[1], grid.values[0].length) });
  });
  dark.addEventListener("change", draw);
}

// What to begin with: the longest example, and of its heads with maps the one with the most null.
function first() {
  const longest = Math.max(0, ...content.examples.map((entry) => entry.length));
  const example = Math.max(0, content.examples.findIndex((entry) => entry.length === longest));
  const grid = content.grids.find((entry) => entry.name === "effective fraction");
  const fraction = ({ layer, head }) => (grid && grid.values[grid.layers.indexOf(layer)]?.[head]) ?? 1;
  const there = content.maps.filter((block) => block.example === example)
    .flatMap((block) => block.heads.map((head) => ({ layer: block.layer, head })));
  return there.reduce((best, next) => ("head" in best && fraction(best) <= fraction(next) ? best : { example, ...next }), { example });
}

async function start() {
  if (typeof DecompressionStream === "undefined") {
    at("loading").textContent = "This browser cannot unpack the page. Any from 2023 or later can.";
    return;
  }
  offer();
  notes();
  const library = document.createElement("script");
  library.textContent = await (await unpacked(at("plotly").textContent)).text();
  document.head.append(library);
  at("loading").hidden = true;
  at("page").hidden = false;
  await choose({ layer: headLayers()[0] ?? 0, ...first() });
  listen();
}

start();
