"""Samples for language models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leyden.core.errors import ConfigurationError
from leyden.hf.loss import IGNORED


def encode_chat(processing_class: Any, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> dict[str, list[int]]:
    """Returns a conversation as a sample whose labels are the assistant's tokens.

    `DataCollatorForSeq2Seq` of transformers pads such samples, their labels with -100.

    Args:
        processing_class: a fast tokenizer with a chat template that marks what the assistant says by
            `{% generation %}` and `{% endgeneration %}`.
        messages: the messages, each with `role` and `content`.
        **kwargs: further arguments of `apply_chat_template`, such as `truncation=True, max_length=512` or `tools=`.

    Returns:
        `input_ids`, `attention_mask` and `labels`, of one length. Labels of all other tokens are -100.

    Raises:
        ConfigurationError: if no token of the assistant is marked.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"hi": 0, "hello": 1, "?": 2}, unk_token="?"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> template = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        >>> template += "{% endgeneration %}{% else %}{{ m.content + ' ' }}{% endif %}{% endfor %}"
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template)
        >>> said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
        >>> encode_chat(tokenizer, said)["labels"]
        [-100, 1]
    """
    if kwargs.get("return_tensors") or not all(isinstance(message, Mapping) for message in messages):
        raise ConfigurationError(
            "encode_chat takes one conversation, a list of messages, and returns lists, which a collator makes tensors "
            "of. Call it for each conversation, without return_tensors."
        )
    encoded = processing_class.apply_chat_template(
        list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **kwargs
    )
    ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
    if not any(mask):
        raise ConfigurationError(
            "encode_chat: no token of the assistant is marked. The conversation has none, truncation cut them off, "
            "or the tokenizer's chat template lacks {% generation %} and {% endgeneration %} around them."
        )
    labels = [token if said else IGNORED for token, said in zip(ids, mask, strict=True)]
    return {"input_ids": ids, "attention_mask": list(encoded["attention_mask"]), "labels": labels}
