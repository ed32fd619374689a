"""A language model of characters, and the novel that it learns."""

import math
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence

import lltm_ops

# Jane Austen's Persuasion (1818), which is in the public domain.
NOVEL = Path(__file__).with_name("persuasion.txt")
NO_TARGET = -100  # cross_entropy leaves it out


def read_novel() -> str:
    """The novel on one line."""
    return re.sub(r"\s+", " ", NOVEL.read_text(encoding="utf-8")).strip()


def vocabulary_of(text: str) -> str:
    return "".join(sorted(set(text)))


def encode(text: str, vocabulary: str) -> Tensor:
    return torch.tensor([vocabulary.index(character) for character in text])


def sentences_of(text: str) -> list[str]:
    """Each ends with the space after it, so a model learns where a sentence ends."""
    return re.findall(r".+?[.!?]['\"]* (?=['\"]*[A-Z_])|.+$", text)


class CharLM(nn.Module):
    """Embedding, a recurrent layer and a linear one: logits of each next character."""

    def __init__(
        self,
        vocabulary_size: int,
        embedding_size: int,
        hidden_size: int,
        layer: type[nn.Module] = lltm_ops.LLTM,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding_size)
        self.rnn = layer(embedding_size, hidden_size, batch_first=True)
        self.head = nn.Linear(hidden_size, vocabulary_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(tokens))[0])


def packed(sentences: list[Tensor]) -> tuple[PackedSequence, Tensor]:
    """The sentences, and for each character the one after it."""
    longest_first = sorted(sentences, key=len, reverse=True)
    targets = pack_sequence([sentence[1:] for sentence in longest_first])
    return pack_sequence([sentence[:-1] for sentence in longest_first]), targets.data


def padded(sentences: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The same in a rectangle."""
    inputs = pad_sequence([sentence[:-1] for sentence in sentences], batch_first=True)
    targets = [sentence[1:] for sentence in sentences]
    return inputs, pad_sequence(targets, batch_first=True, padding_value=NO_TARGET)


def loss_of(model: nn.Module, inputs: Tensor | PackedSequence, targets: Tensor) -> Tensor:
    """The mean over the characters. Only a CharLM itself takes packed sentences."""
    if isinstance(inputs, PackedSequence):
        embedded = inputs._replace(data=model.embedding(inputs.data))
        logits = model.head(model.rnn(embedded)[0].data)
    else:
        logits = model(inputs).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=NO_TARGET)


@torch.no_grad()
def bits_per_character(model: CharLM, sentences: list[Tensor]) -> float:
    return loss_of(model, *packed(sentences)).item() / math.log(2)


@torch.no_grad()
def write(model: CharLM, vocabulary: str, beginning: str, length: int, temperature: float) -> str:
    """The beginning, and characters drawn one by one from what the model expects next."""
    generator = torch.Generator().manual_seed(0)
    tokens, state, text = encode(beginning, vocabulary), None, beginning
    while len(text) < length:
        output, state = model.rnn(model.embedding(tokens[None]), state)
        probabilities = torch.softmax(model.head(output[0, -1]) / temperature, dim=0)
        tokens = torch.multinomial(probabilities, 1, generator=generator)
        text += vocabulary[int(tokens)]
    return text
