"""The page in a real browser, from disk, with the network off."""

from __future__ import annotations

import csv
import dataclasses
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from selenium.webdriver.common.keys import Keys
from transformers import AutoTokenizer

import attnlens
from attnlens import EffectiveAttention, HeadStatistics, HiddenTokenAttribution, Lens
from attnlens.attention.maps import AttentionMap
from attnlens.demo import model_folder
from tests.support import models
from tests.support.pages import Visit, chrome, number
from tests.support.results import one_of_each

LOOKS = [(1400, "light"), (1400, "dark"), (500, "light"), (500, "dark")]
HOSTILE = [
    "<img src=x onerror=window.hacked=1>",
    "</script><script>window.hacked=1</script>",
    "<b>bold</b>",
    "&lt;i&gt;",
    "javascript:window.hacked=1",
    "<a href='javascript:window.hacked=1'>x</a>",
    "\u202etxt\u2028\u2029",
    "%{z}",
    "'\"`${window.hacked=1}",
]
TOKENS = [[f"a{i}" for i in range(19)], [f"b{i}" for i in range(6)]]


@pytest.fixture(scope="module")
def browser():
    with chrome() as opened:
        yield opened


@pytest.fixture(scope="module")
def seen():
    model = models.build("bert")
    maps = EffectiveAttention()
    attribution = HiddenTokenAttribution(2, keep="matrices")
    with Lens(model, HeadStatistics(), maps, attribution) as lens, torch.no_grad():
        model(**models.inputs("bert"))
    return lens


def shown(browser, seen, folder, tokens=TOKENS, look=LOOKS[0], fragment="", **choices):
    page = attnlens.report(seen, tokens=tokens, model=str(folder / "tiny"), **choices)
    return Visit(browser, page, folder, *look, fragment)


def agrees(text, value, error=1e-6):
    """Whether the last number of a text is a value, to all the digits it is given with."""
    said, rounding = number(text)
    return abs(said - value) <= rounding * (1 + 1e-6) + error


