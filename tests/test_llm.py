"""The library as people use it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from faircopy import LLM, BatchError, ConfigError, NumericsError, OutOfPages, RequestError, SamplingParams
from faircopy.drafters.base import NoDrafter
from faircopy.drafters.ngram import NgramDrafter
from faircopy.testing import ByteTokenizer, SpyDrafter, TableModel, cacheless, plain
from faircopy.types import Batch, Draft, Request
from tests.helpers import assert_same, engine_of, load, references, run

PROMPTS = ["one", "a second prompt", "x"]


def an_llm(draft: object = None, **options: object) -> LLM:
    model = TableModel(vocab=256, seed=3, eos=(0,))
    return LLM(model, draft, tokenizer=ByteTokenizer(), **{"k": 4, **options})  # type: ignore[arg-type]


def a_draft() -> TableModel:
    draft = TableModel(vocab=256, seed=3)
    draft._table = draft._table + 0.4 * TableModel(vocab=256, seed=4)._table
    return draft


def expected(prompt: str, params: SamplingParams, **options: object) -> object:
    model = TableModel(vocab=256, seed=3)
    tokenizer = ByteTokenizer()
    return plain(
        cacheless(model), tokenizer.encode(prompt), params, context=512, seed=params.seed or 0, eos=(0,),
        decode=tokenizer.decode, **options,  # type: ignore[arg-type]
    )  # fmt: skip


def test_answers_come_in_order_with_their_figures() -> None:
    outs = an_llm(a_draft(), k=4).generate(PROMPTS, SamplingParams(max_tokens=40))
    for prompt, out in zip(PROMPTS, outs, strict=True):
        want = expected(prompt, SamplingParams(max_tokens=40))
        assert (out.text, out.token_ids, out.finish_reason) == (want.text, want.tokens, want.finish_reason)
        assert out.prompt == prompt
        assert out.prompt_token_ids == list(prompt.encode())
        assert 0 < out.accepted <= out.drafted
        assert len(out.outputs[0].origins) == len(out.token_ids)
        assert sum(out.outputs[0].origins) == out.accepted


def test_prompts_may_be_texts_or_ids_one_or_many() -> None:
    llm = an_llm()
    params = SamplingParams(max_tokens=5)
    ids = llm.generate(PROMPTS[0], params)[0].token_ids
    assert llm.generate([list(b"one")], params)[0].token_ids == ids
    assert llm.generate(list(b"one"), params)[0].token_ids == ids
    assert llm.generate([], params) == []


def test_params_and_k_may_differ_per_prompt() -> None:
    llm = an_llm("ngram")
    params = [SamplingParams(max_tokens=n) for n in (3, 9, 6)]
    outs = llm.generate(PROMPTS, params, k=[0, 2, 5])
    assert [len(out.token_ids) for out in outs] == [3, 9, 6]
    assert outs[0].drafted == 0
    with pytest.raises(ConfigError, match="params = '2 values': for 3 prompts"):
        llm.generate(PROMPTS, params[:2])


@pytest.mark.parametrize("draft", [None, "ngram", "model"])
@pytest.mark.parametrize("stop", ["e", "ab", "q"])
def test_stop_strings_cut_where_plain_decoding_cuts(draft: str | None, stop: str) -> None:
    llm = an_llm(a_draft() if draft == "model" else draft, k=5)
    for seed in range(6):
        params = SamplingParams(max_tokens=60, temperature=1.0, seed=seed, stop=[stop, "zz"], min_tokens=seed)
        (out,) = llm.generate("start", params)
        want = expected("start", params)
        assert (out.text, out.token_ids, out.finish_reason) == (want.text, want.tokens, want.finish_reason)
        assert "".join(llm.stream("start", params)) == want.text


def test_end_tokens_stop_ids_and_limits_cut_inside_an_accepted_run() -> None:
    """A perfect draft of eight: every stop falls somewhere inside a run."""
    perfect = TableModel(vocab=256, seed=3)
    llm = an_llm(perfect, k=8)
    free = expected("go", SamplingParams(max_tokens=64)).tokens
    for place in range(1, 14):
        token = free[place]
        first = free.index(token)
        by_id = llm.generate("go", SamplingParams(max_tokens=64, stop_token_ids=[token]))[0]
        assert (by_id.token_ids, by_id.finish_reason) == (free[: first + 1], "stop")
        llm.engine.eos = frozenset({token})
        by_end = llm.generate("go", SamplingParams(max_tokens=64))[0]
        assert (by_end.token_ids, by_end.finish_reason) == (free[: first + 1], "stop")
        ignoring = llm.generate("go", SamplingParams(max_tokens=64, ignore_eos=True))[0]
        assert ignoring.token_ids == free
        llm.engine.eos = frozenset({0})
        by_length = llm.generate("go", SamplingParams(max_tokens=place))[0]
        assert (by_length.token_ids, by_length.finish_reason) == (free[:place], "length")
        assert by_length.accepted <= place


def test_the_context_is_a_limit_too() -> None:
    model = TableModel(vocab=256, context=20)
    llm = LLM(model, TableModel(vocab=256), k=7, tokenizer=ByteTokenizer())
    out = llm.generate("0123456789", SamplingParams(max_tokens=None))[0]
    assert (len(out.token_ids), out.finish_reason) == (10, "length")


def test_a_stream_is_the_answer_in_pieces() -> None:
    llm = an_llm(a_draft())
    params = SamplingParams(max_tokens=50, temperature=0.8, seed=3)
    pieces = list(llm.stream("tell", params))
    assert len(pieces) > 3
    assert "".join(pieces) == llm.generate("tell", params)[0].text


def test_streams_may_be_interleaved_and_left_early() -> None:
    llm = an_llm(a_draft())
    params = SamplingParams(max_tokens=50)
    left = llm.stream("leave", params)
    next(left)
    both = [llm.stream(p, params) for p in ("first", "other")]
    texts = ["", ""]
    for a, b in zip(*both, strict=False):
        texts = [texts[0] + a, texts[1] + b]
    left.close()
    texts = [t + "".join(rest) for t, rest in zip(texts, both, strict=True)]
    assert texts[0].startswith(llm.generate("first", params)[0].text[:20])
    assert llm.engine.tables.held() == 0


def test_what_ended_early_in_a_pipeline_is_not_lost_with_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = an_llm()
    engine = llm.engine
    engine._stages = 2
    params = [SamplingParams(max_tokens=most, ignore_eos=True) for most in (9, 9, 1, 9)]
    seqs = [engine.add(llm.request([n], one)) for n, one in enumerate(params)]
    engine.step()
    engine.abort(seqs[3])  # ends the step that the third has finished in
    with monkeypatch.context() as broken:
        broken.setattr(engine.target.model, "forward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert seqs[2].id in [output.id for output in engine.step() if output.finished]


def test_a_stream_that_others_finished_still_has_its_text() -> None:
    llm = an_llm(a_draft())
    params = SamplingParams(max_tokens=30)
    alone = [llm.generate(p, params)[0].text for p in ("hello", "world")]
    first, second = llm.stream("hello", params), llm.stream("world", params)
    begun = next(first), next(second)
    llm.generate("something long", SamplingParams(max_tokens=60))
    assert [begun[0] + "".join(first), begun[1] + "".join(second)] == alone


def test_a_stream_nobody_reads_costs_nothing() -> None:
    llm = an_llm()
    llm.stream("never read")
    assert not llm.engine.busy
    with pytest.raises(RequestError):
        llm.stream("")


@pytest.mark.parametrize("where", ["propose", "observe"])
def test_a_step_that_breaks_off_leaves_the_others_as_they_were(where: str) -> None:
    """A drafter that raises once: its caller sees the error, everybody else's text is unchanged."""
    llm = an_llm(SpyDrafter(NgramDrafter()))
    params = SamplingParams(max_tokens=30)
    alone = llm.generate("other", params)[0].text
    drafter, calls = llm.engine.drafter, 0
    method = getattr(drafter, where)

    def failing(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("boom")
        return method(*args)

    setattr(drafter, where, failing)
    other = llm.stream("other", params)
    text = next(other)
    with pytest.raises(RuntimeError, match="boom"):
        llm.generate("mine", params)
    assert text + "".join(other) == alone
    assert llm.engine.tables.held() == 0
    llm.engine.tables.check()


def test_end_tokens_there_are_none_of_do_no_harm() -> None:
    model = TableModel(vocab=256, seed=3, eos=(5000, 0))
    llm = LLM(model, tokenizer=ByteTokenizer())
    assert llm.engine.eos == {0}
    outs = llm.generate(["a", "b"], [SamplingParams(max_tokens=5, min_tokens=4), SamplingParams(max_tokens=5)])
    assert [len(o.token_ids) for o in outs] == [5, 5]


def test_totals_count_what_was_kept() -> None:
    llm = an_llm(TableModel(vocab=256, seed=3), k=8)
    out = llm.generate("x", SamplingParams(max_tokens=3))[0]
    assert llm.metrics()["accepted"] == out.accepted <= 3


def test_n_samples_share_a_prompt_and_differ() -> None:
    llm = an_llm(a_draft())
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, n=4)
    (answer,) = llm.generate("many", params)
    assert len(answer.outputs) == 4
    assert len({tuple(c.token_ids) for c in answer.outputs}) == 4
    again = an_llm().generate("many", params)[0]
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in answer.outputs]
    one = llm.generate("many", SamplingParams(max_tokens=20, temperature=1.0, seed=answer.outputs[2].seed))[0]
    assert one.token_ids == answer.outputs[2].token_ids, "a reported seed repeats its sample"
    with pytest.raises(RequestError, match="n = 4"):
        llm.stream("many", params)


