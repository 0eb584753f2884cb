#!/usr/bin/env python3
"""The decomposition the way one writes it in PyTorch first, and how much faster gradprism is.

    python benches/reference.py CHECKPOINT ROLLOUTS                       # run the reference way once
    python benches/reference.py CHECKPOINT ROLLOUTS --compare gradprism   # both in turns, with ratios

Needs torch. The reference way takes a forward and a backward pass for every trajectory and component (task, KL, entropy),
adds the gradients of a group up, and takes the norms and the products that signal and noise follow from. Both load the
same TorchScript file and use the same number of threads; times are of the work alone, without loading.
"""
import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

CLIP, KL_COEF, ENTROPY_COEF = 0.2, 0.001, 0.001


def component(policy: torch.nn.Module, line: dict, advantage: float, name: str) -> Tensor:
    """One trajectory's mean loss over its tokens, from a forward pass of its own."""
    prompt, response = line["prompt_ids"], line["response_ids"]
    ids = torch.tensor([prompt + response])
    logits = policy(ids, torch.ones_like(ids))[0, len(prompt) - 1 : -1]
    every = logits.log_softmax(-1)
    if name == "entropy":
        return (every.exp() * every).sum(-1).mean()
    logp = every.gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1)
    if name == "kl":
        x = logp - torch.tensor(line["ref_logprobs"])
        return ((-x).exp() + x - 1).mean()
    ratio = (logp - torch.tensor(line["old_logprobs"])).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


def flat_gradient(loss: Tensor, parameters: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])


def split(policy: torch.nn.Module, parameters: list[Tensor], lines: list[dict]) -> dict[str, float]:
    group = len(lines)
    reward = torch.tensor([line["reward"] for line in lines], dtype=torch.float64)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    if reward.max() == reward.min():
        advantage = torch.zeros_like(reward)
    sums: dict[str, Tensor] = {}
    rows = []
    for line, a in zip(lines, advantage):
        for name in ("task", "kl", "entropy"):
            gradient = flat_gradient(component(policy, line, a.item(), name) / group, parameters)
            sums[name] = sums[name] + gradient if name in sums else gradient
            if name == "task":
                rows.append(gradient)
    squares = sum(row.dot(row).item() for row in rows) * group**2
    task_sq = sums["task"].dot(sums["task"]).item()
    reg = KL_COEF * sums["kl"] + ENTROPY_COEF * sums["entropy"]
    return {
        "task_norm": task_sq**0.5,
        "signal_sq": (task_sq * group**2 - squares) / (group * (group - 1)),
        "kl_unit_norm": sums["kl"].norm().item(),
        "entropy_unit_norm": sums["entropy"].norm().item(),
        "reg_norm": reg.norm().item(),
    }


def reference(checkpoint: Path, rollouts: Path) -> None:
    policy = torch.jit.load(str(checkpoint)).eval()
    parameters = list({parameter.data_ptr(): parameter for parameter in policy.parameters()}.values())
    lines = [json.loads(line) for line in rollouts.read_text().splitlines()]
    groups = [list(rows) for _, rows in itertools.groupby(lines, key=lambda line: line["group_id"])]
    started = time.perf_counter()
    # The profiling executor would make the second and third call several times slower.
    with torch.jit.optimized_execution(False):
        results = [split(policy, parameters, group) for group in groups]
    print(json.dumps({"seconds": time.perf_counter() - started, "groups": results}))


def measured(command: list[str], log: Path) -> float:
    """Runs a command, and returns the peak of its memory in megabytes."""
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"{command[0]} failed"
    return usage.ru_maxrss / 1000


def compare(args: argparse.Namespace) -> None:
    engines = ["reference", *args.engines.split(",")]
    seconds: dict[str, list[float]] = {engine: [] for engine in engines}
    memory: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        config, log, out = Path(folder, "study.yaml"), Path(folder, "log"), Path(folder, "out")
        config.write_text(
            f"policy: {{checkpoint: {args.checkpoint.resolve()}}}\nrollouts: {{path: {args.rollouts.resolve()}}}\n"
            f"algorithm: {{kl: {{coef: {KL_COEF}}}, entropy_coef: {ENTROPY_COEF}}}\ndecomposition: {{buckets: 1}}\n"
        )
        for _, engine in itertools.product(range(args.runs), engines):
            if engine == "reference":
                command = [sys.executable, __file__, str(args.checkpoint), str(args.rollouts)]
                peak = measured(command, log)
                result = json.loads(log.read_text())
                known, elapsed = result["groups"], result["seconds"]
            else:
                command = [args.compare, "study", str(config), "--out", str(out), "--force", "--quiet"]
                peak = measured([*command, "--set", f"decomposition.engine={engine}"], log)
                elapsed = json.loads((out / "summary.json").read_text())["wall_time"]["seconds"]
                groups = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]
                for group, expected in zip(groups, known, strict=True):
                    scale = max(expected["task_norm"] ** 2, 1e-9)
                    assert abs(group["signal_sq"] - expected["signal_sq"]) < 1e-3 * scale, group["group_id"]
            seconds[engine].append(elapsed)
            memory[engine] = max(memory.get(engine, 0.0), peak)
    for engine in engines:
        ratios = [base / own for base, own in zip(seconds["reference"], seconds[engine])]
        print(
            f"{engine:<10} median {statistics.median(seconds[engine]):8.2f} s, {statistics.median(ratios):5.2f} times as fast"
            f" ({min(ratios):.2f} to {max(ratios):.2f}), {memory[engine]:.0f} MB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="The decomposition in plain PyTorch, timed against gradprism.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--compare", metavar="PROGRAM", help="gradprism's program, to be run in turns")
    parser.add_argument("--engines", default="loop,batched")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    if args.compare is None:
        reference(args.checkpoint, args.rollouts)
    else:
        compare(args)


if __name__ == "__main__":
    main()