def maps_of(seen, place):
    """Raw and effective attention of a layer, head and example."""
    layer, head, example = place
    maps = seen.observers[1].compute()[layer]
    size = models.LENGTHS[example]
    return [m[example, head, :size, :size].double() for m in (maps.raw, maps.effective)]


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: f"{look[0]}-{look[1]}")
def test_a_person_can_look_around_by_mouse(browser, seen, tmp_path, look):
    visit = shown(browser, seen, tmp_path, look=look)
    grid = seen.observers[0].compute().effective_fraction
    said = visit.cell("#heads", (1, 2), (2, 4))
    assert said.startswith("layer 1, head 2: effective fraction") and "over 2 examples" in said
    assert agrees(said.removesuffix(" over 2 examples"), grid[1, 2].item(), 1e-4)
    visit.find("#heads .stage").click()  # the middle, which the pointer is near
    visit.choose(example=1, layer=1, head=2, token=4)
    raw, effective = maps_of(seen, (1, 2, 1))

    visit.require_sound(f"maps-{look[0]}-{look[1]}")
    for place, part in enumerate((raw, effective, raw - effective)):
        said = visit.cell(f"#view-maps .figure:nth-child({place + 1})", (4, 2), (6, 6))
        assert said.startswith("b4 → b2: ") and agrees(said, part[4, 2].item())
    norms = seen.observers[1].compute()[1].value_norm[1, 2, 0].double()
    said = visit.cell("#view-maps .figure:nth-child(4)", (4, 2), (6, 6))
    assert "norm-weighted" in said and agrees(said, (raw[4, 2] * norms[2]).item(), 1e-3)

    visit.open("text")
    visit.choose(part="effective", direction="to")
    visit.point(visit.all("#view-text .token")[3])
    assert visit.find("#view-text .readout").text == "effective A⊥ to b3"
    strongest = int(effective[:, 3].abs().argmax())
    cells = [cell.text for cell in visit.all("#view-text tbody tr:first-child > *")]
    assert cells[0] == f"b{strongest}"
    for text, part in zip(cells[1:4], (raw, effective, raw - effective), strict=True):
        assert agrees(text, part[strongest, 3].item())
    visit.point(visit.find("h1"))
    visit.choose(part="attribution", direction="from", token=2)
    share = seen.observers[2].matrices[0].contribution[1, 1, :6, 2]
    cells = [cell.text for cell in visit.all("#view-text tbody tr:first-child > *")]
    assert cells[0] == f"b{int(share.argmax())}" and agrees(cells[1], share.max().item(), 5e-5)
    visit.require_sound(f"text-{look[0]}-{look[1]}")

    visit.open("model")
    visit.choose(sort=0, part="raw")
    best = divmod(int(grid.argmax()), 4)
    first = visit.find("#view-model .thumb")
    label = first.get_attribute("aria-label")
    assert label.startswith(f"Open layer {best[0]}, head {best[1]}")
    assert agrees(label, grid.max().item(), 5e-4 * grid.max().item())
    visit.choose(least=float(grid.flatten().sort().values[-3]) * (1 - 1e-4))
    assert len(visit.all("#view-model .thumb")) == 3
    visit.require_sound(f"model-{look[0]}-{look[1]}")
    visit.click("#view-model .thumb")
    assert visit.find("#tab-maps").get_attribute("aria-selected") == "true"
    assert visit.find("#head").get_attribute("value") == str(best[1])

    visit.choose(layer=1, head=2, token=4)
    visit.open("lines")
    key = int(effective[4].abs().argmax())
    said = visit.find("#view-lines .readout").text
    assert f"b4 → b{key}: effective" in said and agrees(
        said.split(";")[0], effective[4, key].item()
    )
    visit.require_sound(f"lines-{look[0]}-{look[1]}")
    visit.point(visit.find("#view-lines [data-side=keys][data-group='1']"))
    query = int(effective[:, 1].abs().argmax())
    assert f"b{query} → b1: effective" in visit.find("#view-lines .readout").text

    visit.open("beside")
    visit.choose(part="raw", example2=1, layer2=0, head2=3)
    other = maps_of(seen, (0, 3, 1))[0]
    said = visit.cell("#view-beside .figure:nth-child(3)", (5, 1), (6, 6))
    assert "first − second" in said and agrees(said, (raw - other)[5, 1].item(), 2e-6)
    visit.require_sound(f"beside-{look[0]}-{look[1]}")
    visit.choose(example2=0)
    assert len(visit.all("#view-beside .figure")) == 2
    assert "no difference of 6 × 6 and 19 × 19" in visit.find("#view-beside .hint").text

    visit.open("attribution")
    visit.choose(token=4)
    share = 100 * seen.observers[2].matrices[0].contribution[1, 1, 2, 4].item()
    said = visit.cell("#view-attribution", (1, 2), (2, 6)).removesuffix(" %")
    assert said.startswith("b2 in layer 1 contributes") and agrees(said, share, 5e-3)
    visit.require_sound(f"attribution-{look[0]}-{look[1]}")

    visit.open("curves")
    visit.point(visit.find("#dot-0-1"))
    own = seen.observers[2].compute().own[1, 0].item()
    assert agrees(visit.find("#view-curves .readout").text, own, 1e-4)
    visit.require_sound(f"curves-{look[0]}-{look[1]}")


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: f"{look[0]}-{look[1]}")
def test_keys_alone_do_everything(browser, seen, tmp_path, look):
    visit = shown(browser, seen, tmp_path, look=look, fragment="example=1&layer=0&head=0&token=0")
    visit.focus("#field")
    visit.press(Keys.TAB)
    assert visit.script("return document.activeElement.closest('#heads') !== null")
    visit.press(Keys.RIGHT, Keys.RIGHT, Keys.DOWN, Keys.ENTER)
    assert [visit.find(f"#{n}").get_attribute("value") for n in ("layer", "head")] == ["1", "2"]
    raw, effective = maps_of(seen, (1, 2, 1))

    visit.focus("#tab-maps")
    visit.focus("#view-maps .figure:nth-child(2) .stage")
    visit.press(Keys.DOWN, Keys.DOWN, Keys.RIGHT)
    said = visit.find("#view-maps .figure:nth-child(2) .readout").text
    assert said.startswith("b2 → b1: effective") and agrees(said, effective[2, 1].item())
    visit.press(Keys.ENTER)
    assert visit.find("#token").get_attribute("value") == "2"

    visit.focus("#tab-maps")
    visit.press(Keys.RIGHT)
    assert visit.find("#tab-text").get_attribute("aria-selected") == "true"
    visit.focus("#view-text .text")
    visit.press(Keys.RIGHT, Keys.RIGHT, Keys.LEFT)
    assert visit.find("#view-text .readout").text == "effective A⊥ from b3"
    cells = [cell.text for cell in visit.all("#view-text tbody tr:first-child > *")]
    assert agrees(cells[2], effective[3, int(cells[0][1:])].item())
    visit.press(Keys.END)
    assert visit.find("#view-text .readout").text == "effective A⊥ from b5"

    visit.focus("#tab-text")
    visit.press(Keys.RIGHT)
    visit.focus("#view-model .thumb")
    visit.press(Keys.RIGHT, Keys.DOWN, Keys.ENTER)
    assert [visit.find(f"#{n}").get_attribute("value") for n in ("layer", "head")] == ["1", "1"]
    visit.choose(head=2, token=2)

    visit.open("lines")
    visit.focus("#view-lines .pair")
    visit.press(Keys.DOWN)
    key = int(effective[3].abs().argmax())
    assert f"b3 → b{key}: effective" in visit.find("#view-lines .readout").text
    visit.press(Keys.RIGHT)
    assert visit.find("#direction").get_attribute("value") == "to"
    visit.choose(direction="from")

    visit.open("beside")
    visit.choose(part="raw", example2=1, layer2=0, head2=3)
    visit.focus("#view-beside .figure:nth-child(3) .stage")
    visit.press(Keys.END)
    other = maps_of(seen, (0, 3, 1))[0]
    said = visit.find("#view-beside .figure:nth-child(3) .readout").text
    assert agrees(said, (raw - other)[0, 5].item(), 2e-6)

    visit.open("attribution")
    visit.focus("#view-attribution .stage")
    visit.press(Keys.HOME, Keys.RIGHT, Keys.ENTER)
    assert visit.find("#token").get_attribute("value") == "1"

    visit.open("curves")
    visit.focus("#view-curves .stage")
    visit.press(Keys.RIGHT)
    own = seen.observers[2].compute().own[1, 0].item()
    assert agrees(visit.find("#view-curves .readout").text, own, 1e-4)

    visit.focus("#tab-curves")
    visit.press("?")
    assert visit.find("#help").is_displayed() and "Kobayashi" in visit.find("#help").text
    visit.require_sound()
    visit.press(Keys.ESCAPE)
    assert not visit.find("#help").is_displayed()


