#!/usr/bin/env python3
"""Makes the policy, the reference policy and the rollouts of the quickstart. Needs torch only; three minutes.

    python make_quickstart.py            # train, sample, write policy.pt, reference.pt, rollouts.jsonl, then check them
    python make_quickstart.py --check    # only check the files that lie here, and print the table of their groups

The policy is a small causal transformer over single characters that learns arithmetic, with a short work-out:

    47+85=   ->   [7+5=12 4+8+1=13] 132

Supervised training, stopped early, makes the reference: sure of one-digit sums, unsure of longer ones, helpless at
large products. Thirty steps of group-relative policy gradient on a pool of 96 prompts make it the policy, which then
samples 8 responses to each of 24 prompts of that pool. A right answer earns 1, a well-formed wrong one 0.1, anything
else 0. So there are groups whose rewards are all alike, and groups that teach.
"""
import argparse
import copy
import itertools
import json
import math
import os
import random
import re
import sys
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
SEED = 7
# Of the first six seeds for the rollouts, one that mixes well: about a third of the groups without reward variance, a
# third with a significant signal, a third between.
ROLLOUT_SEED = 5

# --- The policy ------------------------------------------------------------------------------------

PAD, END = 0, 1
CHARACTERS = "0123456789+-*=[] "
VOCAB = 2 + len(CHARACTERS)
WIDTH, HEADS, BLOCKS = 64, 4, 4


def encode(text: str) -> list[int]:
    return [2 + CHARACTERS.index(character) for character in text]