def test_without_a_seed_two_runs_differ() -> None:
    llm = an_llm()
    params = SamplingParams(max_tokens=20, temperature=1.0)
    assert llm.generate("a", params)[0].token_ids != llm.generate("a", params)[0].token_ids


def test_bad_words_never_appear() -> None:
    llm = an_llm(a_draft())
    free = llm.generate("bad", SamplingParams(max_tokens=40))[0].token_ids
    single, double = chr(free[3]), bytes(free[6:8]).decode(errors="ignore")
    words = [w for w in (single, double) if w]
    params = SamplingParams(max_tokens=40, bad_words=words)
    out = llm.generate("bad", params)[0]
    assert out.token_ids != free
    assert not any(word in out.text for word in words)
    assert out.token_ids == an_llm().generate("bad", params)[0].token_ids


def test_logprobs_are_the_targets_own() -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, logprobs=2, prompt_logprobs=1)
    out, want = an_llm(a_draft()).generate("log", params)[0], expected("log", params)
    assert out.logprobs == want.logprobs
    assert out.prompt_logprobs == want.prompt_logprobs
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None


def test_another_tokenizer_reads_the_answers_too() -> None:
    llm = an_llm()
    llm.tokenizer = None
    assert llm.decode([104]) == ""
    llm.tokenizer = ByteTokenizer()
    assert llm.decode([104]) == "h" and llm.decode([104, 105]) == "hi"