def test_every_number_says_what_it_is_of(browser, seen, tmp_path):
    visit = shown(browser, seen, tmp_path, fragment="example=1&layer=1&head=2", notes=["Cut."])
    statistics = seen.observers[0].compute()
    over_all, of_one = (line.text for line in visit.all("#status span"))
    assert over_all.startswith("This head over 2 examples: effective fraction ")
    fraction = over_all.split("effective fraction ")[1].split(" ")[0]
    assert agrees(fraction, statistics.effective_fraction[1, 2].item(), 1e-3)
    raw, effective = maps_of(seen, (1, 2, 1))
    assert of_one.startswith("In example 2: effective fraction ")
    share = (effective.square().sum() / raw.square().sum()).item()
    assert agrees(of_one.split("fraction ")[1].split(" ")[0], share, 1e-3)
    assert visit.find("#subject").text == "tiny · 2 examples"
    assert visit.find("#notes").text == "Cut."
    legends = [legend.text for legend in visit.all("#view-maps .legend")]
    assert all("≥" in legend for legend in legends[:3])
    visit.choose(clip=False)
    assert not any("≥" in legend.text for legend in visit.all("#view-maps .legend"))
    visit = shown(browser, seen, tmp_path, example=1)
    assert visit.find("#subject").text == "tiny · 2 examples, maps of the first"


