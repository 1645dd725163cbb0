import assert from "node:assert/strict";
import { test } from "node:test";
import { directionOf, isSpecial, nameOf, pieces, visible, words } from "../../attnlens/reporting/web/tokens.js";

const running = (tokens) => pieces(tokens).map((piece) => piece.text).join("");
const wordNames = (tokens) => words(pieces(tokens)).map((group) => nameOf(pieces(tokens), group));

test("pieces of WordPiece join into running text and words", () => {
  const tokens = ["[CLS]", "un", "##believ", "##able", "cats", ",", "they", "said", ".", "[SEP]"];
  assert.equal(running(tokens), "[CLS] unbelievable cats, they said. [SEP]");
  assert.deepEqual(wordNames(tokens), ["[CLS]", "unbelievable", "cats", ",", "they", "said", ".", "[SEP]"]);
});

test("Chinese is not spaced, and each character is a word", () => {
  const tokens = ["[CLS]", "我", "爱", "你", "。", "[SEP]"];
  assert.equal(running(tokens), "[CLS]我爱你。 [SEP]");
  assert.equal(wordNames(tokens).length, 6);
});

test("byte-level tokens are the characters they stand for", () => {
  assert.equal(running(["The", "Ġcafé".replace("é", "Ã©"), "Ċ", "Ġnow"]), "The café\n now");
  assert.deepEqual(wordNames(["un", "likely", "Ġcats"]).length, 2);
  // an emoji of four bytes in two tokens: the last one shows it, the first its bytes
  const [first, last] = pieces(["ĠðŁĺ", "Ģ", "Ġok"]);
  assert.equal(last.text, "😀");
  assert.equal(first.text, " ");
  assert.equal(nameOf(pieces(["ðŁ", "ĺĢ", "Ġok"]), [0, 1]), "😀");
  assert.equal(pieces(["ðŁ", "ĺĢ", "Ġok"])[0].text, "⟨F0 9F⟩");
  assert.equal(running(["Ø§ÙĦ", "ØŃÙĬØ§Ø©"]), "الحياة");
  assert.equal(running(["<|endoftext|>", "ä½ł", "å¥½"]), "<|endoftext|>你好");
});

test("an example that ends within a character is still read as bytes", () => {
  assert.deepEqual(pieces(["Ġok", "ðŁ"]).map((piece) => piece.text), [" ok", "⟨F0 9F⟩"]);
});

test("what only looks like bytes stays what it is", () => {
  assert.equal(running(["[CLS]", "caf", "##é", "ā", "[SEP]"]), "[CLS] café ā [SEP]");
  assert.deepEqual(pieces(["é", "x"]).map((piece) => piece.text), ["é", " x"]);
  assert.deepEqual(pieces(["a", "b"]).map((piece) => piece.text), ["a", " b"]);
});

test("pieces of SentencePiece join, and its bytes are characters", () => {
  const tokens = ["▁Hello", "▁wor", "ld", "<0xE2>", "<0x82>", "<0xAC>", "</s>"];
  assert.equal(nameOf(pieces(tokens), [3, 4, 5]), "€");
  assert.deepEqual(wordNames(["▁Hello", "▁wor", "ld", "</s>"]), ["Hello", "world", "</s>"]);
});

test("special tokens are told from those of a text", () => {
  for (const token of ["[CLS]", "[SEP]", "[PAD]", "<s>", "</s>", "<pad>", "<|endoftext|>", "<extra_id_0>"]) assert.ok(isSpecial(token), token);
  for (const token of ["<b>", "</script>", "[1]", "cls", "<", "<|>", ""]) assert.ok(!isSpecial(token), token);
});

test("what is invisible, or turns the text around, is a mark", () => {
  assert.equal(visible("\u202etxt\u2028\u0007"), "␣txt␣␣");
  assert.equal(visible(""), "∅");
  assert.equal(visible("<b>&"), "<b>&");
});

test("the direction is that of most letters", () => {
  assert.equal(directionOf(pieces(["[CLS]", "الحياة", "جميلة", "ok", "[SEP]"])), "rtl");
  assert.equal(directionOf(pieces(["[CLS]", "שלום", "and", "good", "morning"])), "ltr");
  assert.equal(directionOf(pieces(["[CLS]", "1", "."])), "ltr");
  assert.equal(directionOf(pieces([])), "ltr");
});