def test_chat_uses_the_template() -> None:
    llm = an_llm()
    messages = [{"role": "user", "content": "hi"}]
    params = SamplingParams(max_tokens=5)
    direct = llm.generate("user: hi\nassistant: ", params)[0].text
    assert llm.chat(messages, params)[0].text == direct
    assert [a.text for a in llm.chat([messages, messages], params)] == [direct, direct]
    llm.tokenizer = None
    with pytest.raises(ConfigError, match="chat template"):
        llm.chat(messages)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("max_bach", "max_batch"), ("drafts", "draft"), ("tokeniser", "tokenizer"), ("speculative", "speculative_config")],
)
def test_a_misspelt_keyword_names_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"LLM = '{given}': unknown option; did you mean '{meant}'"):
        LLM("refused before it is loaded", **{given: 1})  # type: ignore[arg-type]


def test_speculative_config_takes_the_known_keys_and_refuses_others() -> None:
    llm = an_llm(speculative_config={"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3})
    assert isinstance(llm.engine.drafter, NgramDrafter)
    assert (llm.config.k, llm.config.lookup_max) == (6, 3)
    draft = an_llm(speculative_config={"model": a_draft(), "num_speculative_tokens": 2})
    assert draft.generate("x", SamplingParams(max_tokens=4))[0].drafted > 0
    with pytest.raises(ConfigError, match="did you mean 'num_speculative_tokens'"):
        an_llm(speculative_config={"num_speculative_token": 6})
    with pytest.raises(ConfigError, match="method"):
        an_llm(speculative_config={"method": "eagle"})
    with pytest.raises(ConfigError, match="given beside draft"):
        an_llm("ngram", speculative_config={"method": "ngram"})
    with pytest.raises(ConfigError, match="missing"):
        an_llm(speculative_config={"method": "draft_model"})


@pytest.mark.parametrize(
    ("options", "field"),
    [({"k": -1}, "k"), ({"strategy": "magic"}, "strategy"), ({"dtype": "int4"}, "dtype"),
     ({"max_batch": 0}, "max_batch"), ({"lookup_max": 0}, "lookup_max"),
     ({"memory": "lots"}, "memory"), ({"memory": 0}, "memory"), ({"device": "abacus"}, "device"),
     ({"max_bacth": 3}, "LLM"), ({"verifier": "hope"}, "verifier"), ({"memory": 7}, "memory")],
)  # fmt: skip
def test_a_wrong_option_is_refused_by_name(options: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        an_llm(**options)
    assert caught.value.field == field


def test_one_bad_request_harms_no_other() -> None:
    llm = an_llm(a_draft())
    good = llm.generate("fine", SamplingParams(max_tokens=10))[0].token_ids
    prompts: list[object] = ["fine", "", [1, 999], "x" * 600, "fine"]
    with pytest.raises(BatchError) as caught:
        llm.generate(prompts, SamplingParams(max_tokens=10))  # type: ignore[arg-type]
    outputs = caught.value.outputs
    assert [o.finish_reason for o in outputs] == ["length", "error", "error", "error", "length"]
    assert outputs[0].token_ids == outputs[4].token_ids == good
    assert [str(i) in str(e.value) or e.field == "prompt" for i, e in caught.value.failures] == [True] * 3
    same = llm.generate(prompts, SamplingParams(max_tokens=10), errors="return")  # type: ignore[arg-type]
    assert [o.error is None for o in same] == [True, False, False, False, True]


@pytest.mark.parametrize(
    ("prompt", "params", "k", "message"),
    [
        ("", {}, None, "prompt = '': empty"),
        ("x" * 512, {}, None, "leaves no room in the model's context of 512"),
        ([3, -1], {}, None, "prompt = -1: not a token id below 256"),
        ("a", {"logit_bias": {300: 1}}, None, "logit_bias = 300"),
        ("a", {"stop_token_ids": [256]}, None, "stop_token_ids = 256"),
        ("a", {}, -2, "k = -2: not a whole number"),
        ("a", {}, 1.5, "k = 1.5: not a whole number"),
        ([1.5], {}, None, "neither text nor token ids"),
    ],
)
def test_a_request_that_cannot_be_served_says_why(
    prompt: object, params: dict[str, object], k: int | None, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        an_llm().generate(prompt, SamplingParams(**params), k=k)  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, [None], [["a"]], [[1.7, 2.2]], [5.0]], ids=repr)
def test_what_is_no_prompt_is_refused_and_nothing_stays_behind(prompts: object) -> None:
    llm = an_llm()
    with pytest.raises(RequestError, match="neither text nor token ids"):
        llm.generate(prompts)  # type: ignore[arg-type]
    with pytest.raises(BatchError):
        llm.generate(["fine", prompts], SamplingParams(max_tokens=3))  # type: ignore[list-item]
    assert not llm.engine.busy
    with pytest.raises(RequestError, match="not SamplingParams"):
        llm.generate("a", {"temperature": 1})  # type: ignore[arg-type]


def test_arrays_and_paths_are_welcome(checkpoint: Callable[..., str]) -> None:
    llm = LLM(Path(checkpoint("llama")), Path(checkpoint("llama")), 4, dtype="float32", cache_memory="32MiB")
    params = SamplingParams(max_tokens=4)
    ids = [a.token_ids for a in llm.generate([[1, 2], [3, 4]], params)]
    assert [a.token_ids for a in llm.generate(torch.tensor([[1, 2], [3, 4]]), params)] == ids  # type: ignore[arg-type]
    assert [a.token_ids for a in llm.generate(np.array([[1, 2], [3, 4]]), params)] == ids  # type: ignore[arg-type]
    for target, draft in ((None, None), (7, None), (checkpoint("llama"), 5)):
        with pytest.raises(ConfigError, match="neither a folder, a hub id nor a model"):
            LLM(target, draft, dtype="float32", cache_memory="32MiB")  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", [None, "hi", [], [{"role": "user"}], [["x"]]], ids=repr)
def test_what_is_no_conversation_is_refused(messages: object) -> None:
    with pytest.raises(RequestError, match="messages"):
        an_llm().chat(messages)  # type: ignore[arg-type]


def test_a_request_larger_than_the_pool_is_refused_and_others_run() -> None:
    llm = an_llm(page=4, cache_memory=4 * 8 * 10)  # ten pages of four tokens
    small = SamplingParams(max_tokens=8)
    with pytest.raises(OutOfPages, match="raise cache_memory="):
        llm.generate("a", SamplingParams(max_tokens=40))
    outs = llm.generate(["a", "b" * 30, "c"], [small, SamplingParams(max_tokens=20), small], errors="return")
    assert [o.finish_reason for o in outs] == ["length", "error", "length"]


def test_nan_logits_end_one_request_only(checkpoint: Callable[..., str]) -> None:
    llm = an_llm(a_draft())
    clean = llm.generate(["abc", "def"], SamplingParams(max_tokens=12))
    assert isinstance(llm.model, TableModel)
    llm.model.poison = ord("!")
    outs = llm.generate(["abc", "no!", "def"], SamplingParams(max_tokens=12), errors="return")
    assert [o.finish_reason for o in outs] == ["length", "error", "length"]
    assert isinstance(outs[1].error, NumericsError)
    assert [outs[0].token_ids, outs[2].token_ids] == [o.token_ids for o in clean]
    with pytest.raises(NumericsError, match="float32"):
        list(llm.stream("no!"))


def test_nan_keys_do_not_reach_the_next_holder_of_a_page(checkpoint: Callable[..., str]) -> None:
    """A poisoned embedding fills pages with NaN; later requests get the same pages and write what they always did."""
    llm = LLM(checkpoint("llama"), dtype="float32", cache_memory=200_000, max_batch=2)
    params = SamplingParams(max_tokens=16)
    good = llm.generate([[1, 2, 3]], params)[0].token_ids
    bad = next(token for token in range(4, 128) if token not in good)
    embedding = llm.model.weights.embedding  # type: ignore[attr-defined]
    kept = embedding[bad].clone()
    embedding[bad] = torch.nan
    for _ in range(4):
        outs = llm.generate([[bad] * 40, [1, 2, 3]], params, errors="return")
        assert isinstance(outs[0].error, NumericsError)
        assert outs[1].token_ids == good
    embedding[bad] = kept
    assert llm.generate([[bad] * 40], params)[0].finish_reason == "length"


def test_a_draft_the_target_cannot_compute_is_only_a_wrong_draft(checkpoint: Callable[..., str]) -> None:
    """Nodes whose rows are NaN are rejected, and what they left in the cache does no harm later."""
    model = load(checkpoint("llama"))
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=40)
    (want,) = references(model, [prompt], [params], [0])
    bad = next(token for token in range(4, 128) if token not in want.tokens)
    model.weights.embedding[bad] = torch.nan  # type: ignore[attr-defined]
    trap = Trap(bad)
    (seq,) = run(engine_of(model, trap, k=6), [Request(tuple(prompt), params)])
    assert_same([seq], [want])
    assert trap.count > 20


class Trap(NoDrafter):
    """Now a long draft of one token, now none."""

    def __init__(self, token: int) -> None:
        self.token, self.count = token, 0

    def propose(self, batch: Batch) -> Draft:
        self.count += 1
        return Draft.chains([[self.token] * (max_nodes if self.count % 2 else 0) for max_nodes in batch.max_nodes])


def test_what_was_written_before_nan_does_not_depend_on_the_draft() -> None:
    outs = []
    for draft, k in ((None, 0), (TableModel(vocab=256, seed=3), 5), (a_draft(), 3)):
        llm = an_llm(draft, k=k)
        free = llm.generate("abc", SamplingParams(max_tokens=12))[0].token_ids
        assert isinstance(llm.model, TableModel)
        llm.model.poison = free[6]
        (out,) = llm.generate("abc", SamplingParams(max_tokens=12), errors="return")
        assert isinstance(out.error, NumericsError)
        outs.append((free[: free.index(free[6]) + 1], out.token_ids))
    assert all(want == got == outs[0][1] for want, got in outs)


def test_an_interrupted_run_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = an_llm()
    step, calls = llm.engine.step, []

    def interrupted() -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS)
    assert llm.engine.tables.held() == 0
    assert not llm.engine.busy


