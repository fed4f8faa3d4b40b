"""A byte-level BPE tokenizer trained from text, saved as a standard Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from faircopy.errors import CheckpointError

END, PAD = "<|end|>", "<|pad|>"

# The models only ever saw stories: turns are plain lines, and an answer is how the text goes on.
CHAT = "{{ bos_token }}{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"


def train_bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A tokenizer of exactly the given size (if the text is rich enough) that begins every text with the end token."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, end_id(tokenizer))]
    )
    return tokenizer


def end_id(tokenizer: Tokenizer) -> int:
    """The id of the token that begins and ends every text."""
    found = tokenizer.token_to_id(END)
    if found is None:
        raise CheckpointError("tokenizer", END, "not in the vocabulary", "pass a tokenizer that this recipe trained")
    return int(found)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
