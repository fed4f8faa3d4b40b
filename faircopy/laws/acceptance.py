"""Accepted tokens per cycle of a head, without an engine: drafts are compared with texts that the target has written.

Exact speculation never changes a text, so what a draft is accepted up to is known from the text alone. All texts are
walked together: a cycle drafts behind the last known token of each, with the trees of `drafters/batched_trees.py`.
`tests/test_laws.py` compares the counts with the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from faircopy import rng
from faircopy.drafters.batched_trees import BatchedTrees, batch_trees
from faircopy.drafters.heads import Head, Rows, text_rows
from faircopy.drafters.networks.blocks import causal, shared_keys
from faircopy.drafters.trees import Tree
from faircopy.kernels.gumbel import REACH, gumbel
from faircopy.kernels.tree_growth import Front
from faircopy.model.base import FINAL
from faircopy.train.heads import Teacher
from faircopy.train.losses import rows_before


@dataclass(frozen=True, slots=True)
class HeldOutTexts:
    """Prompts with what the target wrote behind them, and its states; rows are padded at their ends."""

    tokens: Tensor  # [B, L]
    begins: Tensor  # [B] tokens of the prompt
    ends: Tensor  # [B] tokens altogether
    states: Tensor  # [B, L, F]: those that the head wants
    temperature: float = 0.0
    noise: Tensor | None = None  # [B, L] of sampled texts: the keys of the noise at each position


@dataclass(frozen=True, slots=True)
class Accepted:
    """Per text: draft tokens accepted in all cycles, and cycles."""

    tokens: list[int]
    cycles: list[int]

    @property
    def mean(self) -> float:
        """Accepted draft tokens per cycle; the target's own token is not counted."""
        return sum(self.tokens) / max(1, sum(self.cycles))


@torch.no_grad()
def measure(head: Head, texts: HeldOutTexts, max_nodes: int, chain: bool) -> Accepted:
    """Walk all texts with drafts of at most `max_nodes` nodes; a cycle that could pass a text's end is not counted.

    Behind a sampled text drafts are made with the text's own noise, as the engine does.
    """
    reading = Reading(head.eval(), texts)
    levels = min(head.levels, max_nodes)
    places = texts.begins.clone()  # the last known token of each text; the first one comes without a draft
    tokens, cycles = torch.zeros_like(places), torch.zeros_like(places)
    while len(live := (places + levels < texts.ends).nonzero()[:, 0]):
        tree = Tree(max_nodes) if chain else head.tree(max_nodes)
        drafts = drafts_behind(reading, live, places[live], tree).result()
        accepted = _accepted(*drafts, texts.tokens[live], places[live], levels)
        tokens[live] += accepted
        cycles[live] += 1
        places[live] += accepted + 1
    return Accepted(tokens.tolist(), cycles.tolist())


@torch.no_grad()
def drafts_behind(
    reading: Reading, live: Tensor, places: Tensor, tree: Tree, levels: int | None = None
) -> BatchedTrees:
    """Trees by this tree's rule behind these places of these texts, all at once. levels: fewer than there could be."""
    trees = batch_trees(tree, len(live), places.device)
    most = min(reading.head.levels, tree.max_nodes)
    drafting = _Drafting(reading, live, places, sampled=reading.texts.temperature > 0)
    drafting.grow(trees, most if levels is None else min(levels, most))
    return trees


def held_out_texts(
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    teacher: Teacher,
    device: torch.device,
    temperature: float = 0.0,
    rows: int = 32,
    wants: tuple[int, ...] = (FINAL,),
) -> HeldOutTexts:
    """Texts (prompts included) with their states; a sampled text's seed is its number. wants: of the head."""
    longest = max(map(len, texts))
    tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=device)
    states = torch.cat([teacher.states(part, wants) for part in torch.split(tokens, rows)])
    begins, ends = (torch.tensor([len(row) for row in part], device=device) for part in (prompts, texts))
    noise = noise_keys(range(len(texts)), longest).to(device) if temperature else None
    return HeldOutTexts(tokens, begins, ends, states, temperature, noise)


def noise_keys(seeds: Sequence[int], length: int) -> Tensor:
    """Keys [B, length] of the noise that chooses the token at each position."""
    return torch.tensor([[rng.signed(rng.key(seed, p)) for p in range(length)] for seed in seeds])


