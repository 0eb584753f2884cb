#!/usr/bin/env python3
"""Exports a Hugging Face causal language model to a TorchScript policy for gradprism.

    pip install torch transformers          # tried with torch 2.13 and transformers 5.24
    python export_hf.py FOLDER_OR_HUB_NAME --out policy.pt
    python export_hf.py FOLDER_OR_HUB_NAME --out policy.pt --dtype bfloat16
    python export_hf.py FOLDER --gguf weights.gguf --out policy.pt      # weights of llama.cpp, widened to --dtype
    python export_hf.py --random-tiny llama --out tiny.pt       # random weights, for a trial
    python export_hf.py FOLDER_OR_HUB_NAME --out policy.pt --check      # writes nothing, checks a file made before

The file computes forward(input_ids [B, T], attention_mask [B, T]) -> logits [B, T, V], in eval mode, for any B and T,
with padding on either side. It is not frozen: its parameters can be trained. A second method, forward_cached, lets
`gradprism train` sample with a key-value cache; models whose attention is not full have it not, and --no-cache leaves
it out. tokenizer.json is written beside the file when the model has one. The file gets its name only after it has
passed the checks below.
"""
import argparse
import inspect
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, DynamicCache, GPT2Config, LlamaConfig, PreTrainedConfig,
)  # fmt: skip
from transformers.utils import logging

# Largest gap between two ways to compute the same logits, as a share of the largest logit.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class CausalPolicy(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        # Count positions from the first real token, so that left padding does not shift them.
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        return self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).logits

    def step(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Reads T tokens after P in the cache: keys and values of a layer in turn, [B, heads, P, width]."""
        seen = DynamicCache()
        for layer, (keys, values) in enumerate(zip(cache[::2], cache[1::2])):
            seen.update(keys, values, layer)
        # A column sees those up to itself that are no padding. [B, 1, T, P + T], added to the scores.
        columns = torch.ones_like(attention_mask[0]).cumsum(-1)
        is_visible = columns <= columns[-input_ids.shape[1] :].unsqueeze(-1)
        is_visible = is_visible & attention_mask.bool()[:, None, None, :]
        scores = torch.zeros_like(is_visible, dtype=self.model.dtype)
        mask = scores.masked_fill(~is_visible, torch.finfo(self.model.dtype).min)
        # Releases of transformers differ in its name.
        name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        logits = self.model(
            input_ids=input_ids, attention_mask=mask, position_ids=position_ids, use_cache=True, **{name: seen}
        ).logits
        return logits, [tensor for layer in seen.layers for tensor in (layer.keys, layer.values)]


def tiny_config(shape: str) -> PreTrainedConfig:
    if shape == "gpt2":
        return GPT2Config(
            vocab_size=96, n_positions=128, n_embd=32, n_layer=2, n_head=4,
            bos_token_id=0, eos_token_id=1, pad_token_id=2,
        )  # fmt: skip
    return LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip


def load_model(source: str | None, shape: str | None, dtype: torch.dtype, gguf: str | None) -> nn.Module:
    # Fused attention kernels do not trace for every length; the eager code does.
    if shape is None:
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=gguf, dtype=dtype, attn_implementation="eager"
        )
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(shape), attn_implementation="eager").to(dtype)
    # eval before the trace: a trace made in train mode would keep its dropout for ever.
    return model.eval().requires_grad_(True)


def without_cache(model: nn.Module) -> str | None:
    """Why the model can have no forward_cached."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layers != {"full_attention"}:
        return f"layers of {', '.join(sorted(layers))}"
    # Some configurations name a window and do not use it.
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "attention in a sliding window"
    return None


def trace(model: nn.Module, has_cache: bool) -> torch.jit.ScriptModule:
    # A padded example: a mask of ones alone could make the model leave the mask out of the trace.
    input_ids = torch.arange(12).view(2, 6) % model.config.vocab_size
    attention_mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    policy = CausalPolicy(model).eval()
    examples = {"forward": (input_ids, attention_mask)}
    if has_cache:
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            cache = policy.step(input_ids[:, :3], attention_mask[:, :3], position_ids[:, :3], [])[1]
        examples["step"] = (input_ids[:, 3:5], attention_mask[:, :5], position_ids[:, 3:5], cache)
    # The tracer warns of every Python number it stores; `check` below is the better judge of those.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace_module(policy, examples, check_trace=False)
    if has_cache:
        define_cached(traced, model, cache)
    free_of_devices(traced)
    return traced


def define_cached(traced: torch.jit.ScriptModule, model: nn.Module, cache: list[Tensor]) -> None:
    """Adds forward_cached: the traced step, which begins with a cache of no columns."""
    embedding = model.get_input_embeddings().weight
    weight = next(name for name, value in traced.named_parameters() if value is embedding)
    sizes = ", ".join(f"[input_ids.size(0), {heads}, 0, {width}]" for _, heads, _, width in (t.shape for t in cache))
    traced.define(f"""
def forward_cached(
    self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: List[Tensor]
) -> Tuple[Tensor, List[Tensor]]:
    if len(cache) == 0:
        cache = [self.{weight}.new_zeros(size) for size in [{sizes}]]
    return self.step(input_ids, attention_mask, position_ids, cache)
""")


def graphs(traced: torch.jit.ScriptModule) -> list[torch._C.Graph]:
    methods = [(module._c, name) for module in traced.modules() for name in module._c._method_names()]
    return [module._get_method(name).graph for module, name in methods]


def is_device(node: torch._C.Node) -> bool:
    return node.output().type().kind() == "DeviceObjType"


def free_of_devices(traced: torch.jit.ScriptModule) -> None:
    """Puts the device of an input where the trace stored a constant ("cpu"), so that the file can move to a GPU."""
    for graph in graphs(traced):
        tensors = [value for value in graph.inputs() if value.type().isSubtypeOf(torch._C.TensorType.get())]
        for node in graph.findAllNodes("prim::Constant"):
            if is_device(node) and tensors:
                device = graph.create("prim::device", [tensors[0]], 1)
                device.output().setType(node.output().type())
                graph.prependNode(device)
                node.output().replaceAllUsesWith(device.output())
                node.destroy()


def save_tokenizer(source: str, path: Path, gguf: str | None) -> str:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf)
    except (OSError, ValueError, KeyError) as error:
        return f"no tokenizer ({str(error).splitlines()[0]})"
    if len(tokenizer) == len(tokenizer.all_special_ids):
        return "no tokenizer: transformers made an empty one, since the model has no file for it"
    if not tokenizer.is_fast:
        return "no tokenizer.json: the model has a slow tokenizer only"
    tokenizer.backend_tokenizer.save(str(path))
    return f"wrote {path}"


