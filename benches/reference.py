#!/usr/bin/env python3
"""The decomposition the way one writes it in PyTorch first, and how much faster gradprism is.

    python benches/reference.py CHECKPOINT ROLLOUTS                       # run the reference way once
    python benches/reference.py CHECKPOINT ROLLOUTS --compare gradprism   # all in turns, with ratios and peak memory

Needs torch. The reference way takes a forward and a backward pass for every trajectory and component (task, KL, entropy),
adds the gradients of a group up, and takes the norms and the products that signal and noise follow from. Both load the
same TorchScript file and use the same number of threads; times are of the work alone, without loading.

--eager FILE:CLASS adds a line: the gradients of a group's trajectories at once by torch.func (vmap over grad), which
cannot take a TorchScript module, so that the class of the model is needed; CLASS() gets the weights of the checkpoint.

--first N takes the first N trajectories, --length L repeats or cuts every response to L tokens: how times grow.
"""
import argparse
import importlib.util
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


def advantages(lines: list[dict]) -> Tensor:
    reward = torch.tensor([line["reward"] for line in lines], dtype=torch.float64)
    if reward.max() == reward.min():
        return torch.zeros_like(reward)
    return (reward - reward.mean()) / (reward.std() + 1e-6)


def numbers(task: Tensor, kl: Tensor, entropy: Tensor, squares: float, group: int) -> dict[str, float]:
    """From the sums of a group's gradients, and the sum of the squared norms of its task gradients."""
    task_sq = task.dot(task).item()
    return {
        "task_norm": task_sq**0.5,
        "signal_sq": (task_sq - squares) * group / (group - 1),
        "kl_unit_norm": kl.norm().item(),
        "entropy_unit_norm": entropy.norm().item(),
        "reg_norm": (KL_COEF * kl + ENTROPY_COEF * entropy).norm().item(),
    }


def split(policy: torch.nn.Module, parameters: list[Tensor], lines: list[dict]) -> dict[str, float]:
    group = len(lines)
    sums: dict[str, Tensor] = {}
    squares = 0.0
    for line, advantage in zip(lines, advantages(lines)):
        for name in ("task", "kl", "entropy"):
            gradient = flat_gradient(component(policy, line, advantage.item(), name) / group, parameters)
            sums[name] = sums[name] + gradient if name in sums else gradient
            if name == "task":
                squares += gradient.dot(gradient).item()
    return numbers(sums["task"], sums["kl"], sums["entropy"], squares, group)


def split_by_func(policy: torch.nn.Module, lines: list[dict]) -> dict[str, float]:
    """As `split`, with the gradients of all trajectories of the group from three calls of vmap(grad)."""
    group, longest = len(lines), max(len(line["prompt_ids"] + line["response_ids"]) for line in lines)

    def padded(of, kind=torch.float32) -> Tensor:
        return torch.tensor([list(of(line)) + [0] * (longest - len(of(line))) for line in lines], dtype=kind)

    def aligned(name: str) -> Tensor:  # what belongs to token t + 1 stands at t
        return padded(lambda line: [0] * (len(line["prompt_ids"]) - 1) + line[name])

    ids = padded(lambda line: line["prompt_ids"] + line["response_ids"], torch.int64)
    mask = padded(lambda line: [1] * len(line["prompt_ids"] + line["response_ids"]), torch.int64)
    chosen = padded(lambda line: [0] * (len(line["prompt_ids"]) - 1) + [1] * len(line["response_ids"]))
    inputs = (ids, mask, chosen, aligned("old_logprobs"), aligned("ref_logprobs"), advantages(lines).float())
    weights = {name: parameter.detach() for name, parameter in policy.named_parameters()}

    def loss(weights: dict, name: str, ids, mask, chosen, old, ref, advantage) -> Tensor:
        logits = torch.func.functional_call(policy, weights, (ids[None], mask[None]))[0]
        every = logits.log_softmax(-1)
        logp = every.gather(1, ids.roll(-1)[:, None])[:, 0]
        if name == "entropy":
            per_token = (every.exp() * every).sum(-1)
        elif name == "kl":
            per_token = (ref - logp).exp() + (logp - ref) - 1
        else:
            ratio = (logp - old).exp()
            per_token = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        return torch.where(chosen > 0, per_token, 0.0).sum() / chosen.sum() / group

    sums, squares = {}, 0.0
    for name in ("task", "kl", "entropy"):
        gradient = torch.func.grad(lambda weights, *row: loss(weights, name, *row))
        rows = torch.func.vmap(gradient, in_dims=(None, 0, 0, 0, 0, 0, 0))(weights, *inputs)
        sums[name] = torch.cat([part.sum(0).flatten() for part in rows.values()])
        if name == "task":
            squares = sum(part.square().sum().item() for part in rows.values())
    return numbers(sums["task"], sums["kl"], sums["entropy"], squares, group)


def eager(spec: str, script: torch.nn.Module) -> torch.nn.Module:
    """The class named by FILE:CLASS with the weights of the checkpoint."""
    file, name = spec.rsplit(":", 1)
    loaded = importlib.util.spec_from_file_location("eager", file)
    module = importlib.util.module_from_spec(loaded)
    sys.modules["eager"] = module
    loaded.loader.exec_module(module)
    policy = getattr(module, name)()
    policy.load_state_dict(script.state_dict())
    return policy.eval()


def read(path: Path, first: int | None) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()][:first]