def decode(ids: list[int]) -> str:
    """The text up to the end token, without it; a pad token inside it shows as "?"."""
    text = itertools.takewhile(lambda token: token != END, ids)
    return "".join("?" if token == PAD else CHARACTERS[token - 2] for token in text)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the halves of each head by the angle of its position; x [B, heads, T, S], cos, sin [B, 1, T, S / 2]."""
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, allowed: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).view(x.size(0), x.size(1), 3 * self.heads, -1).transpose(1, 2)
        q, k, v = qkv.chunk(3, 1)
        scores = rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(2, 3) / q.size(3) ** 0.5
        # A finite "never": a padded row that may look at nothing then gets a uniform softmax, not NaN.
        mixed = scores.masked_fill(allowed.logical_not(), -1e30).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(x.size()))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Policy(nn.Module):
    """Pre-norm, rotary positions, tied embedding, no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(WIDTH)
        size = WIDTH // HEADS
        self.register_buffer("frequencies", 1000.0 ** (-torch.arange(0, size, 2) / size))
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask [B, T] -> logits [B, T, V]; padding may stand on either side."""
        position = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        angles = (position.unsqueeze(2) * self.frequencies).unsqueeze(1)  # [B, 1, T, size / 2]
        step = torch.arange(input_ids.size(1), device=input_ids.device)
        causal = step.unsqueeze(1) >= step
        allowed = causal & (attention_mask != 0).unsqueeze(1).unsqueeze(2)  # [B, 1, T, T]
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin(), allowed)
        return F.linear(self.norm(x), self.embedding.weight)


# --- The task --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    kind: str
    prompt: str
    work: str  # empty, or the bracket and the space after it
    answer: str

    def reward(self, response: list[int]) -> float:
        """1 for the right answer, 0.1 for a wrong one in the right form, else 0. The work-out itself is not judged."""
        form = r"(\[[^\[\]]+\] )?(0|[1-9][0-9]*)"
        match = re.fullmatch(form, decode(response)) if END in response else None
        if match is None or bool(match[1]) != bool(self.work):
            return 0.0
        return 1.0 if match[2] == self.answer else 0.1


def column_sums(a: int, b: int) -> str:
    """47 + 85 -> "7+5=12 4+8+1=13": the columns from the right, with the carry."""
    columns, carry = [], 0
    while a or b:
        total = a % 10 + b % 10 + carry
        columns.append(f"{a % 10}+{b % 10}{'+1' if carry else ''}={total}")
        a, b, carry = a // 10, b // 10, total // 10
    return " ".join(columns)


def column_differences(a: int, b: int) -> str:
    """85 - 47 -> "15-7=8 7-4=3": the columns from the right, with the borrow already taken; a >= b."""
    columns, borrow = [], 0
    while a:
        upper, lower = a % 10 - borrow, b % 10
        borrow = int(upper < lower)
        upper += 10 * borrow
        columns.append(f"{upper}-{lower}={upper - lower}")
        a, b = a // 10, b // 10
    return " ".join(columns)


def part_products(a: int, b: int) -> str:
    """47 * 85 -> "47*5=235 47*80=3760"."""
    places = [int(digit) * 10**place for place, digit in enumerate(reversed(str(b)))]
    return " ".join(f"{a}*{place}={a * place}" for place in places)


def problem(kind: str, rng: random.Random) -> Problem:
    def digits(count: int) -> int:
        return rng.randrange(10 ** (count - 1) if count > 1 else 0, 10**count)

    if kind.startswith("add"):
        a, b = digits(int(kind[3])), digits(int(kind[3]))
        work = f"[{column_sums(a, b)}] " if kind != "add1" else ""
        return Problem(kind, f"{a}+{b}=", work, str(a + b))
    if kind.startswith("sub"):
        b, a = sorted((digits(int(kind[3])), digits(int(kind[3]))))
        return Problem(kind, f"{a}-{b}=", f"[{column_differences(a, b)}] ", str(a - b))
    a, b = digits(int(kind[3])), digits(int(kind[4]))
    work = f"[{part_products(b, a)}] " if kind != "mul11" else ""
    return Problem(kind, f"{a}*{b}=", work, str(a * b))


# Kind: (share of the supervised training, groups in the rollouts).
KINDS = {
    "add1": (1, 1),
    "mul11": (1, 1),
    "add2": (3, 3),
    "sub2": (2, 4),
    "mul21": (3, 7),
    "add3": (2, 6),
    "mul22": (1, 2),
}
# Each kind has this many times its groups as prompts for the policy gradient; the rollouts take the first of them.
POOL = 4
RESPONSE_LIMIT = 40


# --- Training --------------------------------------------------------------------------------------


def supervised_batch(rng: random.Random, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, attention mask and loss mask, [rows, T] each, padded on the right; the loss mask marks the response."""
    ids, loss_mask = [], []
    for kind in rng.choices(list(KINDS), [share for share, _ in KINDS.values()], k=rows):
        item = problem(kind, rng)
        prompt, response = encode(item.prompt), encode(item.work + item.answer) + [END]
        ids.append(torch.tensor(prompt + response))
        loss_mask.append(torch.tensor([0] * len(prompt) + [1] * len(response)))
    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD)
    return padded, (padded != PAD).long(), nn.utils.rnn.pad_sequence(loss_mask, batch_first=True)


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """log π of each token but the first, [B, T - 1], from logits [B, T, V]."""
    return logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)


