"""All experiments one after another, each with its own files."""

from __future__ import annotations

from examples.paper import attribution, correlation, identifiability, token_types
from examples.paper.setting import prepare, report

EXPERIMENTS = (correlation, token_types, identifiability, attribution)


def main(arguments: list[str] | None = None) -> None:
    """Run every experiment in the same setting."""
    setting = prepare("The experiments of the paper, all of them.", arguments)
    for experiment in EXPERIMENTS:
        report(setting, experiment.__name__.rsplit(".", 1)[-1], experiment.run)


if __name__ == "__main__":
    main()
