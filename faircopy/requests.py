"""What users pass in, read and checked: prompts, conversations, values per prompt, requests."""

from __future__ import annotations

from faircopy.errors import OutOfPages, RequestError
from faircopy.layout.tables import Tables
from faircopy.model.base import Model
from faircopy.types import Request


def check_request(request: Request, model: Model, tables: Tables) -> None:
    """Refuse what can never be served, naming the field."""
    params, length = request.params, len(request.prompt)
    if not length:
        raise RequestError("prompt", "", "empty", "pass at least one token, for example the model's BOS token")
    if length >= model.context:
        raise RequestError(
            "prompt", f"{length} tokens", f"leaves no room in the model's context of {model.context}", "shorten it"
        )
    ids = {"prompt": request.prompt, "logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
    for name, tokens in ids.items():
        for token in tokens:
            if not 0 <= token < model.vocab:
                raise RequestError(name, token, f"not a token id below {model.vocab}", "use the model's own tokenizer")
    if request.k is not None and (not isinstance(request.k, int) or isinstance(request.k, bool) or request.k < 0):
        raise RequestError("k", request.k, "not a whole number of at least 0", "use 0 to decode without drafting")
    limit = token_limit(request, model)
    if not tables.fits(limit):
        have = tables.pool.pages * tables.page
        raise OutOfPages(
            "prompt",
            f"{length} tokens",
            f"with max_tokens it may need {limit} of {have} tokens of memory",
            "raise memory=, or lower max_tokens",
        )


def token_limit(request: Request, model: Model) -> int:
    """How long prompt and output may become together."""
    most = request.params.max_tokens
    return model.context if most is None else min(model.context, len(request.prompt) + most)