def train_supervised(policy: Policy, rng: random.Random, steps: int, rows: int = 192, peak: float = 3e-3) -> None:
    optimizer = torch.optim.AdamW(policy.parameters(), lr=peak, weight_decay=0.01)
    for step in range(steps):
        decay = 0.5 + 0.5 * math.cos(math.pi * step / steps)
        optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / 100) * decay
        ids, mask, loss_mask = supervised_batch(rng, rows)
        weight = loss_mask[:, 1:]
        loss = -(token_logprobs(policy(ids, mask), ids) * weight).sum() / weight.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            print(f"supervised {step + 1}/{steps}: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def sample(policy: nn.Module, prompts: list[str]) -> list[list[int]]:
    """One response a prompt at temperature 1, up to and with its end token, at most RESPONSE_LIMIT tokens."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + encode(prompt) for prompt in prompts])
    mask = (ids != PAD).long()
    live = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(RESPONSE_LIMIT):
        token = torch.full((len(prompts), 1), PAD)
        token[live] = torch.multinomial(policy(ids[live], mask[live])[:, -1].softmax(-1), 1)
        ids, mask = torch.cat([ids, token], 1), torch.cat([mask, live.long().unsqueeze(1)], 1)
        live = live & (token[:, 0] != END)
        if not live.any():
            break
    responses = ids[:, width:].tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in responses]


def train_policy_gradient(
    policy: Policy, pool: list[Problem], rng: random.Random, steps: int, prompts: int = 24, group: int = 8
) -> None:
    """Plain group-relative policy gradient: sample, centre and scale the rewards of each prompt, one step."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-5, weight_decay=0.0)
    for step in range(steps):
        problems = [item for item in rng.sample(pool, prompts) for _ in range(group)]
        responses = sample(policy, [item.prompt for item in problems])
        reward = torch.tensor([item.reward(row) for item, row in zip(problems, responses)]).view(prompts, group)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)).view(-1)

        rows = [torch.tensor(encode(item.prompt) + row) for item, row in zip(problems, responses)]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
        column = torch.arange(ids.size(1))
        start = torch.tensor([len(item.prompt) for item in problems]).unsqueeze(1)
        stop = torch.tensor([len(row) for row in rows]).unsqueeze(1)
        weight = ((column >= start) & (column < stop))[:, 1:].float()
        logprobs = token_logprobs(policy(ids, (column < stop).long()), ids)
        loss = -(advantage * (logprobs * weight).sum(1) / weight.sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 9:
            print(f"policy gradient {step + 1}/{steps}: mean reward {reward.mean().item():.3f}", flush=True)


def accuracies(policy: nn.Module, count: int = 256) -> str:
    rng = random.Random(SEED + 1)
    shares = []
    for kind in KINDS:
        problems = [problem(kind, rng) for _ in range(count)]
        responses = sample(policy, [item.prompt for item in problems])
        right = sum(item.reward(row) == 1 for item, row in zip(problems, responses))
        shares.append(f"{kind} {right / count:.2f}")
    return ", ".join(shares)


# --- The files -------------------------------------------------------------------------------------


def save(policy: Policy, path: Path) -> None:
    torch.jit.script(policy.eval()).save(str(path))
    # Drop the source maps, which hold paths of this machine, and the hash over them.
    with zipfile.ZipFile(path) as old:
        names = [name for name in old.namelist() if not name.endswith((".debug_pkl", "/serialization_id"))]
        records = [(name, old.read(name)) for name in names]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name, data in records:
            info = zipfile.ZipInfo(name)  # its fixed date keeps the file the same from run to run
            # libtorch likes its data 64-byte aligned. 30: local header; 4: header of the extra field.
            padding = -(new.fp.tell() + 30 + len(name) + 4) % 64
            info.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
            new.writestr(info, data)


def load(name: str) -> torch.jit.ScriptModule:
    return torch.jit.load(str(HERE / name))


def response_logits(policy: nn.Module, prompt: list[int], response: list[int]) -> Tensor:
    """The logits [R, V] from which each response token was sampled; one unpadded forward."""
    ids = torch.tensor([prompt + response])
    return policy(ids, torch.ones_like(ids))[0, len(prompt) - 1 : -1]


@torch.no_grad()
def response_logprobs(policy: nn.Module, prompt: list[int], response: list[int]) -> list[float]:
    logprobs = response_logits(policy, prompt, response).log_softmax(-1)
    return [float(f"{row[token].item():.7g}") for row, token in zip(logprobs, response)]


def rollouts(pool: list[Problem], group: int = 8) -> Iterator[dict]:
    policy, reference = load("policy.pt"), load("reference.pt")
    for kind, (_, groups) in KINDS.items():
        items = [item for item in pool if item.kind == kind][:groups]
        for number, item in enumerate(items):
            prompt = encode(item.prompt)
            for index, response in enumerate(sample(policy, [item.prompt] * group)):
                yield {
                    "group_id": f"{kind}-{number:02}",
                    "trajectory_id": f"{kind}-{number:02}/{index}",
                    "prompt_ids": prompt,
                    "response_ids": response,
                    "response_mask": [1] * len(response),
                    "reward": item.reward(response),
                    "old_logprobs": response_logprobs(policy, prompt, response),
                    "ref_logprobs": response_logprobs(reference, prompt, response),
                    "prompt": item.prompt,
                    "response": decode(response),
                }


def make() -> None:
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    policy = Policy()
    train_supervised(policy, rng, steps=420)
    print("reference:", accuracies(policy))
    save(copy.deepcopy(policy), HERE / "reference.pt")
    pool = [problem(kind, rng) for kind, (_, groups) in KINDS.items() for _ in range(POOL * groups)]
    train_policy_gradient(policy, pool, rng, steps=30)
    print("policy:   ", accuracies(policy))
    save(policy, HERE / "policy.pt")
    torch.manual_seed(ROLLOUT_SEED)
    with (HERE / "rollouts.jsonl").open("w") as file:
        for line in rollouts(pool):
            file.write(json.dumps(line) + "\n")


# --- The check -------------------------------------------------------------------------------------

KL_COEF, ENTROPY_COEF, CLIP = 0.01, 0.01, 0.2


def trajectory_gradients(policy: nn.Module, line: dict, advantage: float, group: int) -> dict[str, Tensor]:
    """One row's share of the group's loss, seq_mean_token_mean, differentiated: a flat gradient for each component."""
    prompt, response = line["prompt_ids"], line["response_ids"]
    all_logprobs = response_logits(policy, prompt, response).log_softmax(-1)
    logprobs = all_logprobs.gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1)
    ratio = (logprobs - torch.tensor(line["old_logprobs"], dtype=torch.float64)).exp()
    x = logprobs - torch.tensor(line["ref_logprobs"], dtype=torch.float64)
    losses = {
        "task": -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage),
        "kl": (-x).expm1() + x,  # k3
        "entropy": (all_logprobs.exp() * all_logprobs).sum(-1),  # minus the entropy
    }
    parameters = list(policy.parameters())
    gradients = {}
    for name, loss in losses.items():
        parts = torch.autograd.grad(loss.mean() / group, parameters, retain_graph=True)
        gradients[name] = torch.cat([part.flatten() for part in parts])
    return gradients