def test_the_largest_contribution_is_announced(browser, seen, tmp_path):
    visit = shown(browser, seen, tmp_path, fragment="view=attribution&example=1&token=4")
    shares = 100 * seen.observers[2].matrices[0].contribution[:, 1, :6, 4]
    title = visit.find("#view-attribution h3").text.removesuffix(" %")
    assert agrees(title, shares.max().item(), 5e-3)
    others = shares[:, [0, 1, 2, 3, 5]].max().item()
    legend = visit.find("#view-attribution .legend").text
    assert ("≥" in legend) == (shares[:, 4].max().item() > others)
    assert agrees(legend, others, 1e-2 * others)


def test_a_view_can_be_linked(browser, seen, tmp_path):
    visit = shown(browser, seen, tmp_path, fragment="view=text&head=1&words=true&nothing=1")
    visit.choose(layer=1, example=1, head=3, hide="special")
    address = visit.script("return location.href")
    visit.browser.get("about:blank")
    visit.browser.get(address)
    visit.drawn()
    values = {n: visit.find(f"#{n}").get_attribute("value") for n in ("layer", "head", "example")}
    assert values == {"layer": "1", "head": "3", "example": "1"}
    assert visit.find("#words").is_selected() and visit.find("#panel-text").is_displayed()
    visit.script("location.hash = 'view=lines&head=99'")
    visit.drawn()
    assert visit.find("#panel-lines").is_displayed()
    assert visit.find("#head").get_attribute("value") == "3"


@pytest.mark.parametrize("view", ["maps", "text", "model", "lines", "attribution", "curves"])
def test_what_is_shown_can_be_saved(browser, seen, tmp_path, view):
    visit = shown(browser, seen, tmp_path, fragment=f"view={view}&example=1&layer=1&head=2&token=4")
    for kind in ("csv", "svg", "png"):
        visit.click(f"#save-{kind}")
    name = f"attnlens-{view}-layer1-head2-example2"
    rows = list(csv.reader(visit.saved(f"{name}.csv").read_text().splitlines()))
    raw, effective = maps_of(seen, (1, 2, 1))
    if view == "maps":
        assert rows[0] == ["raw A", *TOKENS[1]]
        table = np.array([[float(cell) for cell in row[1:]] for row in rows[1:7]])
        assert table == pytest.approx(raw.numpy(), abs=1e-6)
    if view == "lines":
        assert rows[1 + 4 * 6 + 2][:2] == ["b4", "b2"]
        assert float(rows[1 + 4 * 6 + 2][3]) == pytest.approx(effective[4, 2].item(), abs=1e-6)
    assert len(rows) > 1
    drawing = ElementTree.parse(visit.saved(f"{name}.svg")).getroot()
    names = "".join(drawing.itertext())
    assert {"curves": "layer", "model": "1 · 2"}.get(view, "b2") in names
    with Image.open(visit.saved(f"{name}.png")) as picture:
        assert picture.width == 2 * int(float(drawing.get("width")))
        assert len(picture.convert("RGB").getcolors(2**24)) > 20
    assert browser.get_log("browser") == []


def test_a_head_that_is_not_there_is_named(browser, seen, tmp_path):
    visit = shown(browser, seen, tmp_path, heads=[1])
    assert visit.find("#dots").is_displayed()
    for view in ("maps", "text", "lines", "beside"):
        visit.open(view)
        visit.choose(head=2)
        assert "not in the file" in visit.find(f"#view-{view} .hint").text
    visit.open("model")
    assert len(visit.all("#view-model .thumb")) == 2
    visit.require_sound()


def test_rounded_maps_say_no_more_than_they_know(browser, seen, tmp_path, monkeypatch):
    monkeypatch.setattr("attnlens.reporting.fitting.BITS", (8,))
    monkeypatch.setattr("attnlens.reporting.content.BITS", (8,))
    visit = shown(browser, seen, tmp_path, fragment="example=0&layer=0&head=0")
    raw, effective = maps_of(seen, (0, 0, 0))
    unit = max(raw.max().item(), (raw - effective).abs().max().item()) / 127
    assert "Stored in 8 bits" in visit.find("#view-maps .hint").text
    for place, (part, error) in enumerate(((raw, unit / 2), (effective, unit))):
        said = visit.cell(f"#view-maps .figure:nth-child({place + 1})", (18, 5), (19, 19))
        assert agrees(said, part[18, 5].item(), error)
        assert number(said)[1] >= error


