"""Exact verification: at every place the target chooses as it would alone; a draft is right or it is not.

With temperature the choice uses noise keyed by (seed, position), so sampled text, too, is the same with any drafter.
"""

from __future__ import annotations

from faircopy.model.runner import Result
from faircopy.sampling import choose
from faircopy.types import Batch, Draft, Verdict
from faircopy.verify.base import Judged, accepted_paths, broken_feeds, verdict


class ExactVerifier:
    """Chains and trees are one walk: step to the child whose token the target chose, while there is one."""

    def judge(self, batch: Batch, draft: Draft, result: Result) -> Verdict:
        judged = Judged.of(batch, draft, result)
        chosen = choose(judged.logits, judged.rows, strict=True) if judged.rows else []
        return verdict(batch, draft, result, accepted_paths(draft, judged, chosen), broken_feeds(result))
