"""Fast text from a small Llama: thousands of rows advance together, one position at a time."""

from __future__ import annotations

import math
import random
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from faircopy.kernels.gumbel import gumbel_argmax_dense
from faircopy.train.llama import Llama

_LOOK = 32  # positions between checks whether every row has ended: each check waits for the device


class Cache:
    """Keys and values of all rows at all positions so far; every row is at the same position."""

    def __init__(self, network: Llama, rows: int, length: int) -> None:
        shape, like = network.shape, network.model.embed_tokens.weight
        size = (rows, shape.kv_heads, length, shape.head_dim)
        self._keys = [like.new_empty(size) for _ in range(shape.layers)]
        self._values = [like.new_empty(size) for _ in range(shape.layers)]
        self.position = 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store this position and look at all stored ones. Query heads that share keys become rows of one query."""
        rows, kv_heads, _, width = k.shape
        keys, values, seen = self._keys[layer], self._values[layer], self.position + 1
        keys[:, :, self.position], values[:, :, self.position] = k[:, :, 0], v[:, :, 0]
        grouped = q.reshape(rows, kv_heads, -1, width)
        out = F.scaled_dot_product_attention(grouped, keys[:, :, :seen], values[:, :, :seen])
        return out.reshape(rows, -1, 1, width)


def choose(logits: Tensor, temperature: float, min_p: float, generator: torch.Generator | None) -> Tensor:
    """The best token of each row, or one drawn among those at least `min_p` times as likely as the best.

    The cut needs one maximum and no sort, and the draw is an argmax over Gumbel noise: at 8192 x 32000 that decides.
    """
    if temperature == 0.0:
        return logits.argmax(-1)
    scores = logits.float().div_(temperature)
    below = scores < scores.amax(-1, keepdim=True) + math.log(min_p) if min_p else None
    scores.sub_(torch.empty_like(scores).exponential_(generator=generator).log_())
    if below is not None:
        scores.masked_fill_(below, -math.inf)
    return scores.argmax(-1)


@torch.inference_mode()
def sample(
    network: Llama,
    prompts: list[list[int]],
    length: int,
    ends: tuple[int, ...],
    temperature: float = 0.0,
    min_p: float = 0.0,
    seed: int = 0,
    keys: Tensor | None = None,
) -> Tensor:
    """Continue every prompt to `length` tokens [B, length] on the host; after an end token a row holds -1.

    keys [B, length]: the engine's keys of the noise at each position (`rng.key`), to draw what it would draw.
    """
    device = network.model.embed_tokens.weight.device
    forced, given = _pad(prompts, length)
    tokens, given = forced.to(device), given.to(device)
    stop = torch.tensor(ends, device=device)
    cache, done = Cache(network, len(prompts), length), torch.zeros(len(prompts), dtype=torch.bool, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for position in range(length - 1):
        cache.position = position
        logits = network(tokens[:, position : position + 1].clamp(min=0), cache.attend, position)[:, 0]
        if keys is None:
            drawn = choose(logits, temperature, min_p, generator).masked_fill_(done, -1)
        else:
            drawn = gumbel_argmax_dense(logits.float() / temperature, keys[:, position + 1]).masked_fill_(done, -1)
        inside = given > position + 1  # the prompt goes on: what was drawn does not count
        tokens[:, position + 1] = torch.where(inside, tokens[:, position + 1], drawn)
        done |= ~inside & torch.isin(drawn, stop)
        if position % _LOOK == _LOOK - 1 and bool(done.all()):
            break
    return tokens.cpu()


def _pad(prompts: list[list[int]], length: int) -> tuple[Tensor, Tensor]:
    """Prompts as one block [B, length], -1 where nothing is given, and the length of each."""
    block = torch.full((len(prompts), length), -1, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        cut = prompt[:length]
        block[row, : len(cut)] = torch.tensor(cut)
    return block, torch.tensor([min(len(prompt), length) for prompt in prompts])


def rows_of(tokens: Tensor) -> list[list[int]]:
    """The rows of `sample` without what follows their ends."""
    lengths = (tokens >= 0).sum(1).tolist()
    return [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]


def own_text(
    network: Llama, begin: int, ends: tuple[int, ...], rows: int, length: int, seconds: float, seed: int
) -> Tensor:
    """What a model writes, flat: sampled texts, and greedy endings of beginnings of them, for about so long."""
    started, parts = time.perf_counter(), list[Tensor]()
    while not parts or time.perf_counter() - started < seconds:
        this = seed + len(parts) // 2
        free = sample(network, [[begin]] * rows, length, ends, temperature=1.0, min_p=0.01, seed=this)
        cuts = random.Random(this)
        begun = [row[: cuts.randint(4, 96)] for row in rows_of(free)]
        greedy = sample(network, [row for row in begun if row[-1] not in ends] or [[begin]], length, ends)
        parts += [flat(free, ends), flat(greedy, ends)]
        print(f"own text: round {len(parts) // 2}, {time.perf_counter() - started:.1f} s", flush=True)
    return torch.cat(parts).int()


def flat(block: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Rows one after the other, each with its first token and none with an end."""
    kept = (block >= 0) & ~torch.isin(block, torch.tensor(ends))
    kept[:, 0] = True
    return block[kept]
