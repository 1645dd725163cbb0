// @ts-check
// Tokens as the characters they stand for, and the words they make up.

/** @typedef {{ text: string, starts: boolean, special: boolean }} Piece
 *  What a token shows, whether a word starts with it, and whether the tokenizer added it. */

const SPECIAL = /^(\[(CLS|SEP|PAD|MASK|UNK|BOS|EOS)\]|<\/?(s|cls|sep|pad|bos|eos|mask|unk)>|<\|[^|<>]*\|>|<extra_id_\d+>)$/i;
const INVISIBLE = /[\u0000-\u001f\u007f-\u009f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const JOINED = /^[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}]/u;
const CLOSING = /^[\p{Pe}\p{Pf}.,;:!?%،؛؟。，、！？：；]+$/u;

/** The bytes that GPT-2's alphabet of printable characters stands for. */
const BYTES = new Map((() => {
  const printable = [[33, 126], [161, 172], [174, 255]]
    .flatMap(([first, last]) => Array.from({ length: last - first + 1 }, (_, i) => first + i));
  const others = Array.from({ length: 256 }, (_, byte) => byte).filter((byte) => !printable.includes(byte));
  return [
    ...printable.map((byte) => /** @type {[string, number]} */ ([String.fromCharCode(byte), byte])),
    ...others.map((byte, i) => /** @type {[string, number]} */ ([String.fromCharCode(256 + i), byte])),
  ];
})());

/**
 * A token on a page: what would be invisible, or turn the text around, is a mark.
 * @param {string} text
 */
export const visible = (text) => (text === "" ? "∅" : text.replace(INVISIBLE, "␣"));

/** @param {string} token */
export const isSpecial = (token) => SPECIAL.test(token);

/**
 * Bytes of a token of a byte-level tokenizer, or null.
 * @param {string} token
 */
function bytesOf(token) {
  const bytes = Array.from(token, (letter) => BYTES.get(letter));
  return bytes.every((byte) => byte !== undefined) ? Uint8Array.from(/** @type {number[]} */ (bytes)) : null;
}

/**
 * Whether tokens are written in GPT-2's alphabet for bytes.
 * @param {string[]} tokens
 */
function areBytes(tokens) {
  const parts = tokens.filter((token) => !isSpecial(token)).map(bytesOf);
  if (!parts.length || parts.includes(null)) return false;
  const foreign = tokens.some((token) => /[^\x21-\x7e]/.test(token) && !isSpecial(token));
  try {
    const decoder = new TextDecoder("utf-8", { fatal: true });
    const text = parts.map((part) => decoder.decode(/** @type {Uint8Array} */ (part), { stream: true })).join("");
    return foreign && !/[\u0000-\u0008\u000e-\u001f\u007f-\u009f]/.test(text);
  } catch {
    return false;
  }
}

/** @param {Uint8Array} bytes */
const hexadecimal = (bytes) => `⟨${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0").toUpperCase()).join(" ")}⟩`;

/**
 * Decode tokens that are bytes; one that ends within a character shows its bytes, and the token
 * that completes the character shows it.
 * @param {string[]} tokens
 * @param {(token: string) => Uint8Array | null} bytes
 */
function decoded(tokens, bytes) {
  const decoder = new TextDecoder("utf-8");
  return tokens.map((token) => {
    const part = isSpecial(token) ? null : bytes(token);
    if (part === null) return token;
    const text = decoder.decode(part, { stream: true });
    return text === "" && part.length ? hexadecimal(part) : text;
  });
}

/** @param {string} token of SentencePiece's byte fallback */
function fallbackByte(token) {
  const hex = /^<0x([0-9A-F]{2})>$/.exec(token);
  return hex ? Uint8Array.of(parseInt(hex[1], 16)) : null;
}

/**
 * What each token shows, and where words start.
 * @param {string[]} tokens as the tokenizer names them
 * @returns {Piece[]}
 */
export function pieces(tokens) {
  const bytes = areBytes(tokens);
  const sentencepiece = !bytes && tokens.some((token) => token.startsWith("▁"));
  const wordpiece = tokens.some((token) => /^##./.test(token));
  const texts = bytes ? decoded(tokens, bytesOf) : sentencepiece ? decoded(tokens, fallbackByte) : tokens;
  let open = false; // whether the token before belongs to a word that may go on
  return texts.map((shown, i) => {
    const special = isSpecial(tokens[i]);
    let [text, starts] = [shown, true];
    if (bytes && !special) starts = /^\s/.test(shown) || !open;
    else if (sentencepiece && !special) [text, starts] = [shown.replace(/▁/g, " "), shown.startsWith("▁") || !open];
    else if (wordpiece && !special && shown.startsWith("##")) [text, starts] = [shown.slice(2), !open];
    else if (!bytes && !sentencepiece && i > 0 && !JOINED.test(shown) && !CLOSING.test(shown)) text = ` ${shown}`;
    open = !special;
    return { text, starts, special };
  });
}

/**
 * Tokens of each word, by their positions.
 * @param {Piece[]} all
 * @returns {number[][]}
 */
export function words(all) {
  /** @type {number[][]} */
  const groups = [];
  all.forEach((piece, i) => {
    if (piece.starts || !groups.length) groups.push([i]);
    else groups[groups.length - 1].push(i);
  });
  return groups;
}

/**
 * What a group of tokens is called on an axis.
 * @param {Piece[]} all
 * @param {number[]} group
 */
export function nameOf(all, group) {
  const parts = group.map((i) => all[i].text);
  const whole = parts.filter((text) => !/^⟨[0-9A-F ]+⟩$/.test(text));
  const text = (whole.length ? whole : parts).join("").replace(/^[ ]+(?=.)/, "");
  return visible(text);
}

const RIGHT = /[\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;
const LEFT = /\p{L}/u;

/**
 * The direction of a text: that of most of its letters.
 * @param {Piece[]} all
 * @returns {"rtl" | "ltr"}
 */
export function directionOf(all) {
  let balance = 0;
  for (const piece of all) {
    if (piece.special) continue;
    for (const letter of piece.text) balance += RIGHT.test(letter) ? 1 : LEFT.test(letter) ? -1 : 0;
  }
  return balance > 0 ? "rtl" : "ltr";
}
