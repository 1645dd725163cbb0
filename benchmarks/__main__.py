"""Run benchmark cases: `python -m benchmarks [CASE …] [--json FILE]`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

import attnlens
import benchmarks
from benchmarks.registry import CASES, Case, Check


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen cases and return the exit code: 1 if a check failed."""
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if module.name != "__main__":
            importlib.import_module(f"benchmarks.{module.name}")
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {', '.join(CASES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to a file")
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.cases) - CASES.keys()
    if unknown:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are: {', '.join(CASES)}")

    machine = describe_machine()
    print("  ".join(f"{name} {entry}" for name, entry in machine.items()))
    default = [name for name, entry in CASES.items() if not entry.by_name]
    reports = [run(CASES[name]) for name in chosen.cases or default]
    if chosen.json:
        chosen.json.write_text(json.dumps({"machine": machine, "cases": reports}, indent=1))
    return 0 if all(report["passed"] for report in reports) else 1


def describe_machine() -> dict[str, str]:
    """Say what the figures were measured on and with."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "cpu": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "attnlens": attnlens.__version__,
    }


def run(case: Case) -> dict[str, Any]:
    """Run a case, printing as it goes; it ends at the first check that fails."""
    print(f"\n{case.name}: {case.summary}")
    report: dict[str, Any] = {"name": case.name, "passed": True, "checks": [], "comparisons": []}
    for step in case.steps():
        if isinstance(step, Check):
            report["checks"].append(asdict(step) | {"passed": step.passed})
            sign = "ok    " if step.passed else "FAILED"
            print(f"  {sign} {step.name}: {step.error:.1e}, bar {step.bar:.0e}")
            if not step.passed:
                report["passed"] = False
                break
        else:
            report["comparisons"].append(asdict(step) | {"ratio": step.ratio})
            print(
                f"  {step.setting}: {step.subject} {step.value:.4g} {step.unit}, {step.baseline} "
                f"{step.baseline_value:.4g} {step.unit}: {step.ratio:.3g} ×"
            )
    return report


def _processor() -> str:
    """The processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