def of_length(lines: list[dict], length: int, checkpoint: Path) -> list[dict]:
    """The lines with responses of so many tokens, repeated or cut, as if the policy had sampled them."""
    policy = torch.jit.load(str(checkpoint)).eval()
    scored = []
    for line in lines:
        response = list(itertools.islice(itertools.cycle(line["response_ids"]), length))
        ids = torch.tensor([line["prompt_ids"] + response])
        with torch.no_grad(), torch.jit.optimized_execution(False):
            every = policy(ids, torch.ones_like(ids))[0, len(line["prompt_ids"]) - 1 : -1].log_softmax(-1)
        old = every.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
        kept = {name: line[name] for name in ("group_id", "prompt_ids", "reward")}
        scored.append({**kept, "response_ids": response, "old_logprobs": old, "ref_logprobs": [x - 0.1 for x in old]})
    return scored


def reference(checkpoint: Path, rollouts: Path, spec: str | None) -> None:
    policy = torch.jit.load(str(checkpoint)).eval()
    parameters = list({parameter.data_ptr(): parameter for parameter in policy.parameters()}.values())
    groups = [list(rows) for _, rows in itertools.groupby(read(rollouts, None), key=lambda line: line["group_id"])]
    module = eager(spec, policy) if spec else None
    started = time.perf_counter()
    # The profiling executor would make the second and third call several times slower.
    with torch.jit.optimized_execution(False):
        results = [split_by_func(module, group) if module else split(policy, parameters, group) for group in groups]
    print(json.dumps({"seconds": time.perf_counter() - started, "groups": results}))


def measured(command: list[str], log: Path) -> float:
    """Runs a command, and returns the peak of its memory in megabytes."""
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"{command[0]} failed"
    return usage.ru_maxrss / 1000


SETTINGS = {
    "loop": ["decomposition.engine=loop"],
    "batched": ["decomposition.engine=batched"],
    "combined": ["decomposition.engine=batched", "decomposition.components=combined"],
    "sketch": ["decomposition.engine=sketch"],
    "sketch-combined": ["decomposition.engine=sketch", "decomposition.components=combined"],
}


def check(groups: list[dict], known: list[dict], tolerance: float) -> None:
    for group, expected in zip(groups, known, strict=True):
        # Signal² is a difference, and may be far larger than the squared norm of the sum.
        scale = max(expected["task_norm"] ** 2, abs(expected["signal_sq"]), 1e-9)
        assert abs(group["signal_sq"] - expected["signal_sq"]) < tolerance * scale, (group, expected)
        # A float32 norm of 134 million numbers is 1 % too small; gradprism adds in float64.
        off = abs(group["reg_norm"] - expected["reg_norm"])
        assert off < max(tolerance, 2e-2) * expected["reg_norm"], (group, expected)


def compare(args: argparse.Namespace) -> None:
    engines = ["reference", *(["torch.func"] if args.eager else []), *args.engines.split(",")]
    seconds: dict[str, list[float]] = {engine: [] for engine in engines}
    memory: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        config, log, out = Path(folder, "study.yaml"), Path(folder, "log"), Path(folder, "out")
        rollouts = Path(folder, "rollouts.jsonl")
        lines = read(args.rollouts, args.first)
        if args.length is not None:
            lines = of_length(lines, args.length, args.checkpoint)
        rollouts.write_text("".join(json.dumps(line) + "\n" for line in lines))
        config.write_text(
            f"policy: {{checkpoint: {args.checkpoint.resolve()}}}\nrollouts: {{path: {rollouts}}}\n"
            f"algorithm: {{kl: {{coef: {KL_COEF}}}, entropy_coef: {ENTROPY_COEF}}}\ndecomposition: {{buckets: 1}}\n"
        )
        for _, engine in itertools.product(range(args.runs), engines):
            if engine in SETTINGS:
                command = [args.compare, "study", str(config), "--out", str(out), "--force", "--quiet"]
                for setting in SETTINGS[engine]:
                    command += ["--set", setting]
                peak = measured(command, log)
                elapsed = json.loads((out / "summary.json").read_text())["wall_time"]["seconds"]
                groups = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]
                # A sketch is an estimate.
                check(groups, known, 0.5 if "sketch" in engine else 1e-3)
            else:
                command = [sys.executable, __file__, str(args.checkpoint), str(rollouts)]
                peak = measured([*command, *(["--eager", args.eager] if engine != "reference" else [])], log)
                result = json.loads(log.read_text())
                elapsed = result["seconds"]
                if engine == "reference":
                    known = result["groups"]
                check(result["groups"], known, 1e-3)
            seconds[engine].append(elapsed)
            memory[engine] = max(memory.get(engine, 0.0), peak)
    tokens = sum(len(line["prompt_ids"]) + len(line["response_ids"]) for line in lines)
    print(f"{len(lines)} trajectories, {tokens} tokens, {os.cpu_count()} cores, medians of {args.runs} runs in turns")
    for engine in engines:
        ratios = [base / own for base, own in zip(seconds["reference"], seconds[engine])]
        print(
            f"{engine:<16} {statistics.median(seconds[engine]):8.2f} s, {statistics.median(ratios):5.2f} times as fast"
            f" ({min(ratios):.2f} to {max(ratios):.2f}), peak {memory[engine] / 1000:.2f} GB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="The decomposition in plain PyTorch, timed against gradprism.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--compare", metavar="PROGRAM", help="gradprism's program, to be run in turns")
    parser.add_argument("--engines", default="loop,batched", help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--eager", metavar="FILE:CLASS", help="the model's class, for torch.func")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N trajectories")
    parser.add_argument("--length", type=int, metavar="L", help="responses of L tokens")
    args = parser.parse_args()
    if args.compare is None:
        reference(args.checkpoint, args.rollouts, args.eager)
    else:
        compare(args)


if __name__ == "__main__":
    main()
