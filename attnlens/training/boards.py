"""Histograms, tables and pictures for the boards that a training reports to."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from attnlens.errors import AttnLensWarning
from attnlens.results import LayeredResult, cell
from attnlens.training.scalars import Choice, rows_of


class Board(Protocol):
    """Where tables and pictures go."""

    def table(self, name: str, result: LayeredResult, step: int) -> None:
        """Show a result as a table."""

    def picture(self, name: str, figure: Any, step: int) -> None:
        """Show a figure."""


@dataclass(frozen=True)
class TensorBoard:
    """A `SummaryWriter`, which has no tables."""

    writer: Any

    def table(self, name: str, result: LayeredResult, step: int) -> None:
        """Show nothing."""

    def picture(self, name: str, figure: Any, step: int) -> None:
        """Show a figure."""
        self.writer.add_figure(name, figure, step, close=False)

    def histogram(self, name: str, heads: Tensor, step: int) -> None:
        """Show a distribution."""
        self.writer.add_histogram(name, heads, step)


@dataclass(frozen=True)
class WeightsAndBiases:
    """A run of W&B."""

    run: Any

    def table(self, name: str, result: LayeredResult, step: int) -> None:
        """Show a result as a table."""
        import wandb

        frame = result.to_pandas().reset_index()
        self.run.log({name: wandb.Table(dataframe=frame), "train/global_step": step})

    def picture(self, name: str, figure: Any, step: int) -> None:
        """Show a figure."""
        import wandb

        figure.canvas.draw()
        pixels = np.asarray(figure.canvas.buffer_rgba())
        self.run.log({name: wandb.Image(pixels), "train/global_step": step})


@dataclass(frozen=True)
class MLflow:
    """A run of MLflow, with the client that knows it."""

    client: Any
    run_id: str

    def table(self, name: str, result: LayeredResult, step: int) -> None:
        """Show a result as a table."""
        self.client.log_table(self.run_id, result.to_pandas().reset_index(), f"{name}.json")

    def picture(self, name: str, figure: Any, step: int) -> None:
        """Show a figure."""
        self.client.log_figure(self.run_id, figure, f"{name}.png")


def boards_of_reporters(reporters: Sequence[Any]) -> Iterator[Board]:
    """Find the boards among the callbacks of a Hugging Face Trainer.

    Args:
        reporters: the callbacks.

    Yields:
        Those that are open.
    """
    for reporter in reporters:
        writer = getattr(reporter, "tb_writer", None)
        if writer is not None:
            yield TensorBoard(writer)
        run = getattr(getattr(reporter, "_wandb", None), "run", None)
        if run is not None:
            yield WeightsAndBiases(run)
        mlflow = getattr(reporter, "_ml_flow", None)
        if mlflow is not None and mlflow.active_run() is not None:
            yield MLflow(mlflow.MlflowClient(), mlflow.active_run().info.run_id)


def boards_of_loggers(loggers: Sequence[Any]) -> Iterator[Board]:
    """Find the boards among the loggers of Lightning.

    Args:
        loggers: the loggers.

    Yields:
        Those that show pictures.
    """
    for logger in loggers:
        kind, experiment = type(logger).__name__, getattr(logger, "experiment", None)
        if hasattr(experiment, "add_histogram"):
            yield TensorBoard(experiment)
        elif kind == "WandbLogger":
            yield WeightsAndBiases(experiment)
        elif kind == "MLFlowLogger":
            yield MLflow(experiment, logger.run_id)


def show_histograms(
    boards: Sequence[Board], results: Sequence[LayeredResult], choice: Choice, group: str, step: int
) -> None:
    """Write the heads of every layer to each TensorBoard.

    Args:
        boards: where to.
        results: of observers.
        choice: which quantities.
        group: what stands before the names.
        step: of the training.
    """
    writers = [board for board in boards if isinstance(board, TensorBoard)]
    for row in (row for result in results if writers for row in choice.rows(result)):
        finite = row.values[~row.values.isnan()]
        if row.values.dim() and len(finite):
            for board in writers:
                board.histogram(f"{group}attnlens/{row.name}/{row.label}", finite, step)


def show_results(
    boards: Sequence[Board], results: Sequence[LayeredResult], choice: Choice, step: int
) -> None:
    """Show results as tables and as pictures of the layer × head grid.

    Without pandas and matplotlib there are none, which a warning says.

    Args:
        boards: where to.
        results: of the whole training.
        choice: the quantities to draw.
        step: of the training.
    """
    for board in boards:
        for result in results:
            kind = type(result).__name__.removesuffix("Result")
            try:
                board.table(f"attnlens/{kind}", result, step)
                for name in choice.quantities or result.shown:
                    for label, figure in _grids(result, name):
                        board.picture(f"attnlens/{label}", figure, step)
            except Exception as error:  # whatever a board says, the training ends well
                warnings.warn(
                    f"No tables and pictures of {kind}: {error}. They need "
                    f'"attnlens[report]" and pandas.',
                    AttnLensWarning,
                    stacklevel=2,
                )


def _grids(result: LayeredResult, name: str) -> Iterator[tuple[str, Any]]:
    """Draw a quantity by layer and head, one figure for each label."""
    rows = list(rows_of(result, name))
    for label in dict.fromkeys(row.name for row in rows):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        chosen = [row for row in rows if row.name == label]
        values = [[value for _, value in row.numbers()] for row in chosen]
        figure = Figure(
            figsize=(1.6 + 0.6 * len(values[0]), 1.2 + 0.4 * len(values)), layout="constrained"
        )
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.imshow(values, cmap="Blues", aspect="auto")
        axes.set_title(label.replace("_", " "))
        axes.set_xlabel("head")
        axes.set_xticks(range(len(values[0])))
        axes.set_yticks(range(len(values)), [row.label.replace("_", " ") for row in chosen])
        for place, line in enumerate(values):
            for head, value in enumerate(line):
                axes.text(head, place, cell(value), ha="center", va="center", fontsize=7)
        yield label, figure