def test_hostile_tokens_run_nothing(browser, seen, tmp_path):
    visit = shown(browser, seen, tmp_path, tokens=[(HOSTILE * 3)[:19], HOSTILE[:6]])
    assert HOSTILE[0] in visit.cell("#view-maps .figure", (0, 0), (19, 19))
    for view in ("text", "model", "lines", "beside", "attribution", "curves"):
        visit.open(view)
        for choice in (1, 6, 8):
            visit.choose(example=0)
            if visit.find("#token").is_displayed():
                visit.choose(token=choice)
        visit.click("#save-csv")
        visit.click("#save-svg")
        visit.click("#save-png")
    assert visit.script("return window.hacked") is None
    assert not visit.all("main img, main a, nav img, main script")
    visit.require_sound("hostile")


# --- kinds of models


def test_a_sentence_pair_is_filtered_by_side(browser, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    torch.manual_seed(0)
    model = hf.BertModel(hf.BertConfig(**{**models.TEXT, "vocab_size": 30522})).eval()
    batch = tokenizer("the ferry left unbelievably early", "nobody saw it", return_tensors="pt")
    maps = EffectiveAttention(minimal=True)
    with Lens(model, HeadStatistics(), maps) as lens, torch.no_grad():
        model(**batch)
    tokens = [tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())]
    segments = batch["token_type_ids"].tolist()
    page = attnlens.report(lens, tokens=tokens, segments=segments)
    visit = Visit(browser, page, tmp_path, fragment="layer=0&head=1")
    sides = {name: [i for i, s in enumerate(segments[0]) if s == n] for n, name in enumerate("AB")}
    effective = maps.compute()[0].effective[0, 1].double()
    for pair in ("A→A", "A→B", "B→A", "B→B"):
        visit.choose(pairs=pair)
        rows, columns = (sides[side] for side in pair.split("→"))
        said = visit.cell("#view-maps .figure:nth-child(2)", (1, 2), (len(rows), len(columns)))
        assert agrees(said, effective[rows[1], columns[2]].item())
        name = tokens[0][columns[2]].removeprefix("##")
        assert said.startswith(f"{tokens[0][rows[1]].removeprefix('##')} → {name}: ")
    visit.open("text")
    visit.choose(pairs="A→B", words=True, hide="special")
    assert [box.text for box in visit.all("#view-text .text")] == [
        "the ferry left unbelievably early", "nobody saw it",
    ]  # fmt: skip
    word = [i for i in sides["A"] if tokens[0][i] == "un" or tokens[0][i].startswith("##")]
    target = tokens[0].index("nobody")
    visit.choose(part="effective", token=word[0], direction="from")
    row = next(r for r in visit.all("#view-text tbody tr") if r.text.startswith("nobody"))
    expected = effective[word, target].mean().item()
    assert agrees(row.text.split(" ")[2], expected)
    visit.choose(hide="nothing", pairs="all", words=False, part="least-norm", token=target)
    least = maps.compute()[0].minimal[0, 1, target]
    cells = [cell.text for cell in visit.all("#view-text tbody tr:first-child td")]
    assert agrees(cells[-1], least.max().item())
    visit.choose(rescale=True, part="raw")
    visit.require_sound("pair")
    assert "[CLS]" in visit.find("#view-text .text").text