def sign_flip_p(gram: Tensor) -> float:
    """The share of sign flips s whose sum over i != j of s_i s_j K_ij reaches the observed one; s equals -s."""
    off_diagonal = gram - gram.diag().diag()
    signs = torch.tensor(list(itertools.product([1.0, -1.0], repeat=len(gram) - 1)), dtype=torch.float64)
    signs = F.pad(signs, (1, 0), value=1.0)
    statistic = ((signs @ off_diagonal) * signs).sum(1)
    # Equal trajectories make equal statistics: a little slack keeps rounding from splitting the ties.
    return (statistic >= statistic[0] - 1e-9 * gram.abs().sum()).double().mean().item()


def split(policy: nn.Module, lines: list[dict]) -> dict[str, float]:
    """The decomposition of one group, preset grpo, by plain autograd; the policy is in float64."""
    group = len(lines)
    reward = torch.tensor([line["reward"] for line in lines], dtype=torch.float64)
    equal = bool(reward.max() == reward.min())
    advantage = torch.zeros_like(reward) if equal else (reward - reward.mean()) / (reward.std() + 1e-6)
    rows = [trajectory_gradients(policy, line, a.item(), group) for line, a in zip(lines, advantage)]
    task, kl, entropy = (torch.stack([row[name] for row in rows]) for name in ("task", "kl", "entropy"))
    gram = group**2 * task @ task.T
    signal_sq = (gram.sum() - gram.trace()) / (group * (group - 1))
    task_norm = task.sum(0).norm()
    reg_norm = (KL_COEF * kl.sum(0) + ENTROPY_COEF * entropy.sum(0)).norm()
    numbers = {
        "reward_mean": reward.mean(),
        "reward_var": 0.0 if equal else reward.var(),
        "task_norm": task_norm,
        "signal_sq": signal_sq,
        "noise_sq": task_norm**2 - signal_sq,
        "signal_p": 1.0 if equal else sign_flip_p(gram),
        "kl_unit": kl.sum(0).norm(),
        "entropy_unit": entropy.sum(0).norm(),
        "reg_norm": reg_norm,
        "dominance": reg_norm / (task_norm + reg_norm),
        "tokens": sum(len(line["response_ids"]) for line in lines),
    }
    return {name: float(number) for name, number in numbers.items()}


