"""Ray Serve's request router with one rule of ours: a request goes where its prompt's beginning is cached."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from faircopy.ray.prefixes import PrefixHomes, prefix_keys


class PrefixRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Prefers the replica that has the prefix, unless it is busier than the least busy one by a threshold."""

    def initialize_state(self, threshold: int = 4) -> None:
        self._homes = PrefixHomes(threshold)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        if not by_id:
            return []
        load = {name: self.replica_queue_len_cache.get(name) or 0 for name in by_id}
        return [[by_id[name]] for name in self._homes.order(_keys(pending_request), load)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._homes.sent(_keys(pending_request), replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._homes.gone(replica_id)


def _keys(request: PendingRequest | None) -> list[str]:
    """The prompt is in the argument `body` of a call, where it is an object."""
    body = None if request is None else request.kwargs.get("body")
    return prefix_keys(body) if isinstance(body, dict) else []
