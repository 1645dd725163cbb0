"""Results on disk: exact, whole, and refused when they are not ours."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors import torch as tensor_files

from attnlens import InputError
from attnlens.observers import HeadStatisticsResult
from attnlens.storage import load, read_header, save, write_atomically

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
    path.write_bytes(
        tensor_files.save(tensor_files.load_file(path), {"attnlens": json.dumps(header)})
    )


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
    rewritten(path, format=2)
    with pytest.raises(InputError, match="has format 2; this attnlens reads up to 1"):
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
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.safetensors")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_atomically(path, b"old")

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr("attnlens.storage.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_replaced_file_has_ordinary_permissions(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode
