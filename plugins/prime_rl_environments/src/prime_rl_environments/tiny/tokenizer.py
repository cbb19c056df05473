"""A byte-level tokenizer for the Qwen3 renderer that keeps short prompts short.

It has 256 bytes and no merges: any text round-trips exactly, and offsets separate a message's body
from the template. A role line (``user`` and its newline) is one token instead of five to ten, so
the rendered prompt of a word has 6 tokens plus its letters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""The tokens that ``Qwen3Renderer`` looks up by name, in the order of their ids."""

ROLE_LINES = ("systemĊ", "userĊ", "assistantĊ")
"""The texts after ``<|im_start|>`` in the Qwen3 template. Ċ is a newline in byte-level
vocabularies."""

SPLIT = r"\A(?:system|assistant|user(?!\n\z))\n|\Auser(?=\n\z)"
"""A role line, at the start of the text between two special tokens. Before a tool's result the
renderer tokenizes ``user`` and the newline separately, so a chat template's text is split the same
way."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""For ``/v1/chat/completions``. Training uses the ``renderers`` package, which gives the same
tokens with thinking on and without tools."""


def build_tokenizer(phrases: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """9 special tokens, 3 role lines and 256 bytes (268 ids), then a token per phrase."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*SPECIAL_TOKENS, *ROLE_LINES, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in phrases])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
