
"use strict";
(() => {
  const content = JSON.parse(document.getElementById("content").textContent);
  const at = (id) => document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const config = { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "resetScale2d"]] };
  const digits = content.maps.half ? 3 : 4;
  const maps = new Map();
  for (const entry of content.maps.entries) maps.set(`${entry.example}/${entry.layer}/${entry.head}`, entry);
  const mapped = new Set(content.maps.entries.map((entry) => `${entry.layer}/${entry.head}`));
  const state = { example: 0, layer: 0, head: 0, token: 0 };

  // --- data

  function bytes(text) {
    const binary = atob(text);
    const found = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) found[i] = binary.charCodeAt(i);
    return found;
  }

  function fromHalf(half) {
    const exponent = (half >> 10) & 31;
    const fraction = half & 1023;
    const sign = half & 32768 ? -1 : 1;
    if (exponent === 0) return sign * fraction * 2 ** -24;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  }

  function numbers(text, half) {
    const buffer = bytes(text).buffer;
    return half ? Float64Array.from(new Uint16Array(buffer), fromHalf) : new Float32Array(buffer);
  }

  function rows(flat, count, width) {
    return Array.from({ length: count }, (_, i) => Array.from(flat.subarray(i * width, (i + 1) * width)));
  }

  function mapOf(example, layer, head) {
    const entry = maps.get(`${example}/${layer}/${head}`);
    if (!entry) return null;
    if (!entry.parts) {
      const raw = rows(numbers(entry.raw, content.maps.half), entry.rows, entry.columns);
      const effective = rows(numbers(entry.effective, content.maps.half), entry.rows, entry.columns);
      const rest = raw.map((row, i) => row.map((value, j) => value - effective[i][j]));
      entry.parts = { raw, effective, null: rest };
    }
    return entry.parts;
  }

  const attributions = new Map();
  for (const entry of content.attribution) attributions.set(entry.example, entry);

  function attributionOf(example) {
    const entry = attributions.get(example);
    if (entry && !entry.numbers) entry.numbers = numbers(entry.values, true);
    return entry;
  }

  // --- words

  // Plotly reads a few tags and entities in its labels; a token is never markup.
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const visible = (text) => (text === "" ? "∅" : text.replace(/[\u0000-\u001f\u007f-\u009f\u2028\u2029\u202a-\u202e\u2066-\u2069]/g, "␣"));
  const number = (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(digits))) : "–");
  const tokens = () => (content.examples[state.example] || { tokens: [] }).tokens;
  const name = (position) => visible(tokens()[position] ?? String(position));
  const label = (position) => plain(name(position));

  function colour(variable) {
    return getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
  }

  // Blue to orange is distinct with every kind of colour vision; the middle is the ground.
  const signed = () => dark.matches
    ? [[0, "#7cc4ff"], [0.25, "#2f7fc1"], [0.5, colour("--middle")], [0.75, "#c96a1c"], [1, "#ffb870"]]
    : [[0, "#08519c"], [0.25, "#6baed6"], [0.5, colour("--middle")], [0.75, "#fd9a4a"], [1, "#a63603"]];

  function layout(more) {
    return {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, 'DejaVu Sans', sans-serif", size: 12, color: colour("--ink") },
      margin: { l: 60, r: 20, t: 30, b: 40 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--accent") },
      hoverlabel: { font: { family: "inherit", size: 13 }, align: "left" },
      ...more,
    };
  }

  function axis(more) {
    return {
      gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"),
      showgrid: false, zeroline: false, ticks: "", ...more,
    };
  }

  function tokenAxis(count, room, more) {
    const step = Math.max(1, Math.ceil((count * 11) / room));
    const positions = [];
    for (let i = 0; i < count; i += step) positions.push(i);
    const short = (text) => (text.length > 12 ? `${text.slice(0, 11)}…` : text);
    return axis({
      tickmode: "array", tickvals: positions, ticktext: positions.map((i) => plain(short(name(i)))),
      tickfont: { size: 10 }, ...more,
    });
  }

  // --- choices

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
    return Math.max(0, ...wide, ...content.maps.entries.map((entry) => entry.head + 1));
  }

  const headLayers = () => [...new Set([
    ...content.grids.flatMap((grid) => grid.layers), ...content.maps.entries.map((entry) => entry.layer),
  ])].sort((a, b) => a - b);

  function choose(change) {
    Object.assign(state, change);
    if ("example" in change) {
      state.token = Math.min(state.token, Math.max(0, tokens().length - 1));
      fill(at("token"), tokens().map((_, i) => [i, `${i}: ${name(i)}`]), state.token);
    }
    for (const id of ["example", "layer", "head", "token"]) at(id).value = String(state[id]);
    draw();
  }

  // --- figures

  function drawOverview() {
    const grid = content.grids[Number(at("field").value)];
    at("meaning").textContent = grid.meaning;
    const known = grid.values.flat().filter((value) => value !== null);
    const heads = grid.values[0].length;
    const dots = { x: [], y: [] };
    grid.layers.forEach((layer, row) => {
      for (let head = 0; head < heads; head++) {
        if (mapped.has(`${layer}/${head}`)) { dots.x.push(head + 0.4); dots.y.push(row - 0.34); }
      }
    });
    const high = Math.max(...known);
    const low = Math.min(...known);
    const text = grid.values.map((row) => row.map((value) => (value === null ? "–" : String(Number(value.toPrecision(3))))));
    const cells = {
      type: "heatmap", z: grid.values, colorscale: "Cividis", zmin: low, zmax: high === low ? low + 1 : high,
      xgap: 2, ygap: 2, text, texttemplate: heads <= 24 ? "%{text}" : "", textfont: { size: heads > 16 ? 9 : 11 },
      customdata: grid.layers.map((layer) => grid.values[0].map(() => plain(content.layers[layer]))),
      hovertemplate: `layer %{customdata}, head %{x}<br>${plain(grid.name)} %{z:.4g}<extra></extra>`,
      colorbar: { thickness: 12, outlinewidth: 0 },
    };
    const marks = {
      type: "scatter", mode: "markers", ...dots, hoverinfo: "skip", showlegend: false,
      marker: { size: 5, color: "#ffffff", line: { color: "#000000", width: 1 } },
    };
    const row = grid.layers.indexOf(state.layer);
    const frame = row < 0 ? [] : [{
      type: "rect", x0: state.head - 0.5, x1: state.head + 0.5, y0: row - 0.5, y1: row + 0.5,
      line: { color: dark.matches ? "#ff9d5c" : "#d1460f", width: 3 }, layer: "above",
    }];
    Plotly.react("overview", [cells, marks], layout({
      height: 90 + Math.max(3, grid.layers.length) * 34,
      xaxis: axis({ title: { text: "head" }, dtick: 1, range: [-0.5, heads - 0.5], fixedrange: true }),
      yaxis: axis({
        title: { text: "layer" }, tickvals: grid.layers.map((_, i) => i),
        ticktext: grid.layers.map((layer) => plain(content.layers[layer])),
        range: [grid.layers.length - 0.5, -0.5], fixedrange: true, automargin: true,
      }),
      shapes: frame,
    }), config);
  }

  function limit(parts) {
    const sizes = [...parts.raw.flat(), ...parts.effective.flat()].map(Math.abs).sort((a, b) => a - b);
    const place = at("clip").checked ? Math.floor(0.99 * (sizes.length - 1)) : sizes.length - 1;
    return sizes[place] || sizes[sizes.length - 1] || 1;
  }

  const TITLES = { raw: "raw A", effective: "effective A⊥", null: "null component A − A⊥" };

  function drawMaps() {
    const parts = mapOf(state.example, state.layer, state.head);
    at("maps-title").textContent =
      `layer ${content.layers[state.layer]}, head ${state.head}, example ${state.example + 1}`;
    at("absent").hidden = Boolean(parts);
    at("absent").textContent = "The maps of this head and example are not in the file, to keep it small.";
    for (const id of ["maps", "focus"]) at(id).hidden = !parts;
    if (!parts) return;
    const range = limit(parts);
    const height = parts.raw.length;
    const width = parts.raw[0].length;
    const labels = Array.from({ length: Math.max(width, height) }, (_, i) => label(i));
    const room = Math.max(180, at("maps").clientWidth / 3 - 60);
    const traces = Object.entries(parts).map(([part, values], index) => ({
      type: "heatmap", z: values, xaxis: `x${index + 1}`, yaxis: "y", coloraxis: "coloraxis",
      text: values.map((row, i) => row.map((value, j) => `${labels[i]} → ${labels[j]}<br>${TITLES[part]} = ${number(value)}`)),
      hoverinfo: "text", name: part,
    }));
    const figure = layout({
      height: Math.min(620, room + 130), margin: { l: 90, r: 20, t: 34, b: 90 },
      coloraxis: { colorscale: signed(), cmin: -range, cmax: range, colorbar: { thickness: 12, outlinewidth: 0 } },
      yaxis: tokenAxis(height, Math.min(620, room + 130) - 124, { autorange: "reversed" }),
      annotations: Object.values(TITLES).map((text, index) => ({
        text: `<b>${text}</b>`, showarrow: false, xref: `x${index ? index + 1 : ""} domain`, yref: "paper", x: 0, y: 1.01,
        xanchor: "left", yanchor: "bottom",
      })),
      shapes: [0, 1, 2].map((index) => {
        const line = { color: colour("--accent"), width: 1.5 };
        const across = at("row").checked;
        const xref = `x${index ? index + 1 : ""}`;
        return across
          ? { type: "rect", xref: `${xref} domain`, yref: "y", x0: 0, x1: 1, y0: state.token - 0.5, y1: state.token + 0.5, line }
          : { type: "rect", xref, yref: "y domain", x0: state.token - 0.5, x1: state.token + 0.5, y0: 0, y1: 1, line };
      }),
    });
    [0, 1, 2].forEach((index) => {
      figure[`xaxis${index ? index + 1 : ""}`] = tokenAxis(width, room, {
        domain: [index * 0.34, index * 0.34 + 0.32], tickangle: -90, ...(index ? { matches: "x" } : {}),
      });
    });
    Plotly.react("maps", traces, figure, config);
    drawFocus(parts, labels);
  }

  function drawFocus(parts, labels) {
    const across = at("row").checked;
    const line = (values) => (across ? values[Math.min(state.token, values.length - 1)] : values.map((row) => row[Math.min(state.token, row.length - 1)]));
    const styles = {
      raw: { color: colour("--soft"), pattern: "" },
      effective: { color: dark.matches ? "#ffb870" : "#d95f02", pattern: "" },
      null: { color: dark.matches ? "#7cc4ff" : "#08519c", pattern: "/" },
    };
    const traces = Object.entries(parts).map(([part, values]) => {
      const numbers = line(values);
      return {
        type: "bar", name: TITLES[part], y: numbers, x: numbers.map((_, i) => i),
        marker: { color: styles[part].color, pattern: { shape: styles[part].pattern } },
        text: numbers.map((value, i) => `${labels[i]}<br>${TITLES[part]} = ${number(value)}`), hoverinfo: "text", textposition: "none",
      };
    });
    const count = line(parts.raw).length;
    Plotly.react("focus", traces, layout({
      height: 260, barmode: "group", margin: { l: 60, r: 20, t: 40, b: 80 },
      legend: { orientation: "h", y: 1.18, x: 0 },
      xaxis: tokenAxis(count, at("focus").clientWidth - 80, { tickangle: -60 }),
      yaxis: axis({
        showgrid: true, zeroline: true,
        title: { text: across ? "attention it pays" : "attention it gets" },
      }),
    }), config);
  }

  function drawAttribution() {
    const entry = attributionOf(state.example);
    const place = entry ? entry.targets.indexOf(state.token) : -1;
    at("attribution-title").textContent = `${name(state.token)} (position ${state.token})`;
    at("attribution").hidden = place < 0;
    if (place < 0) return;
    const [sources, targets] = [entry.sources.length, entry.targets.length];
    const values = entry.layers.map((_, l) =>
      entry.sources.map((_, s) => entry.numbers[(l * sources + s) * targets + place]));
    const text = values.map((row, l) => row.map((value, s) =>
      `${label(entry.sources[s])} in layer ${plain(content.layers[entry.layers[l]])}<br>contributes ${(100 * value).toPrecision(3)} %`));
    const top = Math.max(...values.flat().filter((_, i) => entry.sources[i % sources] !== state.token));
    Plotly.react("attribution", [{
      type: "heatmap", z: values, x: entry.sources, text, hoverinfo: "text", colorscale: "Cividis",
      zmin: 0, zmax: top > 0 ? top : 1, xgap: 1, ygap: 1, colorbar: { thickness: 12, outlinewidth: 0 },
    }], layout({
      height: 130 + entry.layers.length * 26, margin: { l: 60, r: 20, t: 10, b: 90 },
      xaxis: tokenAxis(Math.max(...entry.sources) + 1, at("attribution").clientWidth - 100, { tickangle: -60 }),
      yaxis: axis({
        title: { text: "layer" }, tickvals: entry.layers.map((_, i) => i),
        ticktext: entry.layers.map((layer) => plain(content.layers[layer])), autorange: "reversed",
      }),
    }), config);
  }

  const MARKERS = ["circle", "square", "diamond", "triangle-up", "x", "star"];
  const LINES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

  function drawCurves() {
    const curve = content.curves[Number(at("curve").value)];
    Plotly.react("curves", curve.labels.map((text, i) => ({
      type: "scatter", mode: "lines+markers", name: plain(text), x: curve.layers, y: curve.values[i],
      line: { color: LINES[i % 6] }, marker: { symbol: MARKERS[i % 6], size: 8 },
      hovertemplate: "%{y:.4g}<extra>%{fullData.name}</extra>",
    })), layout({
      height: 300, showlegend: curve.labels.length > 1,
      xaxis: axis({
        title: { text: "layer" }, tickvals: curve.layers,
        ticktext: curve.layers.map((layer) => plain(content.layers[layer])),
      }),
      yaxis: axis({ showgrid: true, rangemode: "tozero" }),
    }), config);
  }

  function drawStatus() {
    const facts = content.grids.filter((grid) => ["effective fraction", "rank", "entropy", "importance"].includes(grid.name)).map((grid) => {
      const row = grid.layers.indexOf(state.layer);
      const value = row < 0 ? null : grid.values[row][state.head];
      return value === null || value === undefined ? "" : `${grid.name} ${Number(value.toPrecision(3))}`;
    });
    at("status").textContent = facts.filter(Boolean).join(" · ");
  }

  const hasHeads = content.grids.length + content.maps.entries.length > 0;

  function draw() {
    if (content.grids.length) drawOverview();
    if (content.maps.entries.length) drawMaps();
    if (content.attribution.length) drawAttribution();
    if (content.curves.length) drawCurves();
    drawStatus();
  }

  // --- start

  function start() {
    const count = content.examples.length;
    at("subject").textContent = [content.model, count ? `${count} example${count > 1 ? "s" : ""}` : ""].filter(Boolean).join(" · ");
    const preview = (example) => {
      const text = example.tokens.slice(0, 9).map(visible).join(" ");
      return text.length > 40 ? `${text.slice(0, 40)}…` : text;
    };
    fill(at("example"), content.examples.map((example, i) => [i, `${i + 1}: ${preview(example)}`]), 0);
    fill(at("layer"), headLayers().map((layer) => [layer, content.layers[layer]]), 0);
    fill(at("head"), Array.from({ length: headCount() }, (_, head) => [head, head]), 0);
    fill(at("field"), content.grids.map((grid, i) => [i, grid.name]), 0);
    fill(at("curve"), content.curves.map((curve, i) => [i, curve.name]), 0);
    const shown = {
      "overview-section": content.grids.length, "maps-section": content.maps.entries.length,
      "attribution-section": content.attribution.length, "curves-section": content.curves.length,
    };
    for (const [id, present] of Object.entries(shown)) at(id).hidden = !present;
    for (const id of ["example", "token"]) at(id).parentElement.hidden = !count;
    for (const id of ["layer", "head"]) at(id).parentElement.hidden = !hasHeads;
    footer();
    for (const id of ["example", "layer", "head", "token"]) {
      at(id).addEventListener("change", (event) => choose({ [id]: Number(event.target.value) }));
    }
    for (const id of ["field", "curve", "clip", "row", "column"]) at(id).addEventListener("change", draw);
    const first = content.maps.entries[0];
    choose({ example: 0, ...(first ? { layer: first.layer, head: first.head } : {}) });
    listen();
    dark.addEventListener("change", draw);
  }

  function footer() {
    at("notes").replaceChildren(...content.notes.map((note) => {
      const item = document.createElement("li");
      item.textContent = note;
      return item;
    }));
    const facts = { ...content.settings, ...content.versions };
    at("facts").replaceChildren(...Object.entries(facts).flatMap(([key, value]) => {
      const [term, detail] = [document.createElement("dt"), document.createElement("dd")];
      term.textContent = key;
      detail.textContent = typeof value === "object" ? JSON.stringify(value) : String(value);
      return [term, detail];
    }));
  }

  function listen() {
    const click = (id, then) => at(id).on && at(id).on("plotly_click", (event) => then(event.points[0]));
    click("overview", (point) => {
      const grid = content.grids[Number(at("field").value)];
      choose({ layer: grid.layers[point.pointIndex ? point.pointIndex[0] : point.y], head: point.x });
    });
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
  }

  start();
})();