class Reading:
    """What a head remembers of every row of the texts, and the keys and values of its layers."""

    @torch.no_grad()
    def __init__(self, head: Head, texts: HeldOutTexts) -> None:
        assert texts.states.shape[-1] == head.input_size, "texts are kept with the states that the head wants"
        self.head, self.texts = head, texts
        self.keys: dict[int, tuple[Tensor, Tensor]] = {}
        before = rows_before(texts.states).to(head.dtype)
        self.memory = head.read(before, texts.tokens, text_rows(texts.tokens, self._attend))

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys[layer] = k, v
        return causal(layer, q, k, v)


class _Drafting:
    """One cycle: trees behind the given places of some texts."""

    def __init__(self, reading: Reading, live: Tensor, places: Tensor, sampled: bool) -> None:
        self._reading, self._live, self._places, self._sampled = reading, live, places, sampled
        keys = reading.keys if reading.head.deep else {}
        self._text = {layer: (k[live], v[live]) for layer, (k, v) in keys.items()}
        self._nodes: dict[int, tuple[Tensor, Tensor]] = {}
        length = reading.texts.tokens.shape[1]
        self._seen = torch.arange(length, device=places.device) <= places[:, None]  # [b, L]
        self._paths: Tensor | None = None  # [b, F, nodes]: which expanded nodes each row of the front continues

    def grow(self, trees: BatchedTrees, levels: int) -> None:
        head, at = self._reading.head, torch.arange(len(self._live), device=self._places.device)
        memory = self._reading.memory[self._live, self._places][:, None]
        tokens = self._reading.texts.tokens[self._live, self._places][:, None]
        rows: Rows | None = None
        trees.reset()
        for level in range(levels):
            guess = head.step(level, memory, tokens, rows)
            front = trees.grow(*self._offers(head.over_vocabulary(guess.logits), trees.num_offered, level))
            if front is None:
                return
            memory, tokens = guess.memory[at[:, None], front.above], front.tokens
            rows = self._rows(level + 1, front) if head.deep else None

    def _offers(self, logits: Tensor, count: int, level: int) -> tuple[Tensor, Tensor]:
        """The best tokens of each row [b, F, V], of a sampled text with its noise."""
        scores = logits.float()
        if self._sampled:
            scores = self._noisy(scores, level)
        values, ids = scores.topk(min(count, scores.shape[-1]), -1)
        return ids, values - scores.logsumexp(-1, keepdim=True)

    def _noisy(self, scores: Tensor, level: int) -> Tensor:
        """Scores over the temperature, with the noise of the level's position."""
        texts = self._reading.texts
        assert texts.noise is not None, "sampled texts have noise"
        keys = texts.noise[self._live, self._places + 1 + level]
        vocabulary = torch.arange(scores.shape[-1], device=scores.device)
        scores = scores / texts.temperature
        able = scores >= scores.amax(-1, keepdim=True) - REACH  # the engine offers those alone that can be drawn
        return torch.where(able, scores + gumbel(keys[:, None, None], vocabulary), -torch.inf)

    def _rows(self, level: int, front: Front) -> Rows:
        """Positions [b, 1, F] and attention for the front: the text up to the place, then each row's own path."""
        count = front.tokens.shape[1]
        own = torch.eye(count, dtype=torch.bool, device=front.tokens.device).expand(len(self._live), -1, -1)
        if self._paths is not None:
            before = self._paths.gather(1, front.above[..., None].expand(-1, -1, self._paths.shape[-1]))
            own = torch.cat([before, own], -1)
        self._paths = own
        positions = (self._places[:, None, None] + level).expand(-1, 1, count)
        return Rows(positions, self._attend)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self._nodes:
            k, v = (torch.cat(pair, 2) for pair in zip(self._nodes[layer], (k, v), strict=True))
        self._nodes[layer] = k, v
        keys, values = (torch.cat(pair, 2) for pair in zip(self._text[layer], (k, v), strict=True))
        assert self._paths is not None, "the front has rows"
        seen = self._seen[:, None].expand(-1, self._paths.shape[1], -1)
        mask = torch.cat([seen, self._paths], -1)[:, None]
        return F.scaled_dot_product_attention(q, *shared_keys(q, keys, values), attn_mask=mask)


def _accepted(tokens: Tensor, parents: Tensor, texts: Tensor, places: Tensor, levels: int) -> Tensor:
    """Nodes of each tree [b, nodes] that stand in its text behind its place."""
    at = torch.full_like(places, -1)
    count, alive = torch.zeros_like(places), torch.ones_like(places, dtype=torch.bool)
    for level in range(levels):
        wanted = texts.gather(1, (places + 1 + level)[:, None])
        match = (parents == at[:, None]) & (tokens == wanted)
        alive &= match.any(1)
        at = torch.where(alive, match.int().argmax(1), -2)
        count += alive
    return count