def test_three_kinds_of_attention_have_their_own_tokens(browser, tmp_path):
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=96, decoder_start_token_id=0, **sizes)
    ).eval()
    maps = EffectiveAttention()
    ids, answers = torch.arange(5, 14)[None], torch.arange(20, 25)[None]
    with Lens(model, maps, kinds={"encoder", "decoder", "cross"}), torch.no_grad():
        model(input_ids=ids, decoder_input_ids=answers)
    tokens = [["▁The", "▁fer", "ry", "▁left", "▁ear", "ly", "▁to", "day", "</s>"]]
    targets = [["<pad>", "▁Die", "▁Fäh", "re", "▁ging"]]
    page = attnlens.report(maps, tokens=tokens, targets=targets)
    visit = Visit(browser, page, tmp_path)
    options = {o.text: o.get_attribute("value") for o in visit.all("#layer option")}
    kinds = {entry.kind: entry for entry in maps.compute() if entry.layer == 1}
    assert set(kinds) == {"encoder", "decoder", "cross"}
    for kind, entry in kinds.items():
        sides = {"decoder": (targets, targets), "cross": (targets, tokens)}.get(kind, (tokens,) * 2)
        visit.choose(layer=options[f"{entry.stack} 1"], head=3)
        size = tuple(entry.raw.shape[-2:])
        said = visit.cell("#view-maps .figure:nth-child(2)", (3, 2), size)
        names = [side[0][i].replace("▁", "") for side, i in zip(sides, (3, 2), strict=True)]
        assert said.startswith(f"{names[0]} → {names[1]}: ")
        assert agrees(said, entry.effective[0, 3, 3, 2].item())
    visit.open("text")
    first, second = (box.text for box in visit.all("#view-text .text"))
    assert first == "<pad> Die Fähre ging" and second == "The ferry left early today</s>"
    visit.point(visit.all("#view-text .text:nth-child(2) .token")[1])
    assert visit.find("#view-text .readout").text == "effective A⊥ to fer"
    visit.require_sound("three-kinds")


def test_generated_text_is_followed_step_by_step(browser, tmp_path):
    config = hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, vocab_size=96)
    torch.manual_seed(0)
    model, maps = hf.GPT2LMHeadModel(config).eval(), EffectiveAttention()
    prompt = torch.tensor([[5, 6, 7, 8]])
    with Lens(model, HeadStatistics(), maps, kinds={"decoder"}) as lens, torch.no_grad():
        model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    names = ["Once", "Ġupon", "Ġa", "Ġtime", "Ġthere", "Ġwas", "Ġan", "Ġoctopus"]
    visit = Visit(browser, attnlens.report(lens, tokens=[names]), tmp_path)
    assert visit.find("#view-text .text").text == "Once upon a time there was an octopus"
    assert visit.find("#step-said").text == "Step 1 of 5: read time, wrote there"
    assert visit.find("#subject").text == "1 example"
    assert visit.find("#heads h3").text == "effective fraction over 5 steps"
    visit.choose(layer=1, head=1)
    visit.focus("#step")
    visit.press(Keys.RIGHT, Keys.RIGHT)
    assert visit.find("#step-said").text == "Step 3 of 5: read was, wrote an"
    assert visit.find("#view-text .readout").text == "effective A⊥ from was"
    step = [entry for entry in maps.compute() if entry.layer == 1][2]
    assert step.raw.shape[-2:] == (1, 6)
    values = step.effective[0, 1, 0]
    for row in visit.all("#view-text tbody tr"):
        token, _, effective, *_ = row.text.split(" ")
        place = [name.replace("Ġ", "") for name in names].index(token)
        assert agrees(effective, values[place].item() if place < 6 else 0.0)
    assert [span.text.strip() for span in visit.all("#view-text .later")] == ["an", "octopus"]
    visit.press(Keys.END)
    assert visit.find("#step-said").text == "Step 5 of 5: read octopus, wrote (the end)"
    visit.require_sound("generation")


def test_patches_lie_on_their_picture(browser, tmp_path):
    model, maps = models.build("vit"), EffectiveAttention()
    with Lens(model, HeadStatistics(), maps) as lens, torch.no_grad():
        model(**models.inputs("vit"))
    generator = np.random.default_rng(0)
    pictures = [generator.random((64, 64, 3)), np.zeros((64, 64, 3), np.uint8)]
    page = attnlens.report(lens, pictures=pictures)
    visit = Visit(browser, page, tmp_path, fragment="view=text&layer=1&head=2&example=0&token=0")
    patches = visit.all("#view-text .patch")
    assert len(patches) == 16 and len(visit.all("#view-text .token")) == 1
    box, picture = patches[6].rect, visit.find("#view-text img").rect
    assert box["x"] == pytest.approx(picture["x"] + picture["width"] / 2, abs=1.5)
    assert box["y"] == pytest.approx(picture["y"] + picture["height"] / 4, abs=1.5)
    visit.point(patches[6])
    assert visit.find("#view-text .readout").text == "effective A⊥ from row 2, column 3"
    effective = maps.compute()[1].effective[0, 2, 7]
    place = int(effective.abs().argmax())
    first = visit.find("#view-text tbody tr").text
    assert first.startswith("[CLS]" if place == 0 else "row ")
    cells = [cell.text for cell in visit.all("#view-text tbody tr:first-child td")]
    assert agrees(cells[1], effective[place].item())
    visit.require_sound("patches")


