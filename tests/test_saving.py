"""Results on disk: exact, whole, and refused when they are not ours."""

from __future__ import annotations

import math
import os
import random
import re
import resource
import stat
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors import torch as tensor_files
from torch import Tensor

import attnlens
from attnlens import AttnLensError, EffectiveAttention, HiddenTokenAttribution, Lens
from attnlens.attention import Recording
from attnlens.attention.statistics import HeadStatisticsResult
from attnlens.errors import InputError
from attnlens.files import (
    load_state,
    read_json,
    save_state,
    write_atomically,
    write_json,
    write_sealed,
    write_tensors,
)
from attnlens.saving import load, read_header, save
from tests.support import models

TENSORS = [
    name for name, kind in HeadStatisticsResult.__annotations__.items() if kind == "Tensor"
]  # fmt: skip


@pytest.fixture
def result():
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.rand(2, 3, generator=generator, dtype=torch.float64) for name in TENSORS}
    tensors["rank"][1, 2] = math.nan
    layers = (("encoder.layer.*.attention.self", 0), ("decoder", 4))
    return HeadStatisticsResult(layers, value_space=("T", "V"), **tensors)


def rewritten(path, **changes):
    """The file at path with entries of its header changed."""
    header = read_header(path) | changes
    write_sealed(path, tensor_files.load_file(path), header)


def test_a_result_returns_as_it_was(result, tmp_path):
    save(result, tmp_path / "a.safetensors", model="some/model", settings={"layers": [0, 4]})
    found = load(tmp_path / "a.safetensors")
    assert found.layers == result.layers and found.value_space == result.value_space
    for name, tensor in result.tensors().items():
        torch.testing.assert_close(found.tensors()[name], tensor, rtol=0, atol=0, equal_nan=True)
        assert found.tensors()[name].dtype == torch.float64


def test_the_header_says_what_the_file_holds(result, tmp_path):
    save(result, tmp_path / "a.safetensors", model="some/model", settings={"layers": [0, 4]})
    header = read_header(tmp_path / "a.safetensors")
    assert header["kind"] == "HeadStatisticsResult" and header["format"] == 1
    assert header["shapes"] == {name: [2, 3] for name in TENSORS}
    assert header["model"] == "some/model" and header["settings"] == {"layers": [0, 4]}
    assert header["versions"]["torch"] == torch.__version__


def test_two_saves_of_a_result_are_the_same_bytes(result, tmp_path):
    contents = set()
    for trial in range(20):
        save(result, tmp_path / str(trial), model="some/model", settings={"layers": [0, 4]})
        contents.add((tmp_path / str(trial)).read_bytes())
    assert len(contents) == 1


def test_settings_that_look_like_a_seal_change_nothing(tmp_path):
    about = {"sha256": "0" * 64, "0" * 64: '{"sha256": "' + "0" * 64}
    save_state({"0" * 64: torch.ones(2)}, tmp_path / "a", about)
    tensors, found = load_state(tmp_path / "a")
    assert found == about and torch.equal(tensors["0" * 64], torch.ones(2))


def test_one_file_of_the_package_writes_safetensors():
    root = Path(attnlens.__file__).parent
    writes = re.compile(r"save_file|tensor_files\.save|serialize")
    writers = [path.name for path in root.rglob("*.py") if writes.search(path.read_text())]
    assert writers == ["files.py"]


def test_json_holds_names_of_any_bytes(tmp_path):
    document = {"name": os.fsdecode(b"na\xc3\xafve \xff.txt"), "number": 0.1}
    write_json(tmp_path / "a.json", document)
    assert read_json(tmp_path / "a.json", "a document") == document
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(InputError, match=r"Cannot read a document from .*a\.json"):
        read_json(tmp_path / "a.json", "a document")


def test_views_are_saved_by_value(result, tmp_path):
    turned = {name: tensor.T.contiguous().T for name, tensor in result.tensors().items()}
    view = HeadStatisticsResult(result.layers, value_space=result.value_space, **turned)
    save(view, tmp_path / "a.safetensors")
    torch.testing.assert_close(load(tmp_path / "a.safetensors").entropy, result.entropy)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_a_truncated_file_is_refused(result, tmp_path, kept):
    path = tmp_path / "a.safetensors"
    save(result, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(InputError, match="not a complete safetensors file"):
        load(path)


def test_a_file_of_someone_else_is_refused(tmp_path):
    tensor_files.save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="attnlens did not write it"):
        load(tmp_path / "model.safetensors")


