// The figures, drawn with Plotly.

const dark = matchMedia("(prefers-color-scheme: dark)");
const config = { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "resetScale2d"]] };
const colour = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

// Blue to orange is distinct with every kind of colour vision; the middle is the ground.
const signed = () => dark.matches
  ? [[0, "#8ccbff"], [0.25, "#2f7fc1"], [0.5, colour("--middle")], [0.75, "#c96a1c"], [1, "#ffc078"]]
  : [[0, "#08519c"], [0.25, "#6baed6"], [0.5, colour("--middle")], [0.75, "#fd9a4a"], [1, "#a63603"]];
const bar = (more) => ({ thickness: 12, outlinewidth: 0, tickfont: { size: 11 }, ...more });

function layout(more) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, 'DejaVu Sans', sans-serif", size: 12, color: colour("--ink") },
    margin: { l: 60, r: 20, t: 30, b: 40 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--accent") },
    hoverlabel: {
      font: { family: "inherit", size: 13, color: colour("--ink") }, align: "left",
      bgcolor: colour("--ground"), bordercolor: colour("--soft"),
    },
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
  const step = Math.max(1, Math.ceil((count * 13) / room));
  const positions = [];
  for (let i = 0; i < count; i += step) positions.push(i);
  const short = (text) => (text.length > 12 ? `${text.slice(0, 11)}…` : text);
  return axis({
    tickmode: "array", tickvals: positions, ticktext: positions.map((i) => plain(short(name(i)))),
    tickfont: { size: 11 }, ...more,
  });
}

const layerAxis = (layers, more) => axis({
  title: { text: "layer" }, tickvals: layers.map((_, i) => i),
  ticktext: layers.map((layer) => plain(content.layers[layer])), automargin: true, ...more,
});

// As many decimals as tell the cells of a grid apart.
function cellText(values, high) {
  const known = values.flat().filter((value) => value !== null);
  const places = known.every(Number.isInteger) ? 0 : Math.min(3, Math.max(0, 2 - Math.floor(Math.log10(high || 1))));
  return values.map((row) => row.map((value) => (value === null ? "–" : minus(value.toFixed(places)))));
}

// Numbers in the cells, dark on light ones and light on dark ones.
function cellWords(grid, cells, far) {
  const text = cellText(grid.values, far).flat();
  const [heads, flat] = [grid.values[0].length, grid.values.flat()];
  const ink = flat.map((value) => {
    const place = (value - cells.zmin) / (cells.zmax - cells.zmin);
    const bright = cells.colorscale === "Cividis" ? place > 0.5 : dark.matches === Math.abs(place - 0.5) > 0.3;
    return value === null ? colour("--ink") : bright ? "#000000" : "#ffffff";
  });
  return {
    type: "scatter", mode: "text", x: flat.map((_, i) => i % heads), y: flat.map((_, i) => Math.floor(i / heads)),
    text, textfont: { size: heads > 16 ? 9 : 12, color: ink }, hoverinfo: "skip", showlegend: false,
  };
}

function drawOverview() {
  const grid = content.grids[Number(at("field").value)];
  at("meaning").textContent = grid.meaning;
  const known = grid.values.flat().filter((value) => value !== null);
  const heads = grid.values[0].length;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const change = low < 0 && high > 0;
  const far = Math.max(-low, high);
  const cells = {
    type: "heatmap", z: grid.values, colorscale: change ? signed() : "Cividis",
    zmin: change ? -far : low, zmax: change ? far : high === low ? low + 1 : high, xgap: 2, ygap: 2,
    customdata: grid.layers.map((layer, row) => grid.values[row].map((value) => [plain(content.layers[layer]), digits(value, 4)])),
    hovertemplate: `layer %{customdata[0]}, head %{x}<br>${plain(grid.name)} %{customdata[1]}<extra></extra>`,
    colorbar: bar(),
  };
  const row = grid.layers.indexOf(state.layer);
  const edge = { type: "rect", x0: state.head - 0.5, x1: state.head + 0.5, y0: row - 0.5, y1: row + 0.5, layer: "above" };
  const frame = row < 0 ? [] : [
    { ...edge, line: { color: colour("--panel"), width: 6 } },
    { ...edge, line: { color: colour("--mark"), width: 3 } },
  ];
  const words = heads <= 24 ? [cellWords(grid, cells, far)] : [];
  Plotly.react("overview", [cells, ...words, ...mapMarks(grid, heads)], layout({
    height: 96 + Math.max(3, grid.layers.length) * 34, margin: { l: 60, r: 20, t: 30, b: 44 },
    xaxis: axis({ title: { text: "head", standoff: 6 }, dtick: 1, range: [-0.5, heads - 0.5], fixedrange: true }),
    yaxis: layerAxis(grid.layers, { range: [grid.layers.length - 0.5, -0.5], fixedrange: true }),
    shapes: frame,
  }), config);
}