@pytest.fixture(scope="module")
def long():
    config = hf.BertConfig(**{**models.TEXT, "max_position_embeddings": 320})
    torch.manual_seed(0)
    model, maps = hf.BertModel(config).eval(), EffectiveAttention()
    with Lens(model, HeadStatistics(), maps) as lens, torch.no_grad():
        model(input_ids=torch.randint(5, 96, (1, 300)))
    return lens


def test_three_hundred_tokens_are_shown_whole(browser, long, tmp_path):
    tokens = [[f"t{i}" for i in range(300)]]
    page = attnlens.report(long, tokens=tokens, max_tokens=300)
    visit = Visit(browser, page, tmp_path, fragment="layer=1&head=3")
    assert not page.notes
    effective = long.observers[1].compute()[1].effective[0, 3]
    said = visit.cell("#view-maps .figure:nth-child(2)", (299, 150), (300, 300))
    assert said.startswith("t299 → t150: ") and agrees(said, effective[299, 150].item())
    visit.open("lines")
    assert "first 64 of 300" in visit.find("#view-lines .hint").text
    visit.open("text")
    assert len(visit.all("#view-text .token")) == 300
    visit.require_sound("long")


@pytest.mark.parametrize(
    ("name", "text", "direction"),
    [
        ("arabic", "الحياة جميلة والبحر هادئ", "rtl"),
        ("chinese", "我爱北京天安门，今天天气很好。", "ltr"),
    ],
)
def test_other_scripts_read_as_they_are_written(browser, tmp_path, name, text, direction):
    torch.manual_seed(0)
    model, maps = models.build("bert"), EffectiveAttention()
    words = text.split(" ") if name == "arabic" else list(text)
    parts = [
        part for word in words for part in ((word[:3], f"##{word[3:]}") if word[3:] else (word,))
    ]
    tokens = ["[CLS]", *parts, "[SEP]"]
    ids = torch.randint(5, 96, (1, len(tokens)))
    with Lens(model, HeadStatistics(), maps) as lens, torch.no_grad():
        model(input_ids=ids)
    page = attnlens.report(lens, tokens=[tokens])
    visit = Visit(browser, page, tmp_path, fragment="view=text&hide=special&layer=1&head=0")
    box = visit.find("#view-text .text")
    assert box.text == text and box.get_attribute("dir") == direction
    first, second = (span.rect["x"] for span in visit.all("#view-text .token")[:2])
    assert (first > second) == (direction == "rtl")
    visit.choose(token=1)
    visit.focus("#view-text .text")
    visit.press(Keys.LEFT if direction == "rtl" else Keys.RIGHT)
    effective = maps.compute()[1].effective[0, 0, 2, 1:-1]
    cells = [cell.text for cell in visit.all("#view-text tbody tr:first-child > *")]
    assert agrees(cells[2], effective[int(effective.abs().argmax())].item())
    visit.require_sound(name)


def test_a_notebook_shows_the_page_in_a_frame(browser, seen, tmp_path):
    frame = seen.show(example=1, tokens=TOKENS)._repr_html_()
    (tmp_path / "cell.html").write_text(f"<!doctype html><title>cell</title>{frame}")
    browser.get((tmp_path / "cell.html").as_uri())
    browser.switch_to.frame(0)
    visit = Visit.__new__(Visit)
    visit.browser = browser
    visit.drawn()
    assert visit.find("#example").get_attribute("value") == "1"
    visit.choose(layer=1, head=2, token=4)
    raw = maps_of(seen, (1, 2, 1))[0]
    assert agrees(visit.cell("#view-maps .figure", (4, 2), (6, 6)), raw[4, 2].item())
    browser.switch_to.default_content()
    assert browser.get_log("browser") == []


