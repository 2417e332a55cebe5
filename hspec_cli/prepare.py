"""From the request to what the engine takes: models on disk, tokens of the prompt, room for the answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hspec_cli.progress import Progress
from hspec_cli.voice import Voice
from hspec_cli.words import as_text
from hspec_decoding.checkpoints import hub
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.checkpoints.files import GENERATION, read_json
from hspec_decoding.chimera.files import place
from hspec_decoding.config import ModelConfig
from hspec_decoding.device import pick_device
from hspec_decoding.sampling import Sampling
from hspec_decoding.text.chat_template import Message
from hspec_decoding.text.tokens import Tokenizer
from hspec_profiles.errors import DoesNotFit, HspecError, UsageError

if TYPE_CHECKING:
    from hspec_cli.run import Run

DEFAULT_TOKENS = 512


@dataclass(frozen=True)
class Job:
    """One answer to give, or many by the same models. Lengths in tokens."""

    target: Checkpoint
    draft: Checkpoint | None
    draft_name: str | None
    tokenizer: Tokenizer
    prompt: tuple[int, ...]  # empty where many are yet to come
    max_tokens: int
    context: int  # what the engine makes room for
    shortened: bool  # the context leaves less than was asked for
    sampling: Sampling


def prepare(run: Run, text: str, voice: Voice, progress: Progress) -> Job:
    """Everything but the weights. Raises HspecError for what can be known before any of them is read."""
    found = find(run, voice, progress)
    prompt = found.tokens(run, text, voice)
    return found.job(run, prompt, room(run, len(prompt), found.config.context, voice), voice)


def find(run: Run, voice: Voice, progress: Progress) -> Found:
    """The models of a run. Raises HspecError."""
    pick_device(run.device, [])
    files = Files(run.offline, run.trust_remote_code, voice, progress)
    config = files.config(run.model)
    if run.uses_chimera:
        place(Path(run.heads).expanduser() if run.heads else None, config, run.model)
    draft = find_draft(run, files)
    return Found(config, files.model(run.model), draft)


@dataclass(frozen=True)
class Found:
    """The models of a run on disk, before their weights are looked at."""

    config: ModelConfig
    target: Model
    draft: Model | None

    def tokens(self, run: Run, prompt: str | Sequence[Message], voice: Voice) -> tuple[int, ...]:
        """Ids of a prompt, or of what was said so far. Raises HspecError where the model lacks one of them."""
        ids = tuple(encode(run, prompt, self.target.tokenizer, voice))
        if max(ids, default=0) >= self.config.vocab_size:
            raise HspecError(
                f"the tokenizer in `{self.target.directory}` has {self.target.tokenizer.size:,} tokens, the model's "
                f"embedding {self.config.vocab_size:,}: the prompt needs token {max(ids)}",
                "tokenizer and weights belong to different models",
            )
        return ids

    def job(self, run: Run, prompt: tuple[int, ...], lengths: tuple[int, int, bool], voice: Voice) -> Job:
        """What to do, `lengths` as from `room`, with checked checkpoints. Raises HspecError."""
        max_tokens, context, shortened = lengths
        checked = open_draft(run, self.draft, self.target, voice) if self.draft else None
        return Job(
            target=self.target.open(),
            draft=checked,
            draft_name=self.draft.name if self.draft and checked else None,
            tokenizer=self.target.tokenizer,
            prompt=prompt,
            max_tokens=max_tokens,
            context=context,
            shortened=shortened,
            sampling=sampling(run, self.target.generation, voice),
        )


@dataclass(frozen=True)
class Files:
    """Where models come from."""

    offline: bool
    trust_remote_code: bool
    voice: Voice
    progress: Progress

    def config(self, name: str) -> ModelConfig:
        """The configuration of a model, refused by name when it is of a kind that cannot run."""
        raw = hub.read_config(name, offline=self.offline, trust_remote_code=self.trust_remote_code, say=self.voice.note)
        return ModelConfig.from_dict(raw)

    def model(self, name: str) -> Model:
        """The model's directory, downloaded or converted if need be, and its tokenizer."""
        directory = hub.fetch(
            name,
            offline=self.offline,
            trust_remote_code=self.trust_remote_code,
            say=self.voice.note,
            progress=lambda done, total: self.progress.update("bytes brought", done, total),
        )
        path = directory / GENERATION
        generation = read_json(path) if path.exists() else {}
        return Model(name, directory, generation, Tokenizer.load(directory, generation))


@dataclass(frozen=True)
class Model:
    """A model on disk, before its weights are looked at."""

    name: str
    directory: Path
    generation: Mapping[str, Any]
    tokenizer: Tokenizer

    def open(self, target: Model | None = None) -> Checkpoint:
        """The checked checkpoint: every tensor is there, in the right shape; none is read. Some may be the target's."""
        checkpoint = Checkpoint.open(self.directory)
        if target is not None:
            checkpoint = checkpoint.lent(Checkpoint.open(target.directory))
        checkpoint.preflight()
        return checkpoint


