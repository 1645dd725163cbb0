"""Tables and pictures on the boards that a training reports to."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest

from attnlens import HeadStatistics, LensCallback
from tests.support.finetuning import trainer


def test_mlflow_gets_scalars_tables_and_grids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    callback = LensCallback([HeadStatistics()], every_n_steps=1)
    trainer(tmp_path, callback, report_to=["mlflow"]).train()
    (table,) = tmp_path.rglob("HeadStatistics.json")
    assert "effective_fraction" in table.read_text()
    (picture,) = tmp_path.rglob("entropy.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.glob("mlruns/*/*/metrics/attnlens/entropy/layer_00/mean"))