def test_a_page_without_maps_has_what_there_is(browser, seen, tmp_path):
    statistics, attribution = seen.observers[0], seen.observers[2].compute()
    visit = Visit(browser, attnlens.report(statistics), tmp_path)
    assert not visit.find("#views-section").is_displayed()
    assert not visit.find("#example").is_displayed()
    visit.choose(field=3)
    visit.require_sound()
    visit = Visit(browser, attnlens.report(attribution), tmp_path)
    assert not visit.find("#heads-section").is_displayed()
    assert [tab.text for tab in visit.all("[role=tab]")] == ["By layer"]
    assert visit.find("#view-curves").is_displayed()
    assert visit.find("#curve option").text == "Hidden token attribution: own"
    visit.require_sound()


def test_many_heads_of_which_some_are_unknown(browser, tmp_path):
    statistics = one_of_each()["HeadStatisticsResult"]
    many = {
        name: torch.linspace(-1, 1, 48 * 40).reshape(48, 40)
        for name, values in statistics.tensors().items()
        if values.dim() == 2
    }
    many["rank"] = torch.full((48, 40), torch.nan)
    many["examples"] = torch.full((48, 40), 7.0)
    layers = tuple(("decoder.layers.*.self_attn", layer) for layer in range(48))
    whole = dataclasses.replace(statistics, layers=layers, value_space=("T",) * 48, **many)
    visit = Visit(browser, attnlens.report(whole), tmp_path, width=500)
    assert "over 7 examples" in visit.cell("#heads", (47, 39), (48, 40))
    visit.choose(field=1)
    assert visit.cell("#heads", (3, 2), (48, 40)).endswith("rank – over 7 examples")
    visit.require_sound("many-heads")


def test_two_models_are_subtracted(browser, tmp_path):
    before, after = models.build("bert"), models.build("bert")
    with torch.no_grad():
        after.encoder.layer[1].attention.self.query.weight.mul_(3)
    kept = []
    for model in (before, after):
        maps = EffectiveAttention()
        with Lens(model, maps), torch.no_grad():
            model(**models.inputs("bert"))
        kept.append(maps.compute())
    page = attnlens.report(kept[0], second=("after", kept[1]), tokens=TOKENS, model="before")
    visit = Visit(browser, page, tmp_path, fragment="example=1&example2=1&layer=1&layer2=1&head=2")
    assert visit.find("#tab-beside").get_attribute("aria-selected") == "true"
    visit.choose(head2=2, part="raw")
    titles = [title.text for title in visit.all("#view-beside h3")]
    assert titles[0].startswith("first: before,") and titles[1].startswith("second: after,")
    one, other = (maps[1].raw[1, 2, 4, 2].item() for maps in kept)
    said = visit.cell("#view-beside .figure:nth-child(3)", (4, 2), (6, 6))
    assert agrees(said, one - other) and one != other
    visit.open("maps")
    visit.choose(model=1)
    assert agrees(visit.cell("#view-maps .figure", (4, 2), (6, 6)), other)
    visit.require_sound("two-models")


def test_sinks_are_hidden_and_means_are_over_heads(browser, tmp_path):
    raw = torch.full((1, 2, 4, 4), 0.1)
    raw[..., 1] = 0.7
    raw[:, 1, :, 2] += 0.2
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    entry = AttentionMap("s", 0, (0, 1), raw, raw / 2, mask)
    page = attnlens.report([entry], tokens=[["[CLS]", "a", "b", "[SEP]"]])
    visit = Visit(browser, page, tmp_path, fragment="head=-1")
    said = visit.cell("#view-maps .figure", (3, 2), (4, 4))
    assert said.startswith("[SEP] → b") and agrees(said, 0.2)
    visit.choose(hide="sinks")
    said = visit.cell("#view-maps .figure", (1, 0), (2, 1))
    assert said.startswith("b → b") and agrees(said, 0.2)
    visit.choose(rescale=True)
    assert agrees(visit.cell("#view-maps .figure", (1, 0), (2, 1)), 1.1)
    visit.require_sound()
