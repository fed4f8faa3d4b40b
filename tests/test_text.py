"""Text as it comes: characters across tokens, stop strings across tokens, nothing past them."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from faircopy.model.loader import CLEANS_BPE
from faircopy.requests import RequestReader
from faircopy.testing import ByteTokenizer
from faircopy.text import IncrementalText

DECODE = ByteTokenizer().decode
WORDS = [
    "dog",
    "a",
    "n",
    "##n",
    "'",
    "##'",
    "t",
    "s",
    "ve",
    "re",
    "m",
    ".",
    ",",
    "?",
    "!",
    "##.",
    "sees",
    "n't",
    "##s",
    "ten",
]
PIECES = [
    "dog",
    "a",
    " ",
    "  ",
    "n",
    "'",
    " '",
    "t",
    "s",
    "ve",
    "re",
    "m",
    ".",
    " .",
    ",",
    " ,",
    " ?",
    " n't",
    "see",
    " 's",
]


def feed(text: IncrementalText, content: str) -> tuple[str, int]:
    """Byte by byte until it stops; all released pieces, and the number of bytes taken."""
    pieces, taken = [], 0
    for byte in content.encode():
        taken += 1
        stopped = text.push(byte)
        pieces.append(text.release())
        if stopped:
            break
    text.finish()
    return "".join([*pieces, text.release()]), taken


def test_a_character_of_several_tokens_appears_when_it_is_complete() -> None:
    text = IncrementalText(DECODE, [])
    pieces = []
    for byte in "aé€😀".encode():
        text.push(byte)
        pieces.append(text.release())
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀"]


def test_an_unfinished_character_is_released_at_the_end() -> None:
    text = IncrementalText(DECODE, [])
    text.push("é".encode()[0])
    assert text.release() == ""
    assert text.finish() == "\ufffd"
    assert text.release() == "\ufffd"


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_stop_string_to_be_completed(content: str, stops: list[str]) -> None:
    text = IncrementalText(DECODE, [], stops)
    released, taken = feed(text, content)
    for end in range(1, len(content) + 1):
        cuts = [content[:end].index(stop) for stop in stops if content[:end].endswith(stop)]
        if cuts:
            first = min(content[:end].find(stop, end - len(stop)) for stop in stops if content[:end].endswith(stop))
            assert (released, taken) == (content[:first], end)
            break
    else:
        assert released == content
    assert text.text == released


def test_what_may_become_a_stop_string_waits() -> None:
    text = IncrementalText(DECODE, [], ["END"])
    seen = []
    for byte in b"an END":
        text.push(byte)
        seen.append(text.release())
    assert seen == ["a", "n", " ", "", "", ""]
    assert text.text == "an "


def test_a_stop_string_before_the_minimum_does_not_count_later() -> None:
    text = IncrementalText(DECODE, [], ["b"])
    assert [text.push(byte, may_stop) for byte, may_stop in zip(b"abcb", (False, False, True, True), strict=True)] == [
        False, False, False, True,
    ]  # fmt: skip
    assert text.text == "abc"


def test_the_end_token_is_no_text() -> None:
    text = IncrementalText(DECODE, [65])
    for token in (66, 0):
        text.push(token)
    assert text.finish() == "B"


def test_random_bytes_read_as_they_do_at_once() -> None:
    source = random.Random(0)
    words = "".join(source.choice("aé€😀 \n") for _ in range(300))
    released, _ = feed(IncrementalText(DECODE, []), words)
    assert released == words


@cache
def cleaning_reader(kind: str) -> RequestReader:
    """Of a tokenizer that takes spaces out of decoded text."""
    if kind == "WordPiece":
        backend = Tokenizer(models.WordPiece({word: n for n, word in enumerate(["[UNK]", *WORDS])}, unk_token="[UNK]"))
        backend.decoder = decoders.WordPiece(cleanup=False)
    else:
        backend = Tokenizer(models.BPE({piece: n for n, piece in enumerate(["[UNK]", *PIECES])}, [], unk_token="[UNK]"))
        backend.decoder = decoders.Fuse()
    options = {CLEANS_BPE: kind == "BPE, cleaned"}
    return RequestReader(
        PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True, **options)
    )


CLEANED = pytest.mark.parametrize("kind", ["WordPiece", "BPE, cleaned", "BPE"])
TOKENS = st.lists(st.integers(1, len(PIECES)), max_size=30)


@CLEANED
@settings(max_examples=300)
@given(tokens=TOKENS)
def test_streamed_pieces_add_up_to_the_cleaned_text(kind: str, tokens: list[int]) -> None:
    reader = cleaning_reader(kind)
    assert reader.tokenizer is not None
    text, pieces = reader.text([]), []
    for token in tokens:
        text.push(token)
        pieces.append(text.release())
    whole = text.finish()
    assert "".join([*pieces, text.release()]) == whole == reader.decode(tokens)
    assert whole == reader.tokenizer.decode(tokens, skip_special_tokens=True)


@CLEANED
@settings(max_examples=200)
@given(tokens=TOKENS, stop=st.sampled_from(["dog.", "'s", "n't", " a", "dog dog", ".", "s,"]))
def test_a_stop_string_is_found_in_the_cleaned_text(kind: str, tokens: list[int], stop: str) -> None:
    """At the token with which it is complete, whatever may yet follow, and nothing of it is released before."""
    reader = cleaning_reader(kind)
    text, released = reader.text([], [stop]), ""
    for end, token in enumerate(tokens, 1):
        stopped = text.push(token)
        released += text.release()
        so_far = reader.decode(tokens[:end])
        assert stopped == (stop in so_far)
        if stopped:
            assert text.finish() == released == so_far[: so_far.index(stop)]
            return
    assert stop not in text.finish()


def test_cleaned_text_is_released_as_soon_as_nothing_can_change_it() -> None:
    reader = cleaning_reader("WordPiece")
    text, pieces = reader.text([]), []
    for word in ("dog", "sees", "a", "n", "'", "t", "s", "dog", "."):
        text.push(1 + WORDS.index(word))
        pieces.append(text.release())
    assert pieces == ["dog", " sees", " a", "", "", "", "", "n't s dog", ""]
    assert text.finish().endswith("n't s dog.")
