#!/usr/bin/env python3
"""What tests/trainer.rs and tests/checkpoint.rs compare with: the same work by torch alone.

    python trainer_reference.py adamw  TASK.json ANSWER.json    # torch.optim.AdamW on given gradients
    python trainer_reference.py update TASK.json ANSWER.json    # GRPO updates of a policy on given rollouts
    python trainer_reference.py logits TASK.json ANSWER.json    # the logits of a saved policy, and its tied weights

Needs torch. Everything is float64 unless a policy is of another dtype.
"""
import json
import math
import sys

import torch
from torch import Tensor


def optimizer(parameters: list[Tensor], task: dict) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    options = task["options"]
    adamw = torch.optim.AdamW(
        parameters,
        lr=options["learning_rate"],
        betas=(options["beta1"], options["beta2"]),
        eps=options["epsilon"],
        weight_decay=options["weight_decay"],
        foreach=False,
        fused=False,
    )
    warmup, cosine = task["warmup"], task["cosine"]

    def factor(done: int) -> float:
        update = done + 1
        if update < warmup:
            return update / warmup
        if cosine is None:
            return 1.0
        progress = min(1.0, (update - warmup) / (cosine["updates"] - warmup))
        return cosine["floor"] + (1 - cosine["floor"]) * (1 + math.cos(math.pi * progress)) / 2

    return adamw, torch.optim.lr_scheduler.LambdaLR(adamw, factor)


def clip(parameters: list[Tensor], max_norm: float | None) -> float:
    norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf if max_norm is None else max_norm)
    return norm.item()


def adamw(task: dict) -> dict:
    parameters = [
        torch.nn.Parameter(torch.tensor(values, dtype=torch.float64).reshape(shape))
        for values, shape in zip(task["weights"], task["shapes"])
    ]
    adamw, schedule = optimizer(parameters, task)
    steps = []
    for gradients in task["gradients"]:
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = None
            if gradient is not None:
                parameter.grad = torch.tensor(gradient, dtype=torch.float64).reshape(parameter.shape)
        norm = clip(parameters, task["max_norm"])
        adamw.step()
        schedule.step()
        steps.append({"norm": norm, "weights": [p.detach().flatten().tolist() for p in parameters]})
    return {"steps": steps}


def advantages(lines: list[dict]) -> list[float]:
    """GRPO: of each row's reward within its group; unbiased standard deviation."""
    groups: dict[str, list[float]] = {}
    for line in lines:
        groups.setdefault(line["group_id"], []).append(line["reward"])
    found = []
    for line in lines:
        rewards = torch.tensor(groups[line["group_id"]], dtype=torch.float64)
        equal = rewards.max() == rewards.min()
        found.append(0.0 if equal else ((line["reward"] - rewards.mean()) / (rewards.std() + 1e-6)).item())
    return found


def grpo_loss(policy: torch.nn.Module, lines: list[dict], kl_coef: float, entropy_coef: float) -> Tensor:
    """Row by row, without padding: the mean over rows of the means over their sampled tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for line, advantage in zip(lines, advantages(lines)):
        prompt, response = line["prompt_ids"], line["response_ids"]
        ids = torch.tensor([prompt + response])
        positions = torch.arange(ids.size(1)).unsqueeze(0)
        logits = policy(ids, torch.ones_like(ids), positions)[0, len(prompt) - 1 : -1]
        every = logits.log_softmax(-1)
        logp = every.gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1)
        ratio = (logp - torch.tensor(line["old_logprobs"], dtype=torch.float64)).exp()
        task = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        x = logp - torch.tensor(line["ref_logprobs"], dtype=torch.float64)
        kl = (-x).exp() + x - 1
        entropy = -(every.exp() * every).sum(-1)
        mask = torch.tensor(line["response_mask"], dtype=torch.float64)
        loss = task + kl_coef * kl - entropy_coef * entropy
        total = total + (loss * mask).sum() / mask.sum() / len(lines)
    return total


def by_storage(policy: torch.nn.Module) -> dict[int, list[tuple[str, Tensor]]]:
    """torch.jit.load gives a tied weight as one tensor a name, over the same memory."""
    found: dict[int, list[tuple[str, Tensor]]] = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        found.setdefault(parameter.data_ptr(), []).append((name, parameter))
    return found


def update(task: dict) -> dict:
    policy = torch.jit.load(task["policy"]).eval()
    weights = list(by_storage(policy).values())
    leaves = [parameter for uses in weights for _, parameter in uses]
    adamw, schedule = optimizer([uses[0][1] for uses in weights], task)
    norms = []
    for _ in range(task["updates"]):
        loss = grpo_loss(policy, task["lines"], task["kl_coef"], task["entropy_coef"])
        gradients = dict(zip(map(id, leaves), torch.autograd.grad(loss, leaves, allow_unused=True)))
        for uses in weights:
            parts = {id(parameter): gradients[id(parameter)] for _, parameter in uses}
            uses[0][1].grad = sum(part for part in parts.values() if part is not None)
        norms.append(clip([uses[0][1] for uses in weights], task["max_norm"]))
        adamw.step()
        schedule.step()
    return {
        "norms": norms,
        "weights": {uses[0][0]: uses[0][1].detach().flatten().tolist() for uses in weights},
    }


def logits(task: dict) -> dict:
    policy = torch.jit.load(task["policy"])
    ids = torch.tensor(task["ids"])
    positions = torch.arange(ids.size(1)).expand_as(ids)
    # As gradprism runs it: a fused kernel rounds half precision less often.
    with torch.no_grad(), torch.jit.optimized_execution(False):
        found = policy(ids, torch.ones_like(ids), positions)
    uses = by_storage(policy).values()
    return {
        "logits": found.double().flatten().tolist(),
        "tied": [[name for name, _ in names] for names in uses if len(names) > 1],
        "without_gradient": [name for name, p in policy.named_parameters() if not p.requires_grad],
        "training": policy.training,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, task, answer = sys.argv[1:]
    with open(task) as file:
        found = {"adamw": adamw, "update": update, "logits": logits}[command](json.load(file))
    with open(answer, "w") as file:
        json.dump(found, file)
