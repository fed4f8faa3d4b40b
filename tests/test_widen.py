"""Widened models: another shape, the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.widen import read_checkpoint, widen, widened_config, widened_model, widened_state
from faircopy import LLM, ConfigError, SamplingParams
from tests.helpers import random_prompts

MODELS = Path(__file__).resolve().parents[1] / "models"
VOCAB = 96

# hidden, layers, heads, key heads, head size, intermediate, vocabulary, tied
SMALL: dict[str, tuple[Any, ...]] = {
    "tied": (48, 3, 6, 2, 16, 64, VOCAB, True),
    "untied": (64, 2, 4, 2, 16, 96, VOCAB, False),
}
WIDE: dict[str, tuple[Any, ...]] = {
    "roomy": (256, 7, 8, 4, 32, 160, 150, False),
    "narrow": (84, 3, 6, 2, 16, 96, 100, False),  # no room for a copy of the stream
    "odd heads": (192, 4, 12, 4, 24, 128, 130, False),  # 16 does not divide 24
    "small groups": (256, 4, 8, 8, 64, 128, 97, False),  # key heads must be repeated
    "tied": (256, 5, 16, 4, 32, 160, 150, True),
    "the same": (64, 3, 8, 2, 16, 96, VOCAB, False),
}
CASES = [
    (small, wide, kind)
    for small in SMALL
    for wide in WIDE
    for kind in ("llama", "qwen3")
    if (small, wide) != ("untied", "tied")
]


def configuration(kind: str, sizes: tuple[Any, ...], **more: Any) -> dict[str, Any]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("intermediate_size", "vocab_size", "tie_word_embeddings")
    nobody = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return {"model_type": kind, **dict(zip(names, sizes, strict=True)), **nobody, **more}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of small random models that are sure of what they say."""
    folders = {}
    for name, sizes in SMALL.items():
        torch.manual_seed(5)
        config = configuration("llama", sizes, initializer_range=0.25, max_position_embeddings=128, rms_norm_eps=1e-5)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        folders[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(folders[name])
    return folders


def widened(folder: str, kind: str, sizes: tuple[Any, ...], out: Path, **options: Any) -> str:
    widen(folder, configuration(kind, sizes), out, **{"dtype": torch.float32, **options})
    return str(out)


def stock(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    return model.generate(ids, max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("source", "shape", "kind"), CASES)
def test_a_widened_model_computes_the_same(
    small: dict[str, str], tmp_path: Path, source: str, shape: str, kind: str
) -> None:
    ours, wide = stock(small[source]), stock(widened(small[source], kind, WIDE[shape], tmp_path))
    for prompt in random_prompts(2, VOCAB, longest=60):
        with torch.no_grad():
            want, got = (model(torch.tensor([prompt])).logits[0] for model in (ours, wide))
        error = (got[:, :VOCAB] - want).abs().max() / want.abs().max()
        assert error < 1e-4
        assert (got[:, VOCAB:] < want.min() - 1e3).all(), "an extra token could win"
        assert greedy(wide, prompt, 24) == greedy(ours, prompt, 24)


def test_the_files_have_the_shape_asked_for_and_no_zeros(small: dict[str, str], tmp_path: Path) -> None:
    sizes = WIDE["roomy"]
    folder = widened(small["tied"], "qwen3", sizes, tmp_path, dtype=torch.bfloat16)
    state = {name: t for file in tmp_path.glob("*.safetensors") for name, t in load_file(file).items()}
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).state_dict()
    assert {name: t.shape for name, t in state.items()} == {name: t.shape for name, t in expected.items()}
    for name, tensor in state.items():
        assert tensor.dtype == torch.bfloat16
        assert tensor.isfinite().all()
        assert (tensor != 0).float().mean() > 0.98, f"{name} is mostly zeros"


def test_a_large_model_is_cut_into_files(
    small: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.widen.SHARD", 200_000)
    folder = widened(small["tied"], "llama", WIDE["roomy"], tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    assert greedy(stock(folder), [1, 2, 3], 8) == greedy(stock(small["tied"]), [1, 2, 3], 8)


def test_weights_depend_on_the_seed_alone(small: dict[str, str]) -> None:
    state, config = read_checkpoint(small["tied"])
    shape = configuration("llama", WIDE["roomy"])
    one, again = (widened_state(state, config, shape, seed=1) for _ in range(2))
    other = widened_state(state, config, shape, seed=2)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["model.layers.1.mlp.up_proj.weight"], other["model.layers.1.mlp.up_proj.weight"])
    assert one["lm_head.weight"].dtype == torch.bfloat16


def test_powers_of_two_keep_every_bit(small: dict[str, str]) -> None:
    """The trained weights are found again in bfloat16, norms included: only powers of two touched them."""
    state, config = read_checkpoint(small["tied"])
    state = {name: t.bfloat16() for name, t in state.items()}
    wide = widened_state(state, config, configuration("llama", (256, 3, 8, 2, 64, 64, VOCAB, False)))
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
        assert torch.equal(wide[name][:48] * 2, state[name])
    down = "model.layers.2.mlp.down_proj.weight"
    assert torch.equal(wide[down][:48, :64], state[down])


def test_the_configuration_follows_the_source(small: dict[str, str]) -> None:
    _, config = read_checkpoint(small["tied"])
    wide = widened_config(config, configuration("qwen3", WIDE["roomy"], max_position_embeddings=40960))
    assert (wide.hidden_size, wide.max_position_embeddings, wide.rope_parameters["rope_theta"]) == (256, 128, 10000.0)
    assert widened_config(config, AutoConfig.for_model(**configuration("llama", WIDE["roomy"]))).vocab_size == 150


@pytest.mark.parametrize(
    ("source", "change"),
    [
        ("tied", {"hidden_size": 40}),
        ("tied", {"num_hidden_layers": 2}),
        ("tied", {"head_dim": 8}),
        ("tied", {"vocab_size": 95}),
        ("tied", {"num_key_value_heads": 1, "num_attention_heads": 4}),
        ("tied", {"hidden_size": 48}),
        ("tied", {"attention_bias": True}),
        ("tied", {"model_type": "qwen2"}),
        ("untied", {"tie_word_embeddings": True}),
    ],
)
def test_what_does_not_fit_is_refused(small: dict[str, str], source: str, change: dict[str, Any]) -> None:
    state, config = read_checkpoint(small[source])
    with pytest.raises(ConfigError):
        widened_state(state, config, configuration("llama", WIDE["roomy"]) | change)


def figures(target: Any, draft: Any, prompts: list[Any], **options: Any) -> list[tuple[list[int], int, int]]:
    """Tokens, drafted and accepted per prompt, through the exact engine."""
    llm = LLM(target, draft, k=3, dtype="float32", device="cpu", cache_memory="64MiB", **options)
    answers = llm.generate(prompts, SamplingParams(max_tokens=32))
    return [(a.token_ids, a.drafted, a.accepted) for a in answers]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_widened_pair_drafts_and_accepts_as_the_small_one(small: dict[str, str], tmp_path: Path, kind: str) -> None:
    prompts = random_prompts(5, VOCAB, seed=3)
    near = tmp_path / "near"  # a draft that is often right: the target, its last layer's work halved
    model = stock(small["tied"])
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight.mul_(0.5)
    model.save_pretrained(near)
    target = widened(small["tied"], kind, WIDE["roomy"], tmp_path / "target")
    draft = widened(str(near), kind, WIDE["tied"], tmp_path / "draft")
    assert figures(target, None, prompts) == figures(small["tied"], None, prompts)
    pair = figures(small["tied"], str(near), prompts)
    assert figures(target, draft, prompts) == pair
    assert 0 < sum(p[2] for p in pair) < sum(p[1] for p in pair)


def test_a_model_is_built_without_files(small: dict[str, str]) -> None:
    prompts = random_prompts(3, VOCAB, seed=4)
    shape = configuration("qwen3", WIDE["tied"])
    model = widened_model(small["tied"], shape, dtype=torch.float32)
    assert figures(model, None, prompts) == figures(small["tied"], None, prompts)


@pytest.mark.skipif(not (MODELS / "target" / "model.safetensors").exists(), reason="no bundled models in this checkout")
def test_the_bundled_pair_writes_the_same_when_widened(tmp_path: Path) -> None:
    prompts = ["Once upon a time", "The old boat lay on the beach.", "Lily was sad because"]
    target = widened(str(MODELS / "target"), "qwen3", (800, 10, 8, 2, 128, 1024, 5000, False), tmp_path / "target")
    draft = widened(str(MODELS / "draft"), "llama", (320, 4, 8, 4, 64, 512, 5000, True), tmp_path / "draft")
    small_pair = figures(str(MODELS / "target"), str(MODELS / "draft"), prompts)
    assert figures(target, draft, prompts) == small_pair
    assert sum(accepted for _, _, accepted in small_pair) > 0