def test_progress_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    an_llm("ngram").generate(PROMPTS, SamplingParams(max_tokens=8), progress=True)
    assert "tok/s" in capsys.readouterr().err
    an_llm("ngram").generate(PROMPTS, SamplingParams(max_tokens=8))
    assert capsys.readouterr().err == ""


def test_a_drafter_of_ones_own_is_welcome() -> None:
    spy = SpyDrafter(NgramDrafter())
    llm = an_llm(spy)
    out = llm.generate("abcabcabc", SamplingParams(max_tokens=10))[0]
    assert len(spy.proposed) == len(spy.observed) == out.outputs[0].steps
    assert len(spy.forgotten) == 1


def test_without_a_tokenizer_ids_work_and_text_is_refused(checkpoint: Callable[..., str]) -> None:
    llm = LLM(checkpoint("llama"), dtype="float32", cache_memory="32MiB")
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].text == ""
    for call in (
        lambda: llm.generate("text"),
        lambda: llm.stream([1, 2]),
        lambda: llm.generate([[1]], SamplingParams(stop=["a"])),
        lambda: llm.generate([[1]], SamplingParams(bad_words=["a"])),
    ):
        with pytest.raises(RequestError, match="tokenizer"):
            call()


def test_a_real_model_writes_what_generate_writes(shared: Path) -> None:
    """stories15M with itself, rounded, as draft; real tokenizer, real text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(shared / "models" / "stories15M")
    llm = LLM(folder, draft="ngram", k=4, dtype="float32", cache_memory="256MiB")
    prompts = ["Once upon a time", "Lily and Tom went to the park. They", "The big red dog"]
    outs = llm.generate(prompts, SamplingParams(max_tokens=40))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, out in zip(prompts, outs, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        want = model.generate(ids, do_sample=False, max_new_tokens=40)[0, ids.shape[1] :].tolist()
        assert out.token_ids == want
        assert prompt + out.text == tokenizer.decode([*ids[0].tolist(), *want], skip_special_tokens=True)


def test_llms_of_one_checkpoint_share_its_weights_while_one_is_alive(checkpoint: Callable[..., str]) -> None:
    path = checkpoint("llama")
    first = LLM(path, dtype="float32", cache_memory="1MiB")
    second = LLM(path, dtype="float32", cache_memory="1MiB", draft="ngram")
    assert second.model is first.model
    assert LLM(path, dtype="bfloat16", cache_memory="1MiB").model is not first.model
    name = first.model
    alive = weakref.ref(name)
    del first, second, name
    gc.collect()
    assert alive() is None, "nothing but LLMs keeps a model"


def test_explain_says_what_takes_memory(checkpoint: Callable[..., str]) -> None:
    llm = LLM(checkpoint("llama"), checkpoint("llama", 1), 4, dtype="float32", cache_memory="1MiB")
    memory = llm.explain()["memory_bytes"]
    assert memory["weights"] == memory["draft_weights"] > 0
    assert 0 < memory["cache_limit"] <= 1 << 20 and memory["cache_in_use"] == 0
    llm.generate([[1, 2, 3] * 20], SamplingParams(max_tokens=2))
    assert 0 < llm.explain()["memory_bytes"]["cache_in_use"] < memory["cache_limit"], "a prefix is kept"