// Dots on the heads whose maps are in the file, where those of others are not.
function mapMarks(grid, heads) {
  const dots = { x: [], y: [] };
  grid.layers.forEach((layer, row) => {
    for (let head = 0; head < heads; head++) {
      if (mapped.has(`${layer}/${head}`)) { dots.x.push(head + 0.4); dots.y.push(row - 0.32); }
    }
  });
  at("dots").hidden = !content.maps.length || dots.x.length === grid.layers.length * heads;
  if (at("dots").hidden) return [];
  const marker = { size: 6, color: "#ffffff", line: { color: "#000000", width: 1 } };
  return [{ type: "scatter", mode: "markers", ...dots, hoverinfo: "skip", showlegend: false, marker }];
}

function limit(parts) {
  const sizes = Object.values(parts).slice(0, 2).flat(2).filter(Number.isFinite).map(Math.abs).sort((a, b) => a - b);
  const place = at("clip").checked ? Math.floor(0.97 * (sizes.length - 1)) : sizes.length - 1;
  return sizes[place] || sizes[sizes.length - 1] || 1;
}

const TITLES = { raw: "raw A", effective: "effective A⊥", null: "null component A − A⊥" };
const unit = 10 ** content.decimals;
const said = (part, value) => `${TITLES[part]} = ${decimal(value, content.decimals)}`;

function drawMaps(parts) {
  at("maps-title").textContent =
    `layer ${content.layers[state.layer]}, head ${state.head}, example ${state.example + 1}`;
  at("absent").hidden = Boolean(parts);
  at("absent").textContent = "The maps of this head and example are not in the file; the notes above say how to get them.";
  for (const id of ["maps", "focus", "maps-bar", "focus-bar"]) at(id).hidden = !parts;
  if (!parts) return;
  const range = limit(parts) / unit;
  const [height, width] = [parts.raw.length, parts.raw[0].length];
  const labels = Array.from({ length: Math.max(width, height) }, (_, i) => label(i));
  const room = Math.max(180, at("maps").clientWidth / 3 - 60);
  const tall = Math.min(640, Math.max(room + 130, Math.min(height, 30) * 14 + 124));
  const traces = Object.entries(parts).map(([part, values], index) => ({
    type: "heatmap", z: values.map((row) => row.map((value) => value / unit)),
    xaxis: `x${index + 1}`, yaxis: "y", coloraxis: "coloraxis", hoverinfo: "text", name: part,
    text: values.map((row, i) => row.map((value, j) => `${labels[i]} → ${labels[j]}<br>${said(part, value)}`)),
  }));
  const figure = layout({
    height: tall, margin: { l: 90, r: 20, t: 34, b: 90 },
    coloraxis: { colorscale: signed(), cmin: -range, cmax: range, colorbar: bar() },
    yaxis: tokenAxis(height, tall - 124, { autorange: "reversed" }),
    annotations: [...Object.values(TITLES).map((text, index) => ({
      text: `<b>${text}</b>`, showarrow: false, xref: `x${index ? index + 1 : ""} domain`, yref: "paper", x: 0, y: 1.01,
      xanchor: "left", yanchor: "bottom",
    })), ...emptiness(parts)],
    shapes: [0, 1, 2].map(followed),
  });
  [0, 1, 2].forEach((index) => {
    figure[`xaxis${index ? index + 1 : ""}`] = tokenAxis(width, room, {
      domain: [index * 0.34, index * 0.34 + 0.32], tickangle: -90, ...(index ? { matches: "x" } : {}),
    });
  });
  Plotly.react("maps", traces, figure, config);
  drawFocus(parts, labels);
}

// A word where a map is blank because all of it is zero.
function emptiness(parts) {
  if (parts.null.flat().some((value) => value !== 0)) return [];
  const text = "zero to all digits:<br>all of this head's<br>attention counts";
  return [{ text, showarrow: false, xref: "x3 domain", yref: "paper", x: 0.5, y: 0.5, font: { size: 13, color: colour("--soft") } }];
}

