"""The training loop, its data and tasks, and the tools of the bundled pair's recipe, on tiny networks."""

import math
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from faircopy.errors import ConfigError
from faircopy.train.acceptance import accepted_per_verify, measure_acceptance
from faircopy.train.data import Windows, load_tokens, overlap, pack, unseen
from faircopy.train.language import Distil, NextToken, speed_up
from faircopy.train.llama import Llama, Shape, fresh, load_llama, save_llama
from faircopy.train.loop import Progress, Settings, learning_rate, read_log, train
from faircopy.train.sampler import choose, rows_of, sample
from faircopy.train.tokenizer import end_id, save_tokenizer, train_bpe
from runs.bundled.sample_stories import clean

TINY = Shape(vocab=64, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=48, context=64)
TEXT = "Once upon a time there was a cat. The cat sat on a mat. The mat was red. " * 20


def counting(n: int = 4000) -> Tensor:
    """A text a tiny network learns at once: numbers in order, modulo 60."""
    return (torch.arange(n) % 60).int()


def loud(shape: Shape, seed: int) -> Llama:
    """A random network with decided opinions, so that no two logits tie."""
    network = fresh(shape, seed)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8.0)
    return network.eval()


class Killed(Exception):
    pass


def die_at(step: int) -> "object":
    def watch(progress: Progress) -> None:
        if progress.step == step:
            raise Killed

    return watch


def run(folder: Path, settings: Settings, die: int | None = None) -> list[dict[str, float]]:
    """Train the same tiny network; the losses by step. Time is left out: it is the one thing that may differ."""
    task = NextToken(fresh(TINY, 3))
    batches = Windows(counting(), 16, 4, seed=5)
    watch = die_at(die) if die else None
    train(task, batches, settings, folder / "log.jsonl", folder / "state.pt", watch)  # type: ignore[arg-type]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_log(folder / "log.jsonl")]


@pytest.mark.parametrize("each", [False, True])
def test_a_killed_run_goes_on_with_the_same_losses(tmp_path: Path, each: bool) -> None:
    settings = Settings(steps=24, log_every=3, checkpoint_every=8, accumulate=2, seed=1, clip_each=each)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = run(whole, settings)
    with pytest.raises(Killed):
        run(broken, settings, die=19)  # three steps after the last checkpoint
    assert run(broken, settings) == expected
    assert expected[-1]["step"] == 24 and expected[-1]["tokens"] == 24 * 2 * 4 * 17


@pytest.mark.parametrize("each", [False, True])
def test_gradients_are_cut_together_or_each_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each: bool
) -> None:
    step, kept = torch.optim.AdamW.step, []

    def watched(self, *args):  # type: ignore[no-untyped-def]
        kept.extend(p.grad.flatten() for group in self.param_groups for p in group["params"])
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    settings = Settings(steps=1, clip=1e-3, clip_each=each, log_every=1)
    train(NextToken(fresh(TINY, 3)), Windows(counting(), 16, 4, seed=5), settings, tmp_path / "log.jsonl")
    gradients = torch.cat(kept)
    size = gradients.abs().max() if each else gradients.norm()
    assert float(size) == pytest.approx(1e-3, rel=1e-3)


def test_training_lowers_the_loss_and_repeats_itself(tmp_path: Path) -> None:
    settings = Settings(steps=60, lr=1e-2, log_every=1)
    first, second = run(tmp_path / "a", settings), run(tmp_path / "b", settings)
    assert first == second
    assert first[-1]["loss"] < 0.5 * first[0]["loss"]


