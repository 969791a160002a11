"""One prepared run on a GPU machine: is every kernel right at real sizes, and how near the hardware's limit is it?

    python bench/gpu_check.py                          at most 8 minutes on one CUDA device, no network needed
    python bench/gpu_check.py --parts kernels loss     some parts alone
    python bench/gpu_check.py --device cpu --small     every part at tiny sizes, in Triton's interpreter

The parts are in `gpu_correctness.py` and `gpu_speed.py`. Each runs in a process of its own with a time budget, so that
neither a kernel that hangs nor one that breaks the CUDA context stops the next; what a part measured before it failed
is kept. After every part bench/results/<device>.json is written anew; at the end come a picture of the fused parts and
a markdown table. The exit status is 1 if a part failed or a result missed its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Seconds that a part may take, most important first: in all 7.5 minutes. fused: each row count by itself.
BUDGETS = dict(roofs=25, kernels=95, loss=70, fused_8192=75, fused_40960=100, logits=45, sweep=40)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script itself")
    parser.add_argument("--parts", nargs="+", default=list(BUDGETS), choices=list(BUDGETS))
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the JSON file")
    parser.add_argument("--rows-to", type=Path, help=argparse.SUPPRESS)  # this process is one part
    options = parser.parse_args(words)
    prepare(options.device)
    if options.rows_to is not None:
        run_here(options.parts[0], options, options.rows_to)
        return 0
    try:
        document = dict(describe(options.device), small=options.small, parts={})
    except LookupError as error:
        print(error, file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{re.sub(r'[^a-z0-9]+', '-', document['device'].lower()).strip('-')}.json"
    for part in options.parts:
        # Processes guard against a broken CUDA context; on a CPU there is none, and starting them takes longest.
        result = isolated(part, options) if options.device == "cuda" else in_process(part, options)
        document["parts"][part] = result
        count = len(result["rows"])
        print(f"{part}: {result['status']}, {count} results, {result['seconds']:.0f} s", flush=True)
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draw(document, file.with_suffix(".png"))
    print(f"\n{table(document)}\n\nwritten to {file}")
    return 0 if all(good(result) for result in document["parts"].values()) else 1


def prepare(device: str) -> None:
    """Lets the package and the parts be imported from a checkout, and picks interpreter or compiler."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # ahead of triton
    for folder in (HERE, HERE.parent):  # at the end: the checkout's kernels/ is to stand in for no package
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def describe(device: str) -> dict[str, Any]:
    """The device and the versions; LookupError without the device."""
    import torch
    import triton

    if device == "cuda" and not torch.cuda.is_available():
        raise LookupError(
            f"torch {torch.__version__} sees no GPU here: run this on a machine with one, "
            "or try the script itself with --device cpu --small"
        )
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    versions = dict(python=platform.python_version(), torch=torch.__version__, triton=triton.__version__)
    return dict(device=name, versions=versions, cuda=torch.version.cuda, when=time.strftime("%Y-%m-%d %H:%M"))


def isolated(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs a part in a process of its own; its rows come back by a file, also when it is killed."""
    words = [sys.executable, str(HERE / "gpu_check.py"), "--device", options.device, "--parts", part]
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.touch()
        began = time.perf_counter()
        try:
            done = subprocess.run(
                [*words, "--rows-to", str(rows), *(["--small"] if options.small else [])],
                stderr=subprocess.PIPE,
                text=True,
                timeout=BUDGETS[part],
            )
            status, error = ("ok", None) if done.returncode == 0 else ("failed", done.stderr[-4000:])
        except subprocess.TimeoutExpired:
            status, error = f"stopped after {BUDGETS[part]} s", None
        return outcome(status, error, rows, began)


def in_process(part: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.touch()
        began = time.perf_counter()
        status, error = "ok", None
        try:
            run_here(part, options, rows)
        except Exception:  # whatever it is, it is recorded and the next part runs
            status, error = "failed", traceback.format_exc()[-4000:]
        return outcome(status, error, rows, began)


def run_here(part: str, options: argparse.Namespace, rows: Path) -> None:
    import gpu_correctness
    import gpu_speed
    import torch
    from gpu_bench import Bench

    bench = Bench(torch.device(options.device), options.small, rows)
    few, many = (2, 2) if options.small else (8192, 40_960)
    parts = dict(
        roofs=lambda: gpu_speed.roofs(bench),
        kernels=lambda: gpu_correctness.kernels(bench),
        loss=lambda: gpu_correctness.loss(bench),
        fused_8192=lambda: gpu_speed.fused(bench, few),
        fused_40960=lambda: gpu_speed.fused(bench, many),
        logits=lambda: [gpu_speed.logits(bench, count) for count in sorted({few, many})],
        sweep=lambda: gpu_speed.sweep(bench, few),
    )
    parts[part]()


def outcome(status: str, error: str | None, rows: Path, began: float) -> dict[str, Any]:
    whole = [line for line in rows.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    found = [json.loads(line) for line in whole]  # a killed part may leave half a line
    return dict(
        status=status,
        seconds=round(time.perf_counter() - began, 1),
        error=error,
        rows=[row for row in found if "what" in row],
        results=[row for some in found for row in some.get("results", [])],  # of kl_throughput
    )


def good(result: dict[str, Any]) -> bool:
    return result["status"] == "ok" and all(row["ok"] is not False for row in result["rows"])


def draw(document: dict[str, Any], file: Path) -> None:
    from kl_plot import plot

    results = [row for part in document["parts"].values() for row in part["results"]]
    try:
        if results:
            plot(results, str(file))
    except ImportError as error:
        print(f"no picture: {error}")


def table(document: dict[str, Any]) -> str:
    """Results as markdown: one line each, the limit beside what has one."""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [
        f"{document['device']}, {versions}",
        "",
        "| part | what | result | limit | |",
        "|---|---|---|---|---|",
    ]
    for part, result in document["parts"].items():
        for row in result["rows"]:
            values = ", ".join(f"{value:.4g} {unit}" for unit, value in row["values"].items())
            verdict = {True: "ok", False: "**missed**", None: ""}[row["ok"]]
            lines.append(f"| {part} | {row['what']} | {values} | {row['limit'] or ''} | {verdict} |")
        if result["status"] != "ok":
            last = (result["error"] or "").strip().splitlines()[-1:] or [""]
            lines.append(f"| {part} | | {result['status']} | | {last[0][:200]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