def check(model: nn.Module, path: Path) -> None:
    """Raises an AssertionError that says what is wrong with the file, or returns."""
    policy = torch.jit.load(str(path), map_location="cpu")
    assert list(policy.parameters()), "the file has no parameters (frozen?)"
    assert not policy.training, "the file is in train mode"
    # The profiling executor re-compiles at the second call and is slow in training.
    with torch.jit.optimized_execution(False):
        check_logits(model, policy)
        if hasattr(policy, "forward_cached"):
            check_cached(model, policy)
        check_gradient(policy)
    check_devices(policy)


def check_logits(model: nn.Module, policy: torch.jit.ScriptModule) -> None:
    """Other batch sizes and lengths than the traced ones, padded left and right, against each row alone, unpadded."""
    longest = min(40, getattr(model.config, "max_position_embeddings", 40))
    generator = torch.Generator().manual_seed(0)
    for lengths in ([1], [longest], [longest // 2, longest, 3]):
        rows = [torch.randint(model.config.vocab_size, (length,), generator=generator) for length in lengths]
        for side in ("left", "right"):
            gaps = [max(lengths) - length for length in lengths]
            pads = [(gap, 0) if side == "left" else (0, gap) for gap in gaps]
            input_ids = torch.stack([F.pad(row, pad) for row, pad in zip(rows, pads)])
            attention_mask = torch.stack([F.pad(torch.ones_like(row), pad) for row, pad in zip(rows, pads)])
            with torch.no_grad():
                logits = policy(input_ids, attention_mask)
            place = f"batch {len(rows)}, length {max(lengths)}, {side} padding"
            for row, mask, found in zip(rows, attention_mask, logits):
                check_row(model, row, found[mask.bool()], place)


def check_cached(model: nn.Module, policy: torch.jit.ScriptModule) -> None:
    """A padded batch read in parts of unequal length, a row dropped between two of them."""
    longest = min(40, getattr(model.config, "max_position_embeddings", 40))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(model.config.vocab_size, (3, longest), generator=generator)
    mask = torch.ones_like(rows)
    mask[1, : longest // 2] = 0
    mask[2, : longest - 4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, parts, kept = [], [], torch.tensor([0, 1, 2])
    with torch.no_grad():
        for start, end in [(0, longest - 3), (longest - 3, longest - 2), (longest - 2, longest)]:
            new = [kept, slice(start, end)]
            logits, cache = policy.forward_cached(rows[*new], mask[kept, :end], positions[*new], cache)
            parts.append(logits[-2:])
            if len(kept) == 3:
                kept = kept[1:]
                cache = [tensor[1:] for tensor in cache]
    for row, kept, found in zip(rows[1:], mask[1:].bool(), torch.cat(parts, 1)):
        check_row(model, row[kept], found[kept], "forward_cached (see --no-cache)")


def check_row(model: nn.Module, row: Tensor, found: Tensor, place: str) -> None:
    with torch.no_grad():
        expected = model(input_ids=row.unsqueeze(0), use_cache=False).logits[0]
    gap = (found - expected).abs().max() / expected.abs().max()
    limit = TOLERANCE[model.dtype]
    assert gap <= limit, (
        f"{place}: the logits of a row of {len(row)} tokens differ from the model's by {gap:.1e} of the largest "
        f"(limit {limit:.0e})"
    )


def check_gradient(policy: torch.jit.ScriptModule) -> None:
    input_ids = torch.arange(14).view(2, 7)
    policy(input_ids, torch.ones_like(input_ids)).float().log_softmax(-1)[..., 0].sum().backward()
    missed = [name for name, value in policy.named_parameters() if value.grad is None or not value.grad.any()]
    assert not missed, f"no gradient reaches {', '.join(missed)}"


def check_devices(policy: torch.jit.ScriptModule) -> None:
    kept = graphs(policy)  # the list keeps them alive: a node does not
    stored = [node for graph in kept for node in graph.findAllNodes("prim::Constant") if is_device(node)]
    assert not stored, f"the trace is bound to a device: {stored[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Exports a Hugging Face causal language model to TorchScript.")
    parser.add_argument("model", nargs="?", help="a local folder or the name of a model on the hub")
    parser.add_argument("--out", type=Path, required=True, help="the TorchScript file to write, such as policy.pt")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--gguf", help="the name of a GGUF file in the model's folder, to take the weights from")
    parser.add_argument("--random-tiny", choices=["gpt2", "llama"], help="a tiny model with random weights instead")
    parser.add_argument("--no-cache", action="store_true", help="leave forward_cached out")
    parser.add_argument("--check", action="store_true", help="only check that the file at --out is this model")
    args = parser.parse_args()
    if (args.model is None) == (args.random_tiny is None):
        parser.error("give either a model or --random-tiny")
    if args.check and not args.out.is_file():
        parser.error(f"--check: there is no file {args.out}")
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch deprecates TorchScript as such
    logging.set_verbosity_error()

    try:
        model = load_model(args.model, args.random_tiny, getattr(torch, args.dtype), args.gguf)
    except (OSError, ValueError) as error:
        print(f"cannot load {args.model}: {error}", file=sys.stderr)
        return 1
    path = args.out
    if not args.check:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        path = args.out.with_name(args.out.name + ".unchecked")
        reason = "--no-cache" if args.no_cache else without_cache(model)
        if reason is not None:
            print(f"no forward_cached ({reason}): tokens will be sampled by passes over whole prefixes")
        trace(model, reason is None).save(str(path))
    try:
        check(model, path)
    except AssertionError as error:
        print(f"{path} failed its check: {error}", file=sys.stderr)
        return 1
    if not args.check:
        path.rename(args.out)
        if args.model is not None:
            print(save_tokenizer(args.model, args.out.with_name("tokenizer.json"), args.gguf))
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{args.out}: {count:,} parameters, {args.dtype}, checked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
