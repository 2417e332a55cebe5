"""From a checkpoint to a trained draft: what every training does, and what differs between the two kinds."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.chimera import files
from hspec_decoding.chimera.config import ChimeraConfig
from hspec_decoding.chimera.heads import Heads
from hspec_decoding.config import ModelConfig
from hspec_decoding.model import Decoder
from hspec_decoding.text.tokens import Tokenizer
from hspec_decoding.training import cost
from hspec_decoding.training.corpus import Corpus, Wanted, frequent, make, rows_for
from hspec_decoding.training.depths import Depths
from hspec_decoding.training.streaming import Streaming, draft_config
from hspec_decoding.training.target import SmallTarget, checksum
from hspec_decoding.training.texts import Turns
from hspec_decoding.training.trainer import Course, Listener, Recipe, Trainer, begun

RATE, RATED = 8e-4, 576  # learning rate of a hidden size; as that grows, one step of Adam moves a sum by more
PASSES = 5  # over the corpus, where neither steps nor minutes are given


@dataclass(frozen=True)
class Ask:
    """What to train with. Lengths in tokens; `work` holds text and states."""

    work: Path
    tokens: int
    length: int
    seed: int
    steps: int | None = None
    seconds: float | None = None
    rate: float | None = None
    bits: int = 16
    kind: str = ""  # what is trained, in a word

    def recipe(self, hidden: int, cut: cost.Cost) -> Recipe:
        """Steps that fit, or those of the training that was begun; where minutes are given, the clock ends it."""
        known = begun(self.work)
        rows, parts = (int(known.get("rows", cut.rows)), int(known.get("parts", cut.parts)))
        step = rows * parts * self.length
        steps = self.steps or max(1, (1000 if self.seconds else PASSES) * self.tokens // step)
        rate = self.rate or RATE * RATED / hidden
        return Recipe(steps, rows, parts, rate, self.seed, self.seconds, self.kind)


def load(checkpoint: Checkpoint, ask: Ask, dtype: torch.dtype, device: torch.device, vocabulary: int) -> Decoder:
    """The target, frozen; in NF4 where 4 bits are asked for."""
    checkpoint.preflight()
    return (SmallTarget if ask.bits == 4 else Decoder)(
        checkpoint.config,
        checkpoint.tensor,
        dtype=dtype,
        device=device,
        context=ask.length,
        vocabulary=min(vocabulary, checkpoint.config.vocab_size),
        release=checkpoint.release,
    )


def text_of(
    target: Decoder, tokenizer: Tokenizer, texts: Sequence[str], ask: Ask, tell: Callable[[int, int], None]
) -> Corpus:
    """The target's own text, as far as it is not there yet."""
    rows = rows_for(ask.work, target.config, ask.tokens, ask.length, target.dtype, target.device)
    joined = hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).hexdigest()[:16]
    wanted = Wanted(checksum(target), ask.tokens, rows, ask.length, ask.seed, joined)
    excerpts = [tokenizer.encode(text) for text in texts]
    return make(ask.work, wanted, target, Turns.of(tokenizer), excerpts, tell)


def depths(target: Decoder, corpus: Corpus, config: ChimeraConfig, always: frozenset[int], seed: int) -> Depths:
    """Heads that know nothing yet, for the tokens that the target says most."""
    vocabulary = frequent(corpus.counts(target.vocabulary), config.vocabulary, always)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Depths(files.made(config, vocabulary, target), target.vocabulary)


def streaming(target: Decoder, layers: int, seed: int) -> Streaming:
    """A draft model that knows nothing yet."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Streaming(draft_config(target.config, layers), target)


def chimera_student(config: ChimeraConfig) -> cost.Student:
    """Heads in numbers."""
    with torch.device("meta"):
        empty = torch.empty(0)
        made = Heads(config, torch.zeros(config.vocabulary, dtype=torch.int64), empty, empty)
    weights = sum(parameter.numel() for parameter in made.parameters())
    products = config.depths * (weights + config.hidden * config.vocabulary)
    return cost.Student(weights, products, config.vocabulary, config.heads)


def streaming_student(target: ModelConfig, layers: int) -> cost.Student:
    """A draft model in numbers."""
    made = ModelConfig.from_dict(draft_config(target, layers))
    inside = sum(math.prod(s) for n, s in made.tensors().items() if ".layers." in n)
    return cost.Student(
        inside, inside + 2 * target.hidden_size * target.vocab_size, target.vocab_size // 2, target.heads
    )


def train(
    student: Depths | Streaming, target: Decoder, corpus: Corpus, recipe: Recipe, ask: Ask, listener: Listener
) -> tuple[Course, str]:
    """Train to the end; how it went, and the target's checksum after it.

    Raises RuntimeError where the target is not what it was.
    """
    before = checksum(target)
    course = Trainer(student, target, corpus, recipe, ask.work).run(listener)
    after = checksum(target)
    if after != before:
        raise RuntimeError(f"training changed the target: {before} before, {after} after")
    return course, after
