#!/usr/bin/env python3
"""Makes the initial policies and value models of configs/train, and their tokenizers:

    python make_policies.py [FOLDER]

Needs torch alone. Each policy is a small transformer that was taught the form of an answer, and little of
its content: one in two of the moves that frozen_lake.pt was shown on drawn lakes is at random, bandit.pt
was shown either arm as often as the other. What else there is to know is left to `gradprism train`. cart_pole.pt,
of examples/step_policy.rs, knows nothing.
"""
import json
import math
import random
import sys
from collections import deque
from pathlib import Path

import torch
from torch import Tensor, nn

CONTEXT = 256


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, bias: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """`past` and what is given back hold keys and values, [B, 2, heads, P, width/heads]."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        qkv = qkv.permute(0, 2, 3, 1, 4)
        query = qkv[:, 0]
        kept = torch.cat([past, qkv[:, 1:]], dim=3)
        scores = query @ kept[:, 0].transpose(2, 3) / math.sqrt(width // self.heads) + bias
        mixed = (scores.softmax(-1) @ kept[:, 1]).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)))), kept


class Transformer(nn.Module):
    """Token ids to logits of the next token, or with one choice to values."""

    def __init__(self, vocabulary: int, choices: int, width: int = 64, heads: int = 4, layers: int = 2):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, choices)
        for weight in (self.tokens.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.1)
        nn.init.zeros_(self.head.bias)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        cache: list[Tensor] = []
        return self.forward_cached(input_ids, attention_mask, position_ids, cache)[0]

    @torch.jit.export
    def forward_cached(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        batch, length = input_ids.shape
        total = attention_mask.size(1)
        query = torch.arange(total - length, total, device=input_ids.device).unsqueeze(1)
        causal = torch.arange(total, device=input_ids.device).unsqueeze(0) <= query
        seen = causal.unsqueeze(0) & (attention_mask != 0).unsqueeze(1)
        x = self.tokens(input_ids) + self.positions(position_ids.clamp(0, 255))
        bias = torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, -1e9).unsqueeze(1)
        kept: list[Tensor] = []
        empty = torch.zeros([batch, 2, self.heads, 0, self.size], dtype=x.dtype, device=x.device)
        for index, block in enumerate(self.blocks):
            x, layer = block(x, bias, cache[index] if len(cache) > 0 else empty)
            kept.append(layer)
        return self.head(self.norm(x)), kept


class Words:
    """A tokenizer of whole words, as a Hugging Face tokenizer.json."""

    def __init__(self, words: list[str], pattern: str):
        self.ids = {word: index for index, word in enumerate(["<unk>", *words])}
        self.pattern = pattern

    def write(self, path: Path) -> None:
        split = {"type": "Split", "pattern": {"Regex": self.pattern}, "behavior": "Removed", "invert": True}
        model = {"type": "WordLevel", "vocab": self.ids, "unk_token": "<unk>"}
        tokenizer = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": split, "post_processor": None, "decoder": None, "model": model,
        }
        path.write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n")


LAKE = Words(["P", "_", "O", "G", "X", "√", "\n", ":", "Left", "Down", "Right", "Up"], r"Left|Down|Right|Up|[PO_GX√:\n]")
MOVES = [("Left", 0, -1), ("Down", 1, 0), ("Right", 0, 1), ("Up", -1, 0)]


def draw_lake(draw: random.Random, size: int = 4) -> tuple[list[bool], int, int, list[int]]:
    """Holes, start, goal, and the distance of every cell to the goal (-1: none)."""
    while True:
        holes = [draw.random() >= 0.8 for _ in range(size * size)]
        start, goal = draw.randrange(size * size), draw.randrange(size * size)
        holes[start] = holes[goal] = False
        distance, frontier = [-1] * (size * size), deque([goal])
        distance[goal] = 0
        while frontier:
            place = frontier.popleft()
            for move in range(4):
                near = walk(place, move, size)
                if not holes[near] and distance[near] < 0:
                    distance[near] = distance[place] + 1
                    frontier.append(near)
        if start != goal and distance[start] >= 0:
            return holes, start, goal, distance


def walk(place: int, move: int, size: int = 4) -> int:
    row, column = place // size + MOVES[move][1], place % size + MOVES[move][2]
    return row * size + column if 0 <= row < size and 0 <= column < size else place


def show(holes: list[bool], goal: int, player: int, size: int = 4) -> str:
    signs = ["P" if at == player else "O" if holes[at] else "G" if at == goal else "_" for at in range(size * size)]
    return "\n".join("".join(signs[row * size : (row + 1) * size]) for row in range(size))


def lake_walk(draw: random.Random, turns: int = 10) -> tuple[list[int], list[tuple[int, list[float]]]]:
    """The tokens of a walk, and for the place of every move how good each move is there."""
    holes, player, goal, distance = draw_lake(draw)
    ids: list[int] = []
    targets = []
    for turn in range(turns):
        text = ("\n" if turn else "") + show(holes, goal, player) + ":"
        ids += [LAKE.ids[sign] for sign in text]
        good = [float(not holes[walk(player, move)] and distance[walk(player, move)] == distance[player] - 1) for move in range(4)]
        shares = [0.5 * one / sum(good) + 0.5 / 4 for one in good]
        targets.append((len(ids) - 1, shares))
        move = draw.choices(range(4), shares)[0]
        ids.append(LAKE.ids[MOVES[move][0]])
        player = walk(player, move)
        if player == goal or holes[player]:
            break
    return ids, targets


def teach_lake(policy: Transformer, updates: int) -> None:
    draw = random.Random(1)
    names = torch.tensor([LAKE.ids[name] for name, _, _ in MOVES])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    for update in range(updates):
        walks = [lake_walk(draw) for _ in range(32)]
        longest = max(len(ids) for ids, _ in walks)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in walks])
        logits = run(policy, ids)
        places = [(row, at) for row, (_, targets) in enumerate(walks) for at, _ in targets]
        shares = torch.tensor([shares for _, targets in walks for _, shares in targets])
        rows, ats = torch.tensor(places).T
        loss = -(logits[rows, ats].log_softmax(-1)[:, names] * shares).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if update % 100 == 0:
            print("frozen_lake", update, round(loss.item(), 4), flush=True)


def run(policy: Transformer, ids: Tensor) -> Tensor:
    return policy(ids, torch.ones_like(ids), torch.arange(ids.size(1)).expand_as(ids))


# As gradprism's bandit asks.
QUESTION = "There are 2 arms, {0} and {1}. Each has its own distribution of rewards, and its name hints at it. Which one gives more on average? Choose {0} or {1}."
ARMS = [("Phoenix", "Dragon"), ("Trader", "Gambler"), ("Teacher", "Pirate"), ("Clerk", "Explorer")]
BANDIT_WORDS = sorted({word for word in "There are arms Each has its own distribution of rewards and name hints at it Which one gives more on average Choose or 2 , . ? :".split()})
BANDIT = Words([*BANDIT_WORDS, *(name for pair in ARMS for name in pair)], r"\w+|[,.?:]")


def teach_bandit(policy: Transformer, updates: int) -> None:
    import re

    draw = random.Random(2)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.01)
    for update in range(updates):
        rows, answers = [], []
        for _ in range(32):
            pair = list(draw.choice(ARMS))
            draw.shuffle(pair)
            text = QUESTION.format(*pair) + ":"
            rows.append([BANDIT.ids[word] for word in re.findall(BANDIT.pattern, text)])
            answers.append([BANDIT.ids[name] for name in pair])
        logits = run(policy, torch.tensor(rows))[:, -1].log_softmax(-1)
        loss = -logits.gather(1, torch.tensor(answers)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 100 == 0:
            print("bandit", update, round(loss.item(), 4), flush=True)


def save(model: nn.Module, path: Path) -> None:
    model.eval()
    torch.jit.script(model).save(str(path))
    print(path.name, sum(p.numel() for p in model.parameters()), "parameters", path.stat().st_size, "bytes")


class CartPole(nn.Module):
    """Cart, its speed, pole, its speed `[N, 4]` to the logits of left and right `[N, 2]`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation: Tensor) -> Tensor:
        return self.layers(observation)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name, words, teach, updates in [("bandit", BANDIT, teach_bandit, 400), ("frozen_lake", LAKE, teach_lake, 600)]:
        words.write(folder / f"{name}.tokenizer.json")
        policy = Transformer(len(words.ids), len(words.ids))
        teach(policy, updates)
        save(policy, folder / f"{name}.pt")
        save(Transformer(len(words.ids), 1, width=32, heads=2), folder / f"{name}_value.pt")
    torch.manual_seed(0)
    save(CartPole(), folder / "cart_pole.pt")


if __name__ == "__main__":
    main()
