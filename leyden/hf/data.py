"""Samples for language models: conversations, rows packed from documents, mixtures of data sets."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from leyden.core.checks import check_whole
from leyden.core.errors import ConfigurationError, kind_of
from leyden.data.seekable_shuffle import Permutation
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


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Rows of one length, each packed from several documents that do not see each other.

    Positions begin anew with each document. A model of transformers that gets `position_ids`, no `attention_mask` and
    `use_cache=False` (which HFModule passes) makes its mask from them, so the loss is that of the documents one by one,
    without their padding. The first token of a document is no label, because nothing predicts it.

    Documents are packed by size, the largest first, each into the fullest row that has room (best fit). Longer ones
    than a row are cut. The end of a row that no document fills is padded. Load the rows shuffled, because the first
    ones hold the longest documents.

    Args:
        documents: samples with `input_ids`, and `labels` if these are not the inputs themselves.
        length: the number of tokens in a row.
        lengths: the number of tokens in each document; read from all documents by default, which tokenizes a lazy
            data set twice.
        pad: the token at the end of rows.

    Raises:
        ConfigurationError: if there is no document, if `length` is below 2, or if `lengths` or labels do not fit the
            documents.

    Example:
        >>> packed = PackedDataset([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}], length=6)
        >>> row = packed[0]
        >>> row["input_ids"].tolist(), row["position_ids"].tolist(), row["labels"].tolist()
        ([5, 6, 7, 8, 9, 0], [0, 1, 2, 0, 1, 0], [-100, 6, 7, -100, 9, -100])
    """

    def __init__(
        self, documents: Sequence[Mapping[str, Any]], length: int, lengths: Sequence[int] | None = None, pad: int = 0
    ) -> None:
        if length < 2:
            raise ConfigurationError(f"PackedDataset(length={length}): a row needs at least 2 tokens.")
        if lengths is None:
            lengths = [len(documents[index]["input_ids"]) for index in range(len(documents))]
        if len(lengths) != len(documents):
            raise ConfigurationError(f"PackedDataset: {len(lengths)} lengths for {len(documents)} documents.")
        self.documents, self.length, self.pad, self._lengths = documents, length, pad, lengths
        pieces = [
            (index, start, min(length, size - start))
            for index, size in enumerate(lengths)
            for start in range(0, size, length)
        ]
        self._rows = _best_fit(pieces, length)
        if not self._rows:
            raise ConfigurationError("PackedDataset: the documents have no tokens.")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        for number, start, size in self._rows[index]:
            document = self.documents[number]
            tokens, own = document["input_ids"], document.get("labels", document["input_ids"])
            if not len(tokens) == len(own) == self._lengths[number]:
                raise ConfigurationError(
                    f"PackedDataset: document {number} has {len(tokens)} tokens and {len(own)} labels, and its length "
                    f"is given as {self._lengths[number]}."
                )
            tokens, own = (torch.as_tensor(part)[start : start + size].tolist() for part in (tokens, own))
            ids += tokens
            labels += [IGNORED, *own[1:]]
            positions += range(len(tokens))
        rest = self.length - len(ids)
        return {
            "input_ids": torch.tensor(ids + [self.pad] * rest),
            "labels": torch.tensor(labels + [IGNORED] * rest),
            "position_ids": torch.tensor(positions + list(range(rest))),
        }

    @property
    def fill(self) -> float:
        """The share of all tokens that are not padding."""
        return sum(size for row in self._rows for _, _, size in row) / (len(self._rows) * self.length)


Piece = tuple[int, int, int]
"""A part of a document: the document's index, the first token, and the number of tokens."""


def _best_fit(pieces: Sequence[Piece], length: int) -> list[list[Piece]]:
    """Packs pieces into rows, the largest piece first, each into the row with the least room that it fits into."""
    rows: list[list[Piece]] = []
    # The rows by their room, and the amounts of room that some row has, in order.
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -piece[2]):
        size = piece[2]
        place = bisect.bisect_left(rooms, size)
        if place == len(rooms):
            row, room = len(rows), length
            rows.append([])
        else:
            room = rooms[place]
            row = by_room[room].pop()
            if not by_room[room]:
                rooms.pop(place)
        rows[row].append(piece)
        if room - size:
            if not by_room.setdefault(room - size, []):
                bisect.insort(rooms, room - size)
            by_room[room - size].append(row)
    return rows


