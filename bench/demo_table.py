"""The README's table of demo runs, from their summaries.

python bench/demo_table.py runs/demo0/summary.json runs/demo1/summary.json
"""

import json
import sys
from pathlib import Path

COLUMNS = (
    "seed",
    "base = student before",
    "teacher, right experience",
    "teacher, other convention's",
    "student after",
    "per client, after",
    "KL(z+ \\|\\| z-), nats a token",
    "learning",
    "whole command",
)
LEARNING = ("explore", "cold_start", "distil")


def main(paths: list[str]) -> None:
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for path in paths:
        run = json.loads(Path(path).read_text(encoding="utf-8"))
        rates = [
            f"{run[f'pass_rate_{name}']:.2f} ({run[f'pass_rate_{name}_t07']:.2f})"
            for name in ("before", "teacher_right", "teacher_wrong", "after")
        ]
        clients = ", ".join(
            f"{name} {rate:.2f}" for name, rate in sorted(run["pass_rate_after_by_company"].items())
        )
        learning = sum(run["seconds_by_stage"][stage] for stage in LEARNING) / 60
        cells = [str(run["seed"]), *rates, clients, f"{run['kl_pos_neg']:.2f}"]
        print("| " + " | ".join([*cells, f"{learning:.1f} min", f"{run['seconds'] / 60:.1f} min"]) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