def find_draft(run: Run, files: Files) -> Model | None:
    """The draft model that was asked for, which must be there, else the alias's own, else None; a note says why."""
    known = hub.alias(run.model)
    name = run.draft_model or (known.draft if known else None)
    if name is None or name == "none":
        return None
    if not run.uses_draft:
        if run.draft_model:
            files.voice.note("`--draft-model` changes nothing: these levels have no draft")
        return None
    with _draft_may_fail(run, files.voice):
        files.config(name)
        return files.model(name)
    return None


def open_draft(run: Run, draft: Model, target: Model, voice: Voice) -> Checkpoint | None:
    """The draft's checked checkpoint, if its vocabulary is the target's; else as `find_draft`."""
    with _draft_may_fail(run, voice):
        different = target.tokenizer.difference(draft.tokenizer)
        if different:
            raise HspecError(
                f"the draft model `{draft.name}` has another vocabulary than `{target.name}`: {different}",
                "a draft must share the target's tokenizer; `--draft-model none` does without one",
            )
        return draft.open(target)
    return None


@contextmanager
def _draft_may_fail(run: Run, voice: Voice) -> Iterator[None]:
    """A draft model that nobody asked for is done without, with a note."""
    try:
        yield
    except HspecError as failure:
        if run.draft_model:
            raise
        voice.note(f"no draft model: {failure.message}")


def encode(run: Run, text: str | Sequence[Message], tokenizer: Tokenizer, voice: Voice) -> list[int]:
    """Ids of the prompt: in the chat template, or as it is under `--raw` and where the model has none.

    Raises UsageError for messages without a template.
    """
    system = None if run.system is None else as_text(run.system)
    if not isinstance(text, str):
        if run.raw:
            raise UsageError("`messages` need the chat template that `--raw` turns off", "give a `prompt`")
        alone = system is None or text[0]["role"] == "system"
        return tokenizer.converse(text if alone else [{"role": "system", "content": system or ""}, *text])
    if tokenizer.has_chat and not run.raw:
        return tokenizer.chat(text, system)
    if not run.raw:
        put = ", the system prompt before it" if system else ""
        voice.note(f"the model has no chat template: it continues the prompt as it is{put}")
    return tokenizer.encode(f"{system}\n\n{text}" if system else text)


def room(run: Run, prompt: int, usable: int, voice: Voice) -> tuple[int, int, bool]:
    """(tokens to generate, context, whether the first is less than was asked for).

    `prompt` and `usable` in tokens: the length of the prompt and what the model's positions reach. Raises
    DoesNotFit with both numbers when the prompt leaves no room; nothing of a prompt is ever dropped.
    """
    if run.ctx is not None and run.ctx > usable:
        raise DoesNotFit(
            f"`--ctx` asks for {run.ctx:,} tokens, `{run.model}` holds {usable:,}",
            f"`--ctx {usable}` is the most",
        )
    window = run.ctx or usable
    if prompt >= window:
        what = "the plan" if run.plan else "`--ctx`" if run.ctx else f"the context of `{run.model}`"
        more = (
            f"`--ctx` goes up to {usable}" if usable > prompt else "shorten the prompt or use a model with more context"
        )
        raise DoesNotFit(f"the prompt is {prompt:,} tokens, {what} holds {window:,}", more)
    wanted, left = run.max_tokens or DEFAULT_TOKENS, window - prompt
    tokens = min(wanted, left)
    if wanted > left:
        voice.note(
            f"the answer can have at most {left:,} tokens instead of {wanted:,}: "
            f"with the prompt's {prompt:,} they fill the context of {window:,}"
        )
    return tokens, run.ctx or prompt + tokens, wanted > left


def key(name: str | int | None) -> int:
    """What keys the randomness of a text of this name; 0 without one."""
    if name is None:
        return 0
    return int.from_bytes(hashlib.sha256(str(name).encode("utf-8", "surrogatepass")).digest()[:8]) >> 1


def sampling(run: Run, generation: Mapping[str, Any], voice: Voice) -> Sampling:
    """Flags first, then the model's generation config where that samples at all, else greedy."""
    defaults = generation if generation.get("do_sample") else {}

    def pick(flag: float | None, key: str, otherwise: float) -> float:
        default = defaults.get(key)
        return flag if flag is not None else float(otherwise if default is None else default)

    asked = [name for name in ("top_p", "top_k", "min_p") if getattr(run, name) is not None]
    temperature = pick(run.temperature, "temperature", 1.0 if defaults else 0.0)
    top_p = pick(run.top_p, "top_p", 1.0)
    result = Sampling(
        temperature=temperature if top_p else 0.0,  # no mass at all leaves the likeliest token
        top_p=top_p or 1.0,
        top_k=int(pick(run.top_k, "top_k", 0)),
        min_p=pick(run.min_p, "min_p", 0.0),
        seed=run.seed,
    )
    if temperature == 0 and asked:
        flags = ", ".join(f"`--{name.replace('_', '-')}`" for name in asked)
        voice.note(f"{flags} changes nothing at temperature 0; `--temp 0.8` samples")
    return result