def test_accumulating_batches_equals_one_large_batch(tmp_path: Path) -> None:
    settings = Settings(steps=4, log_every=1)
    task, large = NextToken(fresh(TINY, 3)), Windows(counting(), 16, 8, seed=5)
    train(task, large, settings, tmp_path / "large.jsonl")
    split = replace(settings, accumulate=2)
    other = NextToken(fresh(TINY, 3))
    train(other, Windows(counting(), 16, 4, seed=5), split, tmp_path / "small.jsonl")
    losses = [[line["loss"] for line in read_log(tmp_path / f"{name}.jsonl")] for name in ("large", "small")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_run_by_the_clock_ends_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(100.0, 0.01)
    monkeypatch.setattr("faircopy.train.loop.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    done = train(
        NextToken(fresh(TINY, 3)),
        Windows(counting(), 16, 4, seed=5),
        Settings(seconds=0.3),
        tmp_path / "log.jsonl",
    )
    assert done.step > 3 and done.seconds == pytest.approx(0.3, abs=0.03)
    assert read_log(tmp_path / "log.jsonl")[-1]["lr"] < 0.2 * Settings(steps=1).lr


def test_the_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    settings = Settings(steps=100, lr=1.0, warmup=0.1, floor=0.05)
    rates = [learning_rate(step / 100, settings) for step in range(101)]
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[10] == pytest.approx(1.0) and rates[100] == pytest.approx(0.05)


def test_a_run_without_an_end_and_a_loss_that_explodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        Settings()
    with pytest.raises(ConfigError, match="lower lr"):
        network = fresh(TINY, 3)
        torch.nn.init.constant_(network.model.norm.weight, math.nan)
        windows = Windows(counting(), 16, 4, seed=5)
        train(NextToken(network), windows, Settings(steps=3, log_every=1), tmp_path / "log.jsonl")


def test_packed_documents_come_back_and_an_epoch_sees_every_window_once(tmp_path: Path) -> None:
    documents = [[0, 1, 2], [0], [0, 65535, 7]]
    assert pack(documents, tmp_path / "text.bin") == 7
    assert load_tokens(tmp_path / "text.bin").tolist() == [0, 1, 2, 0, 0, 65535, 7]
    with pytest.raises(ConfigError, match="16 bits"):
        pack([[65536]], tmp_path / "text.bin")
    windows = Windows(torch.arange(1000).int(), 10, 4, seed=1)
    epoch = torch.cat([windows.batch(index) for index in range(windows.per_epoch)])
    assert epoch.shape == (windows.per_epoch * 4, 11) and torch.equal(epoch[:, 1:], epoch[:, :-1] + 1)
    assert len(epoch[:, :-1].unique()) == epoch[:, :-1].numel()
    later = windows.batch(windows.per_epoch + 2)
    assert torch.equal(Windows(torch.arange(1000).int(), 10, 4, seed=1).batch(windows.per_epoch + 2), later)


def test_overlap_counts_sequences_that_the_corpus_holds() -> None:
    corpus = torch.randint(50, (5000,), generator=torch.Generator().manual_seed(0)).int()
    known, new = corpus[100:140].tolist(), list(range(200, 240))
    assert overlap([known], corpus) == 1.0 and overlap([new], corpus) == 0.0
    assert overlap([known, new], corpus) == 0.5
    assert unseen([known, new, known[:7], new[:7]], corpus) == [new, new[:7]]


def test_our_llama_computes_what_transformers_computes(tmp_path: Path) -> None:
    network = loud(TINY, 1)
    save_llama(network, tmp_path, bos_token_id=0, eos_token_id=0, pad_token_id=1)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ours = load_llama(tmp_path)
    tokens = torch.randint(64, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    assert Shape.of(theirs.config) == TINY
    assert theirs.generation_config.eos_token_id == 0


def test_the_samplers_greedy_text_equals_generate(tmp_path: Path) -> None:
    network = loud(TINY, 2)
    theirs = LlamaForCausalLM(TINY.config()).eval()
    theirs.load_state_dict(network.state_dict(), strict=False)
    theirs.tie_weights()
    prompts = [[5], [9, 1, 33], [2, 3, 5, 7, 11, 13, 17]]
    rows = rows_of(sample(network, prompts, 40, ends=(0,)))
    for prompt, row in zip(prompts, rows, strict=True):
        text = theirs.generate(
            torch.tensor([prompt]), do_sample=False, max_length=40, eos_token_id=0, pad_token_id=1, use_cache=True
        )
        assert row == text[0].tolist()


def test_rows_end_at_an_end_token_and_draws_follow_the_probabilities() -> None:
    network = loud(TINY, 2)
    block = sample(network, [[5]] * 50, 40, ends=tuple(range(32)), temperature=1.0, seed=7)
    for row in rows_of(block):
        assert all(token >= 32 for token in row[1:-1])
    assert torch.equal(block, sample(network, [[5]] * 50, 40, ends=tuple(range(32)), temperature=1.0, seed=7))
    logits = torch.tensor([0.5, 0.3, 0.19, 0.01]).log().repeat(40_000, 1)
    drawn = choose(logits, 1.0, 0.1, torch.Generator().manual_seed(0)).bincount(minlength=4) / 40_000
    assert drawn.tolist() == pytest.approx([0.505, 0.303, 0.192, 0.0], abs=0.015) and drawn[3] == 0


def test_distillation_brings_the_student_closer(tmp_path: Path) -> None:
    teacher, student = loud(TINY, 1), fresh(replace(TINY, layers=1, hidden=16, head_dim=4), 2)
    task = Distil(student, teacher, hard=0.5)
    text = sample(teacher, [[token] for token in range(64)], 60, ends=()).flatten().int()
    train(task, Windows(text, 32, 8, seed=0), Settings(steps=60, lr=2e-2, log_every=1), tmp_path / "log.jsonl")
    lines = read_log(tmp_path / "log.jsonl")
    assert lines[-1]["kl"] < lines[0]["kl"] and lines[-1]["agree"] > lines[0]["agree"] + 0.1


def test_a_failed_compilation_leaves_the_eager_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: object, **options: object) -> object:
        def fail(batch: Tensor) -> None:
            raise RuntimeError("no compiler here")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    task, batch = NextToken(fresh(TINY, 3)), Windows(counting(), 16, 4, seed=5).batch(0)
    assert not speed_up(task, batch, bf16=False)
    assert math.isfinite(task.loss(batch)[0].item()) and task.network.model.norm.weight.grad is None


def test_a_perfect_draft_is_accepted_whole_and_a_wrong_one_never() -> None:
    network = loud(TINY, 2)
    prompts = [[5, 6], [9, 1, 33], [2]]
    perfect = measure_acceptance(network, network, prompts, k=4, new=30, end=0)
    assert perfect.tokens_per_verify == 5.0 and perfect.agreement == 1.0 and perfect.verifies >= 6
    assert measure_acceptance(network, loud(TINY, 9), prompts, k=4, new=30, end=0).tokens_per_verify < 2.0


def test_accepted_nodes_are_the_runs_of_right_guesses() -> None:
    yes, no = True, False
    assert accepted_per_verify([yes, no, yes, yes, yes, no, yes], k=2) == [1, 2]
    assert accepted_per_verify([no] * 5, k=1) == [0, 0, 0, 0]
    assert accepted_per_verify([yes] * 10, k=4) == [4, 4]


def test_acceptance_equals_real_speculation() -> None:
    """The slow twin: draft a chain token by token, compare, move on."""
    target, k = loud(TINY, 2), 3
    draft, _ = fresh(TINY, 2).eval(), torch.manual_seed(0)
    draft.load_state_dict({n: p + 0.05 * torch.randn(p.shape) for n, p in target.state_dict().items()})
    prompt, new = [9, 1, 33], 40
    text = rows_of(sample(target, [prompt], len(prompt) + new, ends=()))[0]
    counts, place = [], len(prompt)
    while place + k < len(text):
        chain = rows_of(sample(draft, [text[:place]], place + k, ends=()))[0][place:]
        count = next((i for i in range(k) if chain[i] != text[place + i]), k)
        counts.append(count)
        place += count + 1
    measured = measure_acceptance(target, draft, [prompt], k, new, end=-5)
    assert 0 < sum(counts) < k * len(counts)  # some accepted, some not
    assert measured.verifies == len(counts) and measured.tokens_per_verify == 1 + sum(counts) / len(counts)


def test_the_tokenizer_folder_loads_and_reads_back(tmp_path: Path) -> None:
    tokenizer = train_bpe([TEXT], 300)
    save_tokenizer(tokenizer, tmp_path, context=64)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "The cat, süß & 7 mats.\nOnce upon\ta time 🐈"
    ids = loaded(text)["input_ids"]
    assert ids == tokenizer.encode(text).ids and ids[0] == loaded.bos_token_id == loaded.eos_token_id
    assert loaded.decode(ids, skip_special_tokens=True) == text
    assert end_id(tokenizer) == loaded.eos_token_id != loaded.pad_token_id
    talk = [{"role": "user", "content": "A cat"}, {"role": "assistant", "content": "sat."}]
    assert loaded.apply_chat_template(talk, tokenize=False) == "<|end|>A cat\nsat.\n"


def test_a_story_that_was_cut_off_ends_with_its_last_sentence() -> None:
    assert clean('He said, "Stop!" Then he went to th', ended=False) == 'He said, "Stop!"'
    assert clean("  It’s done", ended=True) == "It's done"
    assert clean("no end at all", ended=False) == ""


def test_a_picture_of_the_losses_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from faircopy.train.plots import plot_logs

    run(tmp_path, Settings(steps=6, log_every=2))
    plot_logs([tmp_path / "log.jsonl"], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 1000
