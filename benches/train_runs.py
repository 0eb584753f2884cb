#!/usr/bin/env python3
"""Compares training runs: the mean over seeds of what their last steps say, ± its standard error.

    python train_runs.py [--last 10] [--curve] NAME=RUN,RUN,... ...

A RUN is a run directory of `gradprism train`. Needs nothing beside Python. Success, reward variance, SNR, MI
and H(Z|X) are means over the last steps in which they were measured; `--curve` prints the mean reward of the
validations step by step instead.
"""
import argparse
import json
import math
from pathlib import Path

COLUMNS = {
    "validation reward": ("validation", "reward_mean"),
    "validation success": ("validation", "success"),
    "success": ("sampled", "success"),
    "RV": ("sampled", "reward_variance_mean"),
    "SNR": ("split", "snr_mean"),
    "MI a token": ("reasoning", "mi_estimate"),
    "H(Z|X) a token": ("reasoning", "conditional_entropy_est"),
    "tokens": ("sampled", "tokens"),
    "seconds a step": ("time", "total"),
}


def steps(run: str) -> list[dict]:
    return [json.loads(line) for line in (Path(run) / "steps.jsonl").read_text().splitlines()]


def numbers(run: list[dict], column: tuple[str, str]) -> list[tuple[int, float]]:
    found = [(step["step"] + 1, (step.get(column[0]) or {}).get(column[1])) for step in run]
    return [(step, number) for step, number in found if number is not None]


def mean_and_error(values: list[float]) -> str:
    if not values:
        return "-"
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{mean:.3g}"
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return f"{mean:.3g} ± {math.sqrt(variance / len(values)):.2g}"


def last(run: list[dict], column: tuple[str, str], count: int) -> float | None:
    since = run[-1]["step"] + 1 - count
    values = [number for step, number in numbers(run, column) if step > since]
    return sum(values) / len(values) if values else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--last", type=int, default=10, help="steps that are averaged over")
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN,RUN")
    arguments = parser.parse_args()
    named = {name: [steps(run) for run in runs.split(",")] for name, runs in (it.split("=", 1) for it in arguments.runs)}
    if arguments.curve:
        for name, runs in named.items():
            curves = [dict(numbers(run, COLUMNS["validation reward"])) for run in runs]
            common = sorted(set.intersection(*(set(curve) for curve in curves)))
            print(f"| {name} | " + " | ".join(f"{step}: " + mean_and_error([curve[step] for curve in curves]) for step in common) + " |")
        return
    print("| runs | " + " | ".join(COLUMNS) + " |")
    print("|---|" + "---|" * len(COLUMNS))
    for name, runs in named.items():
        cells = [[value for run in runs if (value := last(run, column, arguments.last)) is not None] for column in COLUMNS.values()]
        print(f"| {name} ({len(runs)}) | " + " | ".join(map(mean_and_error, cells)) + " |")


if __name__ == "__main__":
    main()
