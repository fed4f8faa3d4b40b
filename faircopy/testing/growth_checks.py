"""Kernel checks of draft trees as they grow: each against its twin."""

from __future__ import annotations

import torch
from torch import Tensor

from faircopy.kernels import tree_growth
from faircopy.kernels.gpu import growth, pages
from faircopy.kernels.gpu.growth import FrontRows, UnreadRows
from faircopy.kernels.gpu.pages import PATH
from faircopy.kernels.gpu.records import Control
from faircopy.kernels.gpu.state import BatchSlots
from faircopy.kernels.tree_growth import Budget, Candidates, Front, Nodes, TreeRules

SIZE, OFFERED, LEVELS, PAGE = 3, 10, 4, 4


def trees(device: torch.device) -> float:
    """Both rules, with small trees and large ones: equal paths, tokens that are missing, too few for all nodes."""
    wrong = 0
    for max_nodes in (1, 5, 30, 64):
        for grown in (_reranked, _spent):
            ours, twins = (grown(rules, max_nodes, device) for rules in (growth.RULES, tree_growth.TORCH))
            wrong += sum(not torch.equal(a, b) for a, b in zip(ours, twins, strict=True))
    return float(wrong)


def _reranked(rules: TreeRules, max_nodes: int, device: torch.device) -> list[Tensor]:
    found, out = Candidates.empty(SIZE, OFFERED * (max_nodes + 1), device), _nodes(max_nodes, device)
    front, first, left = _root(device), 0, max_nodes
    seen: list[Tensor] = []
    for level in range(LEVELS):
        ids, scores = _offers(level, front.tokens.shape[1], device)
        breadth = min(max(1, max_nodes // 6), left)
        front = rules.expand(ids, scores, front, found, first, breadth)
        seen += front
        first, left = first + ids[0].numel(), left - breadth
        if not breadth:
            break
    rules.rerank(found, first, out)
    tables = [part[:, :first] for part in (found.tokens, found.parents, found.values)]
    return [*seen, *tables, *_shared(rules, out)]


def _spent(rules: TreeRules, max_nodes: int, device: torch.device) -> list[Tensor]:
    budget = Budget(torch.full((SIZE,), 7, device=device), 0.8, -1.4)
    out, front = _nodes(max_nodes, device), _root(device)
    seen: list[Tensor] = []
    for level in range(LEVELS):
        ids, scores = _offers(level, front.tokens.shape[1], device)
        front = rules.spend(ids, scores, front, budget, out, level == 0)
        seen += front
    return [*seen, budget.used, *_shared(rules, out)]


def _shared(rules: TreeRules, out: Nodes) -> list[Tensor]:
    """The nodes, and what is left of them where all trees share fewer; the first tree may have few, or none."""
    assert out.values is not None
    seen = [part.clone() for part in (out.tokens, out.parents, out.values)]
    whole, device = out.tokens.shape[1], out.tokens.device
    allowed = torch.full((SIZE, 4), whole, dtype=torch.int32, device=device)
    for count in (SIZE * whole - 1, SIZE * whole // 2, 2):
        for few in (whole, whole // 2, 0):
            nodes = Nodes(seen[0].clone(), seen[1].clone(), seen[2].clone())
            allowed[0, 2] = few
            rules.share(nodes, count, allowed[:, 2])
            assert nodes.values is not None
            seen += [nodes.tokens, nodes.parents, nodes.values]
    return seen


def _nodes(max_nodes: int, device: torch.device) -> Nodes:
    """Parts of wider tables, as in a step."""
    tokens, parents = (torch.full((SIZE, max_nodes + 1), 99, dtype=torch.int32, device=device) for _ in range(2))
    return Nodes(tokens[:, 1:], parents[:, 1:], torch.full((SIZE, max_nodes), 99.0, device=device))


def _root(device: torch.device) -> Front:
    nodes = torch.full((SIZE, 1), -1, device=device)
    return Front(nodes + 1, nodes + 1, nodes, torch.zeros(SIZE, 1, device=device))


def _offers(level: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Log probabilities in eighths, of which many are equal; the last tree is offered few tokens, none at last."""
    generator = torch.Generator().manual_seed(level)
    ids = torch.randint(0, 50, (SIZE, rows, OFFERED), generator=generator)
    scores = (-torch.rand(SIZE, rows, OFFERED, generator=generator) * 40).floor().sort(-1, descending=True).values / 8
    scores[-1, :, 2 - level :] = -torch.inf
    return ids.to(device), scores.to(device)


def places(device: torch.device) -> float:
    """Rows that a head has not read, then two levels of rows behind the text; some texts are at their limits."""
    control = torch.zeros(SIZE, Control.PAGES + 6, dtype=torch.int32)
    control[:, Control.LIMIT] = torch.tensor([24, 13, 12])
    control[:, Control.PAGES :] = torch.randperm(18, generator=torch.Generator().manual_seed(1)).view(SIZE, 6)
    history = torch.arange(SIZE * 26, dtype=torch.int32).view(SIZE, 26)
    batch = BatchSlots(*(part.to(device) for part in (control, torch.tensor([9, 11, 12], dtype=torch.int32), history)))
    read = torch.tensor([7, 10, 4], device=device)
    found = [_placed(batch, read, kernels) for kernels in (True, False)]
    return float(sum(not torch.equal(a, b) for a, b in zip(*found, strict=True)))


def _placed(batch: BatchSlots, read: Tensor, kernels: bool) -> list[Tensor]:
    device, scratch = read.device, 99
    unread = UnreadRows.over(read, 3)
    (growth.place_unread if kernels else growth.place_unread_twin)(batch, unread, PAGE, scratch)
    seen, before = [unread.ids, unread.positions, unread.slots, unread.last], None
    aboves = [[[0, 0, 0]] * SIZE, [[0, 2, 1, 1, 2]] * SIZE, [[4, 0], [1, 3], [2, 2]]]
    expanded = 0
    for level, rows in enumerate(aboves, 1):
        above = torch.tensor(rows, device=device)
        front = FrontRows.over(torch.zeros(SIZE, above.shape[1], PATH, dtype=torch.int32, device=device))
        plan = pages.tree_plan(front.paths, batch.control[:, Control.PAGES :], PAGE, 24, 16, 64)
        assert plan.tails is not None and plan.tails.bases is not None
        place = growth.place_front if kernels else growth.place_front_twin
        place(batch, above, front, before, plan, 4, level, expanded, PAGE, scratch)
        seen += [front.positions, front.slots, front.paths, plan.ranges, plan.tails.ranges, plan.tails.bases]
        before, expanded = front.paths, expanded + above.shape[1]
    return seen