// A frame around the row or column of the chosen token.
function followed(index) {
  const xref = `x${index ? index + 1 : ""}`;
  const span = [state.token - 0.5, state.token + 0.5];
  const line = { color: colour("--mark"), width: 1.5 };
  return at("row").checked
    ? { type: "rect", xref: `${xref} domain`, yref: "y", x0: 0, x1: 1, y0: span[0], y1: span[1], line }
    : { type: "rect", xref, yref: "y domain", x0: span[0], x1: span[1], y0: 0, y1: 1, line };
}

function drawFocus(parts, labels) {
  const across = at("row").checked;
  const line = (values) => (across ? values[Math.min(state.token, values.length - 1)] : values.map((row) => row[Math.min(state.token, row.length - 1)]));
  const styles = {
    raw: { color: colour("--soft"), shape: "" },
    effective: { color: dark.matches ? "#ffb870" : "#d95f02", shape: "" },
    null: { color: dark.matches ? "#7cc4ff" : "#08519c", shape: "/" },
  };
  const traces = Object.entries(parts).map(([part, values]) => ({
    type: "bar", name: TITLES[part], y: line(values).map((value) => value / unit), x: line(values).map((_, i) => i),
    marker: { color: styles[part].color, pattern: { shape: styles[part].shape } }, hoverinfo: "text", textposition: "none",
    text: line(values).map((value, i) => `${labels[i]}<br>${said(part, value)}`),
  }));
  const count = line(parts.raw).length;
  Plotly.react("focus", traces, layout({
    height: 270, barmode: "group", margin: { l: 60, r: 20, t: 40, b: 84 },
    legend: { orientation: "h", y: 1.18, x: 0 },
    xaxis: tokenAxis(count, at("focus").clientWidth - 80, { tickangle: -60, range: [-0.6, count - 0.4] }),
    yaxis: axis({ showgrid: true, zeroline: true, title: { text: across ? "attention it pays" : "attention it gets" } }),
  }), config);
}

function drawAttribution(block) {
  const place = block ? block.targets.indexOf(state.token) : -1;
  at("attribution-title").textContent = `${name(state.token)} (position ${state.token})`;
  at("attribution").hidden = place < 0;
  if (place < 0) return;
  const [sources, targets] = [block.sources.length, block.targets.length];
  const values = block.layers.map((_, l) =>
    block.sources.map((_, s) => block.numbers[(l * sources + s) * targets + place]));
  const text = values.map((row, l) => row.map((value, s) =>
    `${label(block.sources[s])} in layer ${plain(content.layers[block.layers[l]])}<br>contributes ${decimal(value, 2)} %`));
  const top = Math.max(...values.flat().filter((_, i) => block.sources[i % sources] !== state.token)) / 100;
  Plotly.react("attribution", [{
    type: "heatmap", z: values.map((row) => row.map((value) => value / 100)), x: block.sources, text, hoverinfo: "text",
    colorscale: "Cividis", zmin: 0, zmax: top > 0 ? top : 1, xgap: 1, ygap: 1, colorbar: bar({ ticksuffix: " %" }),
  }], layout({
    height: 150 + block.layers.length * 26, margin: { l: 60, r: 20, t: 30, b: 90 },
    xaxis: tokenAxis(Math.max(...block.sources) + 1, at("attribution").clientWidth - 100, { tickangle: -60 }),
    yaxis: layerAxis(block.layers, { autorange: "reversed" }),
  }), config);
}

const MARKERS = ["circle", "square", "diamond", "triangle-up", "x", "star"];
const LINES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const BRIGHT_LINES = ["#56b4e9", "#ff8c42", "#2fc99b", "#e8a4cc", "#f0c14b", "#b3b3ff"];

function drawCurves() {
  const curve = content.curves[Number(at("curve").value)];
  at("curve-meaning").textContent = curve.meaning;
  const lines = dark.matches ? BRIGHT_LINES : LINES;
  Plotly.react("curves", curve.labels.map((text, i) => ({
    type: "scatter", mode: "lines+markers", name: plain(text), x: curve.layers.map((_, row) => row), y: curve.values[i],
    line: { color: lines[i % 6], dash: text.startsWith("control") ? "dot" : "solid" }, marker: { symbol: MARKERS[i % 6], size: 8 },
    customdata: curve.values[i].map((value) => digits(value, 4)), hovertemplate: "%{customdata}<extra>%{fullData.name}</extra>",
  })), layout({
    height: 300, showlegend: curve.labels.length > 1, margin: { l: 60, r: 20, t: 14, b: 44 },
    xaxis: layerAxis(curve.layers), yaxis: axis({ showgrid: true, rangemode: "tozero" }),
  }), config);
}