def check_policies() -> None:
    """Any batch and length, rows independent, causal, padding on either side, gradients, size."""
    for name in ("policy.pt", "reference.pt"):
        assert (HERE / name).stat().st_size <= 2_000_000, f"{name} is too large"
        policy = load(name)
        assert not policy.training and all(parameter.requires_grad for parameter in policy.parameters()), name
        ids = torch.randint(2, VOCAB, (5, 23), generator=torch.Generator().manual_seed(0))
        ones = torch.ones_like(ids)
        logits = policy(ids, ones)
        variants = {
            "alone and cut short": (logits[2:3, :9], policy(ids[2:3, :9], ones[2:3, :9])),
            "left padding": (logits, policy(F.pad(ids, (6, 0)), F.pad(ones, (6, 0)))[:, 6:]),
            "right padding": (logits, policy(F.pad(ids, (0, 6)), F.pad(ones, (0, 6)))[:, :-6]),
        }
        for variant, (a, b) in variants.items():
            assert torch.allclose(a, b, atol=1e-4), f"{name}: {variant}: {(a - b).abs().max():.1e}"
        logits.logsumexp(-1).sum().backward()
        assert all(parameter.grad.abs().max() > 0 for parameter in policy.parameters()), name


def check() -> None:
    check_policies()
    policy, reference = load("policy.pt"), load("reference.pt")
    lines = [json.loads(line) for line in (HERE / "rollouts.jsonl").read_text().splitlines()]
    for line in lines:
        prompt, response = line["prompt_ids"], line["response_ids"]
        length = len(response)
        assert decode(prompt) == line["prompt"] and decode(response) == line["response"]
        assert response.count(END) == (END in response[-1:]) and length == len(line["response_mask"])
        for key, model in (("old_logprobs", policy), ("ref_logprobs", reference)):
            again = torch.tensor(response_logprobs(model, prompt, response))
            assert torch.allclose(again, torch.tensor(line[key]), atol=1e-5), f"{line['trajectory_id']}: {key}"
    groups = {key: list(rows) for key, rows in itertools.groupby(lines, key=lambda line: line["group_id"])}
    print(f"{len(lines)} trajectories, {len(groups)} groups; KL k3 {KL_COEF}, entropy {ENTROPY_COEF}")
    mean_kl = sum(a - b for line in lines for a, b in zip(line["old_logprobs"], line["ref_logprobs"]))
    print(f"mean k1 KL a token {mean_kl / sum(len(line['response_ids']) for line in lines):.4f}")

    # float64, since the gradient of k3 cancels where policy and reference almost agree.
    policy = policy.double()
    table = {key: split(policy, rows) for key, rows in groups.items()}
    print(f"{'group':<10}{'prompt':<10}", *(f"{name:>13}" for name in next(iter(table.values()))), sep="")
    for key, numbers in table.items():
        print(f"{key:<10}{groups[key][0]['prompt']:<10}", *(f"{value:>13.5g}" for value in numbers.values()), sep="")
    zero = sum(numbers["reward_var"] == 0 for numbers in table.values())
    sure = sum(numbers["signal_p"] <= 0.05 for numbers in table.values())
    print(f"zero reward variance: {zero}; signal with p <= 0.05: {sure}; neither: {len(table) - zero - sure}")
    assert len(table) == 24 and min(zero, sure, len(table) - zero - sure) >= 6, "the groups are not mixed enough"


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes and checks the files of the quickstart.")
    parser.add_argument("--check", action="store_true", help="only check the files that lie beside this script")
    args = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Python's hash seed decides the order of some constants in a TorchScript file: fix it, to get the same bytes.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch deprecates TorchScript as such
    torch.set_num_threads(1)  # fixed, since the order of sums depends on it; one, so that a busy machine does not stall
    torch._C._jit_set_profiling_executor(False)  # it re-compiles at the second call, and is slow with gradients
    if not args.check:
        make()
    check()


if __name__ == "__main__":
    main()
