// What the page holds: tokens, and numbers as decimal integers.

const content = JSON.parse(document.getElementById("content").textContent);
const state = { example: 0, layer: 0, head: 0, token: 0 };
const at = (id) => document.getElementById(id);

async function unpacked(text) {
  const binary = atob(text);
  const bytes = Uint8Array.from(binary, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream);
}

// The four bytes of all integers, lowest first; the sign is the lowest bit.
async function integers(text) {
  const planes = new Uint8Array(await (await unpacked(text)).arrayBuffer());
  const count = planes.length / 4;
  const found = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    const folded = (planes[i] | planes[i + count] << 8 | planes[i + 2 * count] << 16 | planes[i + 3 * count] << 24) >>> 0;
    found[i] = folded === 0xffffffff ? NaN : (folded >>> 1) ^ -(folded & 1);
  }
  return found;
}

function rows(flat, count, width) {
  return Array.from({ length: count }, (_, i) => Array.from(flat.subarray(i * width, (i + 1) * width)));
}

const blocks = new Map();
for (const block of content.maps) blocks.set(`${block.example}/${block.layer}`, block);
const mapped = new Set(content.maps.flatMap((block) => block.heads.map((head) => `${block.layer}/${head}`)));

// Raw, effective and null, in units of the last decimal.
async function mapsOf(example, layer, head) {
  const block = blocks.get(`${example}/${layer}`);
  const place = block ? block.heads.indexOf(head) : -1;
  if (place < 0) return null;
  block.numbers ??= await integers(block.packed);
  const size = block.rows * block.columns;
  const plane = (index) => {
    const start = (index * block.heads.length + place) * size;
    return block.numbers.subarray(start, start + size);
  };
  const [raw, effective, carry] = [0, 1, 2].map(plane);
  const rest = raw.map((value, i) => value - effective[i] + carry[i]);
  return Object.fromEntries(Object.entries({ raw, effective, null: rest })
    .map(([part, values]) => [part, rows(values, block.rows, block.columns)]));
}

async function attributionOf(example) {
  const block = content.attribution.find((entry) => entry.example === example);
  if (block) block.numbers ??= await integers(block.packed);
  return block;
}

// --- words

// Plotly reads a few tags and entities in its labels; a token is never markup.
const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const visible = (text) => (text === "" ? "∅" : text.replace(/[\u0000-\u001f\u007f-\u009f\u2028\u2029\u202a-\u202e\u2066-\u2069]/g, "␣"));
const tokens = () => (content.examples[state.example] || { tokens: [] }).tokens;
const name = (position) => visible(tokens()[position] ?? String(position));
const label = (position) => plain(name(position));
const minus = (text) => text.replace("-", "−");

// An integer of so many decimals, to all of them and no more.
const decimal = (value, decimals) => (Number.isFinite(value) ? minus((value / 10 ** decimals).toFixed(decimals)) : "–");
const digits = (value, count) => (value === null || value === undefined ? "–" : minus(String(Number(value.toPrecision(count)))));
