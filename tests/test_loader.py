"""Checkpoints: what is served, what is refused by name, what is missing or corrupt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from faircopy import LLM, CheckpointError, ConfigError, SamplingParams, UnsupportedModel
from faircopy.cache import KeptTable
from faircopy.kernels import linear
from faircopy.model import loader
from faircopy.model.decoder import Decoder
from faircopy.model.invariant import RowInvariant
from faircopy.model.selftest import self_test
from faircopy.model.transformers_backend import TransformersModel
from faircopy.model.weights import FAMILIES
from tests.helpers import CPU, load
from tests.zoo import REFUSED, ZOO, build

OPTIONS = {"dtype": "float32", "cache_memory": "32MiB"}


@pytest.fixture
def copy(checkpoint: Callable[..., str], tmp_path: Path) -> Callable[..., Path]:
    """A private copy of a checkpoint, to be damaged."""

    def make(name: str = "llama") -> Path:
        return Path(shutil.copytree(checkpoint(name), tmp_path / name))

    return make


def add_tokenizer(folder: Path, words: list[str]) -> None:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0]).save_pretrained(folder)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_served_exactly_is_refused_by_name(checkpoint: Callable[..., str], name: str) -> None:
    with pytest.raises((UnsupportedModel, CheckpointError)) as caught:
        LLM(checkpoint(name), **OPTIONS)
    assert isinstance(caught.value, UnsupportedModel), caught.value
    assert caught.value.remedy in str(caught.value)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_what_is_served_passes_its_own_test(checkpoint: Callable[..., str], name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        self_test(load(checkpoint(name), dtype), exact=True)


def test_the_family_runs_on_our_decoder_and_others_on_the_transformers_backend(
    checkpoint: Callable[..., str],
) -> None:
    ours = {"llama", "mistral_window", "qwen2", "qwen3", "glm", "glm4", "phi3", "granite", "smollm3"}
    for name in ours:
        assert isinstance(load(checkpoint(name)), Decoder), name
        assert isinstance(load(checkpoint(name), backend="transformers"), TransformersModel)
    for name in ("gpt2", "gemma2", "qwen3_moe", "olmo2"):
        assert isinstance(load(checkpoint(name)), TransformersModel), name
    assert {ZOO[name]().model_type for name in ours} <= set(FAMILIES)


@pytest.mark.parametrize("name", ["llama_yarn", "qwen3", "glm4", "phi3", "granite", "smollm3", "gemma", "seed_oss"])
def test_both_backends_write_the_same_text(checkpoint: Callable[..., str], name: str) -> None:
    texts = []
    for backend in ("decoder", "transformers"):
        llm = LLM(load(checkpoint(name), backend=backend), draft="ngram", k=4, cache_memory="32MiB")
        texts.append([a.token_ids for a in llm.generate([[5, 6, 7], [9] * 30], SamplingParams(max_tokens=20))])
    assert texts[0] == texts[1]


def test_a_model_whose_rows_depend_on_each_other_is_refused_unless_asked_for(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fickle(weight: torch.Tensor, bias: torch.Tensor | None = None, exact: bool = True) -> linear.Product:
        return lambda x: torch.nn.functional.linear(x, weight, bias) * (1 + 1e-6 * x.shape[0])

    monkeypatch.setattr("faircopy.model.decoder.product", fickle)
    monkeypatch.setattr("faircopy.build._PASSED", KeptTable("self-tests"))  # it has passed before, with other products
    with pytest.raises(UnsupportedModel, match=r"differ in bits.*exact=False"):
        LLM(checkpoint("llama"), **OPTIONS)
    out = LLM(checkpoint("llama"), exact=False, **OPTIONS).generate([[1, 2]], SamplingParams(max_tokens=3))
    assert len(out[0].token_ids) == 3


def test_without_the_promise_everything_else_still_works(checkpoint: Callable[..., str]) -> None:
    for name in ("llama", "gemma2", "qwen3_moe"):
        llm = LLM(checkpoint(name), draft=checkpoint(name, 1), k=4, exact=False, **OPTIONS)
        out = llm.generate([[1, 2, 3], [4] * 40], SamplingParams(max_tokens=12))
        assert [len(a.token_ids) for a in out] == [12, 12]


@pytest.mark.parametrize(
    ("path", "problem"), [("./nowhere", "no such folder"), ("/a/b/c", "no such folder"), ("a/b/c/d", "no such folder")]
)
def test_a_missing_folder_is_named(path: str, problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem) as caught:
        LLM(path)
    assert path in str(caught.value)


def test_a_hub_that_cannot_be_reached_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> str:
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(CheckpointError, match="neither a folder nor to be had from the hub"):
        LLM("someone/some-model")


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LLM(str(tmp_path))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_corrupt_file_is_named(copy: Callable[..., Path], name: str) -> None:
    folder = copy(name)
    (folder / "model.safetensors").write_bytes(b"nonsense" * 20)
    with pytest.raises(CheckpointError, match="fetch the checkpoint again"):
        LLM(str(folder), **OPTIONS)


@pytest.mark.parametrize(("name", "lost"), [("llama", "layers.1.mlp.up_proj.weight"), ("gpt2", "h.1.mlp.c_fc.weight")])
def test_a_missing_tensor_is_named(copy: Callable[..., Path], name: str, lost: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy(name)
    tensors = load_file(folder / "model.safetensors")
    lost = next(key for key in tensors if key.endswith(lost))
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        LLM(str(folder), **OPTIONS)
    assert lost.split(".")[-2] in str(caught.value)


@pytest.mark.parametrize(
    ("name", "lost"),
    [("llama", "lm_head.weight"), ("qwen3", "layers.0.self_attn.q_norm.weight"), ("qwen2", "k_proj.bias"),
     ("glm4", "post_mlp_layernorm.weight")],
)  # fmt: skip
def test_a_missing_tensor_that_others_do_without_is_missed(copy: Callable[..., Path], name: str, lost: str) -> None:
    damage(copy(name), lost, lambda tensor: None)


@pytest.mark.parametrize("lost", ["embed_tokens.weight", "down_proj.weight", "q_proj.weight", "lm_head.weight"])
def test_a_tensor_of_another_shape_is_named(copy: Callable[..., Path], lost: str) -> None:
    damage(copy(), lost, lambda tensor: tensor[:-8].clone())


def damage(folder: Path, name: str, how: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Lose or change one tensor of a checkpoint; loading it must name that tensor."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    key = next(k for k in tensors if k.endswith(name))
    changed = how(tensors.pop(key))
    save_file(tensors | ({} if changed is None else {key: changed}), folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        LLM(str(folder), **OPTIONS)
    assert key in str(caught.value)


@pytest.mark.parametrize("file", ["generation_config.json", "model.safetensors.index.json", "config.json"])
def test_a_file_that_is_not_json_is_named(copy: Callable[..., Path], file: str) -> None:
    folder = copy()
    (folder / file).write_text("{not json")
    with pytest.raises(CheckpointError, match=r"fetch the checkpoint again|complete checkpoint folder"):
        LLM(str(folder), **OPTIONS)


def test_a_wrong_value_in_the_configuration_is_refused(copy: Callable[..., Path]) -> None:
    folder = copy()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "x"}))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LLM(str(folder), **OPTIONS)


def test_float16_is_served_in_chunks_too(checkpoint: Callable[..., str]) -> None:
    for name in ("llama", "gpt2"):
        llm = LLM(checkpoint(name), dtype="float16", cache_memory="32MiB", chunk=8)
        whole = LLM(checkpoint(name), dtype="float16", cache_memory="32MiB")
        params = SamplingParams(max_tokens=6)
        assert llm.generate([[5] * 30], params)[0].token_ids == whole.generate([[5] * 30], params)[0].token_ids


def test_one_weight_used_both_ways_has_two_products() -> None:
    weight, x = torch.nn.Parameter(torch.randn(8, 8)), torch.randn(3, 8)
    with torch.no_grad(), RowInvariant(CPU):
        there, back = torch.nn.functional.linear(x, weight), x @ weight
    assert torch.allclose(there, x @ weight.t(), atol=1e-5)
    assert torch.allclose(back, x @ weight, atol=1e-5)


def test_a_shard_that_is_missing_is_named(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    whole = LLM(str(tmp_path), **OPTIONS).generate([[1, 2]], SamplingParams(max_tokens=4))[0].token_ids
    assert whole == LLM(checkpoint("llama"), **OPTIONS).generate([[1, 2]], SamplingParams(max_tokens=4))[0].token_ids
    shards[-1].unlink()
    with pytest.raises(CheckpointError, match=shards[-1].name):
        LLM(str(tmp_path), **OPTIONS)


def test_a_draft_with_another_vocabulary_is_refused_with_the_first_difference(
    copy: Callable[..., Path], tmp_path: Path
) -> None:
    target = copy()
    draft = Path(shutil.copytree(target, tmp_path / "draft"))
    words = [f"w{i}" for i in range(128)]
    add_tokenizer(target, words)
    add_tokenizer(draft, [*words[:77], "other", *words[78:]])
    with pytest.raises(ConfigError, match="token 77 is 'w77' for the target and 'other' for the draft"):
        LLM(str(target), draft=str(draft), **OPTIONS)
    add_tokenizer(draft, words)
    assert LLM(str(target), draft=str(draft), **OPTIONS).generate("w5 w6", SamplingParams(max_tokens=4))[0].text


def test_heads_padded_to_different_sizes_go_together(tmp_path: Path) -> None:
    folders = []
    for name, size in (("target", 128), ("draft", 160)):
        from transformers import AutoModelForCausalLM

        config = ZOO["llama"]()
        config.vocab_size = size
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        add_tokenizer(tmp_path / name, [f"w{i}" for i in range(120)])
        folders.append(str(tmp_path / name))
    for target, draft in (folders, folders[::-1]):
        plain = LLM(target, **OPTIONS).generate([[1, 2, 3]], SamplingParams(max_tokens=10))[0].token_ids
        out = LLM(target, draft=draft, k=4, **OPTIONS).generate([[1, 2, 3]], SamplingParams(max_tokens=10))[0]
        assert out.token_ids == plain
        assert out.drafted > 0


def test_vocabularies_without_tokenizers_must_at_least_agree_in_size(
    checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    config = ZOO["llama"]()
    config.vocab_size = 96
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="vocabularies of 128 and 96"):
        LLM(checkpoint("llama"), draft=str(tmp_path), **OPTIONS)


def test_bfloat16_runs_in_float32_where_it_would_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for native in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda native=native: native)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert loader.native_dtype(torch.bfloat16, CPU) == (torch.bfloat16 if native else torch.float32)
        assert loader.native_dtype(torch.float16, CPU) == torch.float32
        assert loader.native_dtype(torch.float32, CPU) == torch.float32


def test_the_user_may_ask_for_bfloat16(checkpoint: Callable[..., str]) -> None:
    assert LLM(checkpoint("llama"), dtype="bfloat16", cache_memory="32MiB").model.dtype == torch.bfloat16


def test_every_end_token_of_the_generation_config_counts(copy: Callable[..., Path]) -> None:
    folder = copy()
    free = LLM(str(folder), **OPTIONS).generate([[1, 2]], SamplingParams(max_tokens=12))[0].token_ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [free[7], free[4]]}))
    out = LLM(str(folder), **OPTIONS).generate([[1, 2]], SamplingParams(max_tokens=12))[0]
    first = min(free.index(free[4]), free.index(free[7]))
    assert (out.token_ids, out.finish_reason) == (free[: first + 1], "stop")
    assert LLM(str(folder), **OPTIONS).generate([[1, 2, free[4], 3]], SamplingParams(max_tokens=3))[0].token_ids


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "gpt_neox", "qwen3_moe", "deepseek_v3", "gemma3n"])
def test_packed_weights_exist_once(checkpoint: Callable[..., str], name: str) -> None:
    """What products have copies of is freed after the self-test, and the text stays the same."""
    prompts, params = [[5, 6, 7], [9] * 30], SamplingParams(max_tokens=12)
    double = load(checkpoint(name), backend="transformers")
    assert isinstance(double, TransformersModel)
    wanted = [a.token_ids for a in LLM(double, cache_memory="32MiB").generate(prompts, params)]
    before = sum(p.untyped_storage().nbytes() for p in double._model.parameters())
    freed = double.release_weights()
    assert freed > 0
    assert sum(p.untyped_storage().nbytes() for p in double._model.parameters()) < before - freed // 2
    assert double.release_weights() == 0, "once is enough"
    assert [a.token_ids for a in LLM(double, cache_memory="32MiB").generate(prompts, params)] == wanted
    assert [a.token_ids for a in LLM(checkpoint(name), **OPTIONS).generate(prompts, params)] == wanted


def test_a_weight_that_a_module_reads_by_itself_is_kept() -> None:
    model = build("gpt_neox")
    block = model.gpt_neox.layers[0]
    block.mlp.register_forward_hook(lambda module, args, out: out + module.dense_h_to_4h.weight.mean())
    served = TransformersModel("gpt_neox", model, True)
    assert served.release_weights() == 0
    assert torch.isfinite(block.mlp.dense_h_to_4h.weight).all()