def test_a_newer_format_is_refused(result, tmp_path):
    path = tmp_path / "a.safetensors"
    save(result, path)
    rewritten(path, format=3)
    with pytest.raises(InputError, match="has format 3; this attnlens reads format 1"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "one"}, "damaged"),
        ({"kind": "Weights"}, "'Weights'"),
        ({"fields": {"layers": []}}, "value_space missing or unknown"),
        ({"fields": {"layers": [], "value_space": [], "colour": 1}}, "colour missing or unknown"),
    ],
)
def test_a_damaged_header_is_refused(result, tmp_path, changes, message):
    path = tmp_path / "a.safetensors"
    save(result, path)
    rewritten(path, **changes)
    with pytest.raises(InputError, match=message):
        load(path)


def test_a_header_that_is_no_json_is_refused(tmp_path):
    tensor_files.save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors", {"attnlens": "{"})
    with pytest.raises(InputError, match="damaged"):
        load(tmp_path / "a.safetensors")


def test_a_missing_file_is_a_missing_file(tmp_path):
    with pytest.raises(InputError, match=r"none\.safetensors: No such file"):
        load(tmp_path / "none.safetensors")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_atomically(path, b"old")

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr("attnlens.files.os.replace", fail)
    with pytest.raises(InputError, match=r"Cannot write .*a: disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_replaced_file_has_ordinary_permissions(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.fixture(scope="module")
def seen():
    """What three observers saw in one forward pass, and the captures themselves."""
    model = models.build("t5")
    maps, attribution = EffectiveAttention(), HiddenTokenAttribution(probes=2, keep="matrices")
    recording = Recording()
    with Lens(model, recording, maps, attribution), torch.no_grad():
        model(**models.inputs("t5"))
    return {
        "captures": recording.compute(),
        "maps": maps.compute(),
        "matrices": attribution.matrices,
        "attribution": attribution.compute(),
    }


def assert_same(found, expected):
    """Equal field by field, tensors bit by bit, also inside parts and lists."""
    assert type(found) is type(expected)
    if isinstance(expected, list | tuple):
        for mine, theirs in zip(found, expected, strict=True):
            assert_same(mine, theirs)
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert found.numpy().tobytes() == expected.contiguous().numpy().tobytes()
    elif hasattr(expected, "__dataclass_fields__"):
        for field in fields(expected):
            if field.name != "_supports":
                assert_same(getattr(found, field.name), getattr(expected, field.name))
    else:
        assert found == expected


@pytest.mark.parametrize("what", ["captures", "maps", "matrices", "attribution"])
def test_what_observers_saw_returns_bit_by_bit(seen, what, tmp_path):
    save(seen[what], tmp_path / "a.safetensors")
    assert_same(load(tmp_path / "a.safetensors"), seen[what])


def test_loaded_captures_give_the_same_effective_attention(seen, tmp_path):
    tokens = [["a"] * 19, ["b"] * 6]
    save(seen["captures"], tmp_path / "a.safetensors", model="some/model", tokens=tokens)
    found = load(tmp_path / "a.safetensors")
    assert read_header(tmp_path / "a.safetensors")["tokens"] == tokens
    for mine, theirs in zip(found, seen["captures"], strict=True):
        assert torch.equal(mine.effective_attention(), theirs.effective_attention())


def test_what_captures_share_is_written_and_loaded_once(seen, tmp_path):
    capture = seen["captures"][0]
    save([capture, replace(capture, call=1)], tmp_path / "a.safetensors")
    first, second = load(tmp_path / "a.safetensors")
    assert first.masking is second.masking and first.output_projection is second.output_projection
    assert first.context is second.context
    shapes = read_header(tmp_path / "a.safetensors")["shapes"]
    assert len([name for name in shapes if name.endswith(("bias", "context"))]) == 2


@pytest.mark.parametrize("wrong", [[], [1], 3.0, "captures"])
def test_what_has_no_form_is_refused(wrong, tmp_path):
    with pytest.raises(InputError, match="Results to save are"):
        save(wrong, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_tensor_of_another_shape_is_refused(result, tmp_path):
    path = tmp_path / "a.safetensors"
    save(result, path)
    rewritten(path, shapes={name: [3, 2] for name in TENSORS})
    with pytest.raises(InputError, match="not of the shapes noted"):
        load(path)


def damaged(content, chance):
    """A copy cut short, or with a byte changed, or a stretch of it overwritten or lost."""
    place = chance.randrange(len(content))
    stretch = chance.randrange(1, 200)
    kind = chance.choice(["cut", "flip", "overwrite", "lose"])
    if kind == "cut":
        return content[:place]
    if kind == "flip":
        flipped = content[place] ^ (1 << chance.randrange(8))
        return content[:place] + bytes([flipped]) + content[place + 1 :]
    noise = chance.randbytes(stretch) if kind == "overwrite" else b""
    return content[:place] + noise + content[place + stretch :]


def test_two_hundred_damaged_files_are_all_refused(seen, tmp_path):
    path = tmp_path / "a.safetensors"
    save(seen["captures"], path, model="some/model")
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    chance = random.Random(0)
    for trial in range(200):
        # every other file is damaged in its header, which is the smaller part
        part = content if trial % 2 else content[:header]
        broken = damaged(part, chance) + content[len(part) :]
        assert broken != content
        path.write_bytes(broken)
        with pytest.raises(AttnLensError, match=r"a\.safetensors"):
            load(path)


def test_permissions_and_links_of_a_replaced_file_are_kept(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "a", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    write_atomically(link, b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "elsewhere", "link"]


@pytest.mark.parametrize("name", ["a" * 255, "é" * 127, "{{content}}", "a\nb", "\udcff"])
def test_names_of_any_kind_are_written_and_read(result, tmp_path, name):
    save(result, tmp_path / name)
    assert_same(load(tmp_path / name), result)


@pytest.mark.parametrize("write", [
    lambda result, path: save(result, path),
    lambda result, path: save_state(result.tensors(), path, {}),
    lambda result, path: write_tensors(path, result.tensors()),
    lambda result, path: write_json(path, {"a": list(range(3000))}),
])  # fmt: skip
def test_what_cannot_be_written_names_its_path_and_leaves_the_old_file(result, tmp_path, write):
    """A folder, no folder, a name too long, a device, and a disk that is full."""
    (tmp_path / "folder").mkdir()
    for name, reason in (
        ("folder", "it is a folder"),
        ("no/file", "No such file or directory"),
        ("n" * 300, "File name too long"),
        ("zero\0byte", "null byte"),
        ("/dev/full", "it is no ordinary file"),
    ):
        with pytest.raises(InputError, match=f"Cannot write .*{reason}"):
            write(result, tmp_path / name)
    old = tmp_path / "old"
    old.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(InputError, match=r"Cannot write .*old: .*File too large"):
            write(result, old)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert old.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "old"]


def test_settings_that_are_not_plain_are_refused(result, tmp_path):
    circle = {}
    circle["again"] = circle
    for settings in ({"a": object()}, {"a": {1, 2}}, {("a",): 1}, circle, {"a": torch.ones(1)}):
        with pytest.raises(InputError, match=r"a\.safetensors cannot be written.*not plain"):
            save(result, tmp_path / "a.safetensors", settings=settings)
        with pytest.raises(InputError, match="cannot be written as JSON"):
            write_json(tmp_path / "a.json", settings)
    assert not list(tmp_path.iterdir())


def test_halves_of_surrogate_pairs_return(result, tmp_path):
    path = tmp_path / "a.safetensors"
    save(result, path, model="\ud800", tokens=[["\udfff", "a"]], settings={"\udc80": "\ud83d"})
    header = read_header(path)
    assert (header["model"], header["tokens"]) == ("\ud800", [["\udfff", "a"]])
    assert header["settings"] == {"\udc80": "\ud83d"}


def test_two_saves_are_the_same_bytes_in_any_process(tmp_path):
    code = (
        "import sys, torch\n"
        "from attnlens import EffectiveAttention, HeadStatistics, HiddenTokenAttribution\n"
        "from attnlens import Lens, save\n"
        "from tests.support import models\n"
        "seen = HeadStatistics(), EffectiveAttention(), HiddenTokenAttribution(2)\n"
        "with Lens(models.build('bert'), *seen) as lens, torch.no_grad():\n"
        "    lens.model(**models.inputs('bert'))\n"
        "for place, observer in enumerate(seen):\n"
        "    for again in 'ab':\n"
        "        path = f'{sys.argv[1]}-{place}{again}'\n"
        "        save(observer.compute(), path, settings={'x': 1, 'y': 2})\n"
    )
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / seed)], check=True, timeout=1800,
            env=os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    contents = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(contents) == 12
    for place in range(3):
        assert len({contents[f"{seed}-{place}{again}"] for seed in "12" for again in "ab"}) == 1