class MixedDataset(Dataset[Any]):
    """Samples from several data sets, in fixed proportions everywhere.

    The order consists of blocks. Each block takes the same number of samples from each source, in an order that is a
    function of (seed, block), so a mixture is exact over any long part of the data, and a resume reaches any position
    at once. A source is read in a shuffled order, and in another one each time that it starts over.

    Load it without shuffling: it is shuffled. Every pass has the same order, so pass `length` for more than one.

    Args:
        sources: the data sets, or data sets by name.
        weights: the share of each source, or its share by name; they need not sum to 1. Default: by size.
        seed: chooses the order.
        length: the number of samples, at least 1. Default: as many as there are before a source starts over.
        block_size: the number of samples in a block, at least 1. Shares are rounded to this fraction.

    Raises:
        ConfigurationError: if a source is empty, if weights are negative or sum to 0, or if a share is so small that a
            block holds no sample of its source.

    Example:
        >>> mixed = MixedDataset({"a": range(0, 90), "b": range(100, 110)}, weights={"a": 3, "b": 1}, block_size=4)
        >>> len(mixed), mixed.counts(40)
        (43, {'a': 30, 'b': 10})
        >>> sum(sample >= 100 for sample in (mixed[i] for i in range(4)))
        1
    """

    def __init__(
        self,
        sources: Sequence[Any] | Mapping[str, Any],
        weights: Sequence[float] | Mapping[str, float] | None = None,
        *,
        seed: int = 0,
        length: int | None = None,
        block_size: int = 1000,
    ) -> None:
        check_whole("MixedDataset", 1, block_size=block_size, **({} if length is None else {"length": length}))
        items = sources.items() if isinstance(sources, Mapping) else enumerate(sources)
        named = {str(name): source for name, source in items}
        if not named:
            raise ConfigurationError("MixedDataset: there is no source.")
        for name, source in named.items():
            if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
                raise ConfigurationError(
                    f"MixedDataset: the source {name!r} is {kind_of(source)}, and must have a length and be read by "
                    "index."
                )
            if not len(source):
                raise ConfigurationError(f"MixedDataset: the source {name!r} is empty. Leave it out.")
        self.sources, self.seed, self.block_size = named, seed, block_size
        self._takes = _shares(named, weights, block_size)
        names = list(named)
        self._plain = [names.index(name) for name, count in self._takes.items() for _ in range(count)]
        self._block: tuple[int, list[tuple[str, int]]] = (-1, [])
        self._orders: dict[tuple[str, int], Permutation] = {}
        self._length = self._until_one_starts_over() if length is None else length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        name, number = self._place(index)
        source = self.sources[name]
        turn, place = divmod(number, len(source))
        return source[int(self._order(name, turn)(torch.tensor([place])))]

    def source_of(self, index: int) -> str:
        """Returns the name of the source of a sample."""
        return self._place(index)[0]

    def counts(self, samples: int) -> dict[str, int]:
        """Returns how many of the first samples are from each source."""
        block, rest = divmod(samples, self.block_size)
        found = {name: block * take for name, take in self._takes.items()}
        for name, _ in self._places(block)[:rest] if rest else ():
            found[name] += 1
        return found

    def _place(self, index: int) -> tuple[str, int]:
        """Returns the source of a sample, and the sample's number among all samples of that source."""
        index = operator.index(index)
        if not -self._length <= index < self._length:
            raise IndexError(index)
        block, offset = divmod(index % self._length, self.block_size)
        name, number = self._places(block)[offset]
        return name, block * self._takes[name] + number

    def _places(self, block: int) -> list[tuple[str, int]]:
        """Returns for each place in a block its source, and the number of earlier places of that source."""
        if self._block[0] != block:
            order = Permutation(self.block_size, self.seed, block)(torch.arange(self.block_size)).tolist()
            names, seen, places = list(self.sources), dict.fromkeys(self.sources, 0), []
            for position in order:
                name = names[self._plain[position]]
                places.append((name, seen[name]))
                seen[name] += 1
            self._block = block, places
        return self._block[1]

    def _order(self, name: str, turn: int) -> Permutation:
        if (name, turn) not in self._orders:
            number = list(self.sources).index(name)
            self._orders = {key: order for key, order in self._orders.items() if key[0] != name}
            self._orders[name, turn] = Permutation(len(self.sources[name]), self.seed + number + 1, turn)
        return self._orders[name, turn]

    def _until_one_starts_over(self) -> int:
        blocks = min(len(source) // self._takes[name] for name, source in self.sources.items() if self._takes[name])
        left = {name: len(source) - blocks * self._takes[name] for name, source in self.sources.items()}
        rest = next((i for i, (name, number) in enumerate(self._places(blocks)) if number >= left[name]), 0)
        return blocks * self.block_size + rest

    def __getstate__(self) -> dict[str, Any]:
        """Workers compute orders again, rather than receive them."""
        return {**vars(self), "_block": (-1, []), "_orders": {}}


def _shares(
    sources: Mapping[str, Any], weights: Sequence[float] | Mapping[str, float] | None, block_size: int
) -> dict[str, int]:
    """Returns the number of samples of each source in a block, by largest remainders."""
    if weights is None:
        given = {name: float(len(source)) for name, source in sources.items()}
    elif isinstance(weights, Mapping):
        given = {str(name): float(weight) for name, weight in weights.items()}
    else:
        given = dict(zip(sources, map(float, weights), strict=False)) if len(weights) == len(sources) else {}
    if given.keys() != sources.keys():
        raise ConfigurationError(
            f"MixedDataset: weights are for {', '.join(map(str, given)) or len(weights or ())}, and the sources are "
            f"{', '.join(sources)}. Give one for each."
        )
    total = sum(given.values())
    if not all(weight >= 0 for weight in given.values()) or not 0 < total < math.inf:
        raise ConfigurationError(
            f"MixedDataset: weights {list(given.values())} need a sum above 0, and no negative one."
        )
    exact = {name: weight / total * block_size for name, weight in given.items()}
    takes = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(sources, key=lambda name: takes[name] - exact[name])
    for name in by_remainder[: block_size - sum(takes.values())]:
        takes[name] += 1
    lost = [name for name in sources if given[name] and not takes[name]]
    if lost:
        raise ConfigurationError(
            f"MixedDataset: a block of {block_size} samples has none of {', '.join(lost)}. Raise block_size, or give "
            "weights."
        )
    return takes


class LengthGroupedSampler(Sampler[int]):
    """Shuffles, but keeps samples of similar lengths together, so that batches need little padding.

    Groups of 50 batches are drawn at random, and sorted within, the longest first. The very first sample is one of the
    longest of all, so that memory runs out at once or never. The order is a function of (seed, epoch): `trainer.fit`
    calls `set_epoch`. transformers' Trainer has the same as `train_sampling_strategy="group_by_length"`.

    Args:
        lengths: the length of each sample.
        batch_size: the number of samples in a batch over all ranks.
        seed: chooses the order together with the epoch.

    Raises:
        ConfigurationError: if `batch_size` is below 1.

    Example:
        >>> sampler = LengthGroupedSampler([3, 9, 4, 8], batch_size=2)
        >>> list(sampler)
        [1, 3, 2, 0]
    """

    GROUP = 50
    """Batches that are sorted together."""

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int = 0) -> None:
        if batch_size < 1:
            raise ConfigurationError(f"LengthGroupedSampler(batch_size={batch_size}): use a whole number above 0.")
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        count, size = len(self.lengths), self.GROUP * self.batch_size
        order = Permutation(count, self.seed, self.epoch)(torch.arange(count)).tolist()
        groups = [
            sorted(order[i : i + size], key=lambda index: int(self.lengths[index]), reverse=True)
            for i in range(0, count, size)
        ]
        if groups:
            longest = max(groups, key=lambda group: int(self.lengths[group[0]]))
            groups[0][0], longest[0] = longest[0], groups[0][0]
        return itertools.chain.from_iterable(groups)
