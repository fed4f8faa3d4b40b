"""How draft trees grow, all trees of a batch at once: arithmetic of fixed shape, so that a captured step can do it.

A missing node has the token -1, a missing path the value minus infinity. Of equal paths the first one offered is the
better one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Front(NamedTuple):
    """The nodes whose children are wanted next [B, F], best path first."""

    tokens: Tensor
    above: Tensor  # the row of the front before that each one continues
    nodes: Tensor
    values: Tensor  # log probability of the whole path


@dataclass(frozen=True, slots=True)
class Nodes:
    """Drafts: a token per node and the row of its parent, 0 for the text's last token and n + 1 for node n."""

    tokens: Tensor  # [B, max_nodes] int32
    parents: Tensor  # [B, max_nodes] int32
    values: Tensor | None = None  # [B, max_nodes] float32: log probability of the path, where `share` compares them

    @classmethod
    def empty(cls, size: int, max_nodes: int, device: torch.device) -> Nodes:
        tokens, parents = (torch.zeros(size, max_nodes, dtype=torch.int32, device=device) for _ in range(2))
        return cls(tokens, parents, torch.zeros(size, max_nodes, device=device))

    def write(self, tokens: Tensor, parents: Tensor) -> None:
        """parents: nodes, -1 above the first level."""
        self.tokens.copy_(tokens)
        self.parents.copy_(parents + 1)


@dataclass(frozen=True, slots=True)
class Candidates:
    """All that was offered so far [B, N], level by level."""

    tokens: Tensor
    parents: Tensor  # among the candidates; -1: none
    values: Tensor  # log probability of the whole path

    @classmethod
    def empty(cls, size: int, count: int, device: torch.device) -> Candidates:
        tokens, parents = (torch.zeros(size, count, dtype=torch.int64, device=device) for _ in range(2))
        return cls(tokens, parents, torch.zeros(size, count, device=device))


@dataclass(frozen=True, slots=True)
class Budget:
    """How a tree's nodes are spent, see trees.NodeBudgetTree."""

    used: Tensor  # [B] int64: nodes
    top_p: float
    floor: float  # a logarithm


@dataclass(frozen=True, slots=True)
class TreeRules:
    """The functions of this module, or kernels that do the same."""

    expand: Callable[[Tensor, Tensor, Front, Candidates, int, int], Front]
    rerank: Callable[[Candidates, int, Nodes], None]
    spend: Callable[[Tensor, Tensor, Front, Budget, Nodes, bool], Front]
    share: Callable[[Nodes, int, Tensor], None]


def best(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The highest values [B, count] and their places, of equal ones the first."""
    ordered, places = values.sort(dim=-1, descending=True, stable=True)
    return ordered[:, :count], places[:, :count]


def expand(ids: Tensor, scores: Tensor, front: Front, found: Candidates, first: int, breadth: int) -> Front:
    """EAGLE-2's level: all that the front offers [B, F, O] becomes candidates from place `first` on; the best of them
    are the next front."""
    values = (scores + front.values[..., None]).flatten(1)
    tokens, here = ids.flatten(1), slice(first, first + values.shape[1])
    found.tokens[:, here], found.values[:, here] = tokens, values
    found.parents[:, here] = front.nodes.repeat_interleave(scores.shape[-1], 1)
    values, places = best(values, breadth)
    return Front(tokens.gather(1, places), places // scores.shape[-1], first + places, values)


def rerank(found: Candidates, count: int, out: Nodes) -> None:
    """EAGLE-2's draft: the best of the first `count` candidates, in their order.

    A parent is never less likely than its child and comes before it, so that whole paths are kept.
    """
    size, max_nodes = out.tokens.shape
    tokens, parents, values = (part[:, :count] for part in (found.tokens, found.parents, found.values))
    chosen = best(values, max_nodes)[1].sort(-1).values
    places = torch.full((size, count + 1), -1, dtype=torch.int64, device=tokens.device)  # the last place stays -1
    places.scatter_(1, chosen, torch.arange(chosen.shape[1], device=tokens.device).expand(size, -1))
    there = values.gather(1, chosen) > -torch.inf
    above = places.gather(1, torch.where(parents < 0, count, parents).gather(1, chosen))
    out.tokens.fill_(-1)
    out.parents.fill_(0)
    out.tokens[:, : chosen.shape[1]] = torch.where(there, tokens.gather(1, chosen), -1)
    out.parents[:, : chosen.shape[1]] = torch.where(there, above, -1) + 1
    if out.values is not None:
        out.values.fill_(-torch.inf)
        out.values[:, : chosen.shape[1]] = values.gather(1, chosen)


def spend(ids: Tensor, scores: Tensor, front: Front, budget: Budget, out: Nodes, begin: bool) -> Front:
    """Clover's level: likely tokens [B, F, O], then likely paths, as long as there are nodes left. begin: the first
    level of new trees. Nodes of the next front that were not kept have the number max_nodes."""
    max_nodes = out.tokens.shape[1]
    if begin:
        budget.used.zero_()
        out.tokens.fill_(-1)
        out.parents.fill_(0)
        if out.values is not None:
            out.values.fill_(-torch.inf)
    chances = scores.exp()
    likely = (chances.cumsum(-1) - chances < budget.top_p) & (scores >= scores[..., :1] + budget.floor)
    paths = torch.where(likely, scores + front.values[..., None], -torch.inf).flatten(1)
    values, places = best(paths, min(max_nodes, paths.shape[1]))
    used, rank = budget.used[:, None], torch.arange(values.shape[1], device=ids.device)
    kept = (values > -torch.inf) & (rank < max_nodes - used)
    nodes = torch.where(kept, used + rank, max_nodes)
    above, tokens = places // scores.shape[-1], ids.flatten(1).gather(1, places)
    written = [(out.tokens, tokens), (out.parents, front.nodes.gather(1, above) + 1)]
    for table, new in written if out.values is None else [*written, (out.values, values)]:
        wider = torch.nn.functional.pad(table, (0, 1))  # the last place collects what is dropped
        table.copy_(wider.scatter_(1, nodes, new.to(table.dtype))[:, :max_nodes])
    budget.used.add_(kept.sum(1))
    return Front(tokens, above, nodes, torch.where(kept, values, -torch.inf))


def share(nodes: Nodes, count: int, allowed: Tensor) -> None:
    """The likeliest `count` nodes of all trees stay, of each no more than `allowed` [B]; in their order, without gaps.

    A parent is never less likely than its child and comes before it, so that whole paths stay.
    """
    assert nodes.values is not None, "nodes are compared by their values"
    size, max_nodes = nodes.tokens.shape
    ranks = nodes.values.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    nodes.values.masked_fill_(ranks >= allowed[:, None], -torch.inf)
    values = nodes.values.flatten()
    kept = torch.zeros_like(values, dtype=torch.bool)
    kept[values.sort(descending=True, stable=True).indices[:count]] = True
    kept = (kept & (values > -torch.inf)).view(size, max_nodes)
    places = torch.where(kept, kept.cumsum(1) - 1, max_nodes)  # the last place collects what is dropped
    above = torch.nn.functional.pad(places + 1, (1, 0)).gather(1, nodes.parents.long())
    for table, new, missing in ((nodes.tokens, nodes.tokens, -1), (nodes.parents, above, 0)):
        wider = torch.full((size, max_nodes + 1), missing, dtype=table.dtype, device=table.device)
        table.copy_(wider.scatter_(1, places, new.to(table.dtype))[:, :max_nodes])


TORCH = TreeRules(expand, rerank, spend, share)
