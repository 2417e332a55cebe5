"""A small model embedded exactly in a larger one's shape: it costs what the large one costs and says what it said.

    python benchmarks/widen.py SOURCE OUT --shape llama2-7b --yarn 4        writes a checkpoint for `hspec run -m OUT`
    python benchmarks/widen.py SOURCE --shape llama2-7b --check             compares both models' logits in float32

SOURCE is what `hspec run -m` takes. Random weights of a size measure time but not acceptance; these measure both.

What is added is zero: hidden and ffn channels, heads, whole layers (which then add nothing to the residual stream).
What zeros would change is scaled back, small sizes in small letters:

* hidden d -> D dilutes the mean square of every norm: norm weights × sqrt(d/D), epsilon × d/D;
* head_dim h -> H = r h: rotary pair (j, j + h/2) goes to (r j, r j + H/2), where the frequency is the same; softmax
  divides by sqrt(H) instead of sqrt(h): query rows and bias × sqrt(r);
* norms of queries and keys share the model's epsilon: their projections × sqrt(r d/D) make it right again, then key
  norms × sqrt(1/r), while query norms keep the sqrt(r) that softmax wants;
* a query head needs its KV head in the group it is placed in, so KV heads are copied: 12/2 becomes 32/32 or 32/8;
* YaRN's ramp ends at whole rotary pairs, which r moves: its betas are set so that the same pairs are the ends.

In float32 the models differ by rounding alone. In bfloat16 a scale that is no power of two rounds its weights anew, by
up to 2^-9 each: there the wide model is its own reference, about as near to the float32 one as the small one is. A
draft must be yet another model; the small one itself would agree always.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hspec_decoding.cache import KVStore
from hspec_decoding.checkpoints import hub
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.checkpoints.files import CONFIG, GENERATION, INDEX, TOKENIZER_FILES, disk_free
from hspec_decoding.checkpoints.safetensors_file import PIECE, Stored, write_safetensors
from hspec_decoding.config import ModelConfig
from hspec_decoding.device import pick_device
from hspec_decoding.model import Decoder, Layer
from hspec_decoding.sequence import Text
from hspec_decoding.text.tokens import Tokenizer
from hspec_decoding.views import FullView
from hspec_offload.sizes import human, tensor_bytes
from hspec_profiles.errors import DoesNotFit, HspecError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
SHARD = 5_000_000_000  # bytes of a file, at most
DOCUMENT = Path(argparse.__file__)


# --- shapes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, in elements."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int

    @classmethod
    def of(cls, config: ModelConfig) -> Shape:
        """The sizes that a model has."""
        c = config
        return cls(c.hidden_size, c.layers, c.heads, c.kv_heads, c.head_dim, c.ffn_size)


LLAMA2_7B = Shape(4096, 32, 32, 32, 128, 11008)
SHAPES = {
    "llama2-7b": LLAMA2_7B,
    "llama2-13b": Shape(5120, 40, 40, 40, 128, 13824),
    "llama3-8b": Shape(4096, 32, 32, 8, 128, 14336),
}


def stretched(config: ModelConfig, factor: float, original: int | None = None) -> ModelConfig:
    """The model with its positions stretched by YaRN, from `original` tokens (by default its own length)."""
    kind = config.rope["rope_type"]
    if kind not in ("default", "yarn"):
        raise HspecError(f"YaRN would replace the model's own RoPE scaling, which is {kind}")
    if factor <= 1:
        raise HspecError(f"YaRN's factor must be more than 1: {factor:g}")
    original = original or int(config.rope.get("original_max_position_embeddings", config.max_positions))
    rope = {"rope_type": "yarn", "rope_theta": config.rope["rope_theta"], "factor": float(factor)}
    rope["original_max_position_embeddings"] = original
    return replace(config, rope=rope, max_positions=int(factor * original))


def widened(small: ModelConfig, shape: Shape) -> ModelConfig:
    """The config of `small` in `shape`. Raises HspecError for what cannot be embedded exactly."""
    have = Shape.of(small)
    for size in ("hidden", "layers", "heads", "ffn"):
        if getattr(shape, size) < getattr(have, size):
            raise HspecError(f"{size} cannot shrink from {getattr(have, size):,} to {getattr(shape, size):,}")
    ratio = shape.head_dim // small.head_dim
    if ratio * small.head_dim != shape.head_dim or ratio.bit_count() != 1:
        raise HspecError(
            f"head_dim must grow by a power of two, or rotary pairs find no equal: {small.head_dim} to {shape.head_dim}"
        )
    head_slots(small, shape)
    return replace(
        small,
        hidden_size=shape.hidden,
        ffn_size=shape.ffn,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        norm_eps=small.norm_eps * small.hidden_size / shape.hidden,
        rope=_spread_rope(small, ratio) if ratio > 1 else small.rope,
        windows=small.windows + small.windows[-1:] * (shape.layers - small.layers),
    )


def head_slots(small: ModelConfig, shape: Shape) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Which heads of the wide model hold which of the small one: (wide, small) pairs of query and of KV heads.

    Wide KV heads are taken in order, and each serves query heads that share one small KV head. Raises HspecError
    when there are too few.
    """
    if shape.heads % shape.kv_heads:
        raise HspecError(f"heads must be a multiple of KV heads: {shape.heads} and {shape.kv_heads}")
    group, room = small.heads // small.kv_heads, shape.heads // shape.kv_heads
    queries: list[tuple[int, int]] = []
    keys: list[tuple[int, int]] = []
    for head in range(small.heads):
        place = head % group % room
        if place == 0:
            keys.append((len(keys), head // group))
        queries.append(((len(keys) - 1) * room + place, head))
    if len(keys) > shape.kv_heads:
        raise HspecError(
            f"{small.heads} heads over {small.kv_heads} KV heads need {len(keys)} KV heads where each serves {room}: "
            f"{shape.kv_heads} are too few"
        )
    return queries, keys


def _spread_rope(small: ModelConfig, ratio: int) -> dict[str, Any]:
    """RoPE of heads `ratio` times as wide, whose pair ratio × j turns as the small one's pair j."""
    rope = dict(small.rope)
    kind = rope["rope_type"]
    if kind == "dynamic":
        raise HspecError("dynamic RoPE scaling depends on head_dim, which then cannot grow")
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            rope[name] = [factor for factor in rope[name] for _ in range(ratio)]
    if kind == "yarn":
        rope |= _spread_yarn(small)
    return rope


def _spread_yarn(small: ModelConfig) -> dict[str, Any]:
    """The betas whose ramp, untruncated, ends at the small model's rotary pairs wherever wider heads have them."""
    dim, rope = small.head_dim, small.rope
    theta, original = float(rope["rope_theta"]), float(rope["original_max_position_embeddings"])

    def pair(beta: float) -> float:
        return dim * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))

    low, high = pair(rope.get("beta_fast") or 32), pair(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)

    def beta(pair: float) -> float:
        return float(original / (2 * math.pi * theta ** (2 * pair / dim)))

    return {"beta_fast": beta(max(low, 0)), "beta_slow": beta(min(high, dim - 1)), "truncate": False}


# --- tensors -----------------------------------------------------------------------------------------------------


class Source(Protocol):
    """What is asked of a checkpoint."""

    @property
    def config(self) -> ModelConfig: ...

    def tensor(self, name: str) -> Tensor: ...

    def preflight(self) -> None: ...

    def expect(self, names: Iterable[str]) -> None: ...

    def release(self, names: Iterable[str]) -> None: ...


class Axis(NamedTuple):
    """One dimension of a wide tensor: its places `at` hold the small tensor's `of`, all others zero."""

    at: slice | Tensor
    of: slice | Tensor = slice(None)


class Widened:
    """A checkpoint, seen in a larger shape: to `Engine.load` and `load_decoder` it is one.

    `config` is the wide model's, `small` that of the model it agrees with: the source's, with YaRN if that is given.
    """

    def __init__(
        self,
        source: Source,
        shape: Shape,
        *,
        yarn: float | None = None,
        original: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Tensors are made when asked for, on `device` and in `dtype`: best those of the run, where memory is short.

        `yarn` and `original` are as in `stretched`. Raises HspecError for what cannot be embedded exactly.
        """
        self.source, self.dtype, self.device = source, dtype, torch.device(device)
        self.small = stretched(source.config, yarn, original) if yarn else source.config
        self.config = widened(self.small, shape)
        self.shapes, self._stored = self.config.tensors(), self.small.tensors()
        self._axes, self._scales = _axes(self.small, shape, self.device), _scales(self.small, shape)

    def preflight(self) -> None:
        """Raise HspecError unless the source holds every tensor in its shape."""
        self.source.preflight()

    def expect(self, names: Iterable[str]) -> None:
        """Have the source read ahead what will be asked for."""
        self.source.expect([name for name in names if name in self._stored])

    def release(self, names: Iterable[str]) -> None:
        """Let go of what the source keeps of these tensors, which have been used."""
        self.source.release([name for name in names if name in self._stored])

    def tensor(self, name: str) -> Tensor:
        """One tensor of the wide model: zeros, and in their places the source's values, scaled in float32."""
        if name not in self.shapes:
            raise HspecError(f"the wide model has no tensor `{name}`")
        wide = torch.zeros(self.shapes[name], dtype=self.dtype, device=self.device)
        if name not in self._stored:  # of a layer that is added
            return wide
        part = name.split(".")[-2]
        axes, scale = self._axes[part][: wide.dim()], self._scales.get(part, 1.0)
        small = self.source.tensor(name).to(self.device)[tuple(axis.of for axis in axes)]
        wide[tuple(axis.at for axis in axes)] = (small if scale == 1 else small.float() * scale).to(self.dtype)
        return wide


def _axes(small: ModelConfig, shape: Shape, device: torch.device) -> dict[str, tuple[Axis, ...]]:
    """Dimensions of each kind of tensor, rows first; a bias has the rows' alone."""
    dim, wide = small.head_dim, shape.head_dim
    ratio, half = wide // dim, dim // 2
    plain = list(range(dim))
    rotary = [ratio * (j % half) + wide // 2 * (j // half) for j in plain]

    def of_heads(slots: Sequence[tuple[int, int]], places: Sequence[int]) -> Axis:
        at = [to * wide + place for to, _ in slots for place in places]
        of = [head * dim + j for _, head in slots for j in plain]
        return Axis(torch.tensor(at, device=device), torch.tensor(of, device=device))

    queries, keys = head_slots(small, shape)
    hidden, ffn, vocabulary = Axis(slice(small.hidden_size)), Axis(slice(small.ffn_size)), Axis(slice(None))
    one_head, norm = (of_heads([(0, 0)], rotary),), (hidden,)
    return {
        "embed_tokens": (vocabulary, hidden),
        "lm_head": (vocabulary, hidden),
        "norm": norm,
        "input_layernorm": norm,
        "post_attention_layernorm": norm,
        "q_norm": one_head,
        "k_norm": one_head,
        "q_proj": (of_heads(queries, rotary), hidden),
        "k_proj": (of_heads(keys, rotary), hidden),
        "v_proj": (of_heads(keys, plain), hidden),
        "o_proj": (hidden, of_heads(queries, plain)),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
    }


def _scales(small: ModelConfig, shape: Shape) -> dict[str, float]:
    """Factors by kind of tensor; kinds that are not named keep their values."""
    ratio, share = shape.head_dim // small.head_dim, small.hidden_size / shape.hidden
    norms = dict.fromkeys(("norm", "input_layernorm", "post_attention_layernorm"), math.sqrt(share))
    if small.qk_norm:
        projections = dict.fromkeys(("q_proj", "k_proj"), math.sqrt(ratio * share))
        return {**norms, **projections, "k_norm": math.sqrt(1 / ratio)}
    return {**norms, "q_proj": math.sqrt(ratio)}


# --- the comparison ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """Logits of the small and the wide model: `agreeing` of `tokens` likeliest next tokens are the same."""

    tokens: int
    agreeing: int
    difference: float  # largest, absolute
    magnitude: float  # of the small model's largest logit

    def __str__(self) -> str:
        share = self.difference / self.magnitude
        return (
            f"{self.agreeing} of {self.tokens} likeliest next tokens agree, logits differ by at most "
            f"{self.difference:.2g} of {self.magnitude:.4g} ({share:.1g})"
        )


def compare(wide: Widened, tokens: Sequence[int], device: torch.device) -> Agreement:
    """Both models over one text, in float32. No more than a layer's weights and the embeddings are held at a time."""
    wanted = _logits(wide.source, wide.small, tokens, device)
    found = _logits(wide, wide.config, tokens, device)
    agreeing = int((found.argmax(-1) == wanted.argmax(-1)).sum())
    return Agreement(len(tokens), agreeing, float((found - wanted).abs().max()), float(wanted.abs().max()))


def _logits(source: Source, config: ModelConfig, tokens: Sequence[int], device: torch.device) -> Tensor:
    """Logits [T, V] after each token of a text."""
    shell = replace(config, layers=0, windows=())
    release = source.release
    model = Decoder(shell, source.tensor, dtype=torch.float32, device=device, context=len(tokens), release=release)
    model.config, model.layers = config, _LayerByLayer(source, config, device)
    store = KVStore(config, 1, len(tokens), dtype=torch.float32, device=device)
    memory = FullView(config, store, 1, 1).begin([Text(0, 0, [*tokens])], len(tokens))
    return model.logits(model.forward(torch.tensor([[*tokens]], device=device), memory)[0])


class _LayerByLayer(list[Layer]):
    """A decoder's layers, each read when its turn comes and then forgotten."""

    def __init__(self, source: Source, config: ModelConfig, device: torch.device) -> None:
        super().__init__()
        self._source, self._config, self._device = source, config, device

    def __iter__(self) -> Iterator[Layer]:
        for i in range(self._config.layers):
            yield self._read(f"model.layers.{i}.")

    def _read(self, at: str) -> Layer:
        """The layer as the only one of a decoder with nothing around it."""
        first = "model.layers.0."

        def read(name: str) -> Tensor:
            if not name.startswith(first):
                return torch.zeros(1, 1)
            return self._source.tensor(at + name.removeprefix(first))

        def release(names: Iterable[str]) -> None:
            self._source.release([at + name.removeprefix(first) for name in names if name.startswith(first)])

        one = replace(self._config, layers=1, windows=(None,), tied=True)
        made = Decoder(one, read, dtype=torch.float32, device=self._device, context=1, release=release)
        return made.layers[0]


# --- the file ----------------------------------------------------------------------------------------------------


def write(wide: Widened, source: Checkpoint, out: Path, say: Callable[[str], None]) -> None:
    """Write the wide model as a directory of safetensors with its config and the source's tokenizer files.

    Raises HspecError when `out` is there already, DoesNotFit when the disk is too small. Nothing half is left.
    """
    refuse_existing(out)
    nbytes = tensor_bytes(wide.shapes.values(), wide.dtype.itemsize)
    if nbytes > disk_free(out):
        raise DoesNotFit(f"`{out}` needs {human(nbytes)}, its disk has {human(disk_free(out))} free")
    unfinished = out.with_name(f"{out.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    unfinished.mkdir(parents=True)
    try:
        raw = config_json(source.raw, wide.config, wide.dtype)
        (unfinished / CONFIG).write_text(json.dumps(raw, indent=2), "utf-8")
        _write_shards(wide, unfinished, nbytes, say)
        for name in (GENERATION, *TOKENIZER_FILES):
            if (source.directory / name).exists():
                shutil.copyfile(source.directory / name, unfinished / name)
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def refuse_existing(out: Path) -> None:
    """Raise HspecError when there is something where a model is to be written."""
    if out.exists():
        raise HspecError(f"`{out}` is there already", "give a directory that does not exist yet")


def _write_shards(wide: Widened, directory: Path, nbytes: int, say: Callable[[str], None]) -> None:
    shards: list[list[Stored]] = [[]]
    for name, shape in wide.shapes.items():
        tensor = Stored(name, STORED[wide.dtype], shape, partial(_pieces, wide, name))
        if shards[-1] and sum(other.nbytes for other in shards[-1]) + tensor.nbytes > SHARD:
            shards.append([])
        shards[-1].append(tensor)
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        say(f"writing {file}, {human(sum(tensor.nbytes for tensor in shard))}")
        write_safetensors(directory / file, shard, lambda _: None)
        index |= dict.fromkeys((tensor.name for tensor in shard), file)
    listing = {"metadata": {"total_size": nbytes}, "weight_map": index}
    (directory / INDEX["safetensors"]).write_text(json.dumps(listing), "utf-8")


def _pieces(wide: Widened, name: str) -> Iterator[memoryview]:
    flat = wide.tensor(name).cpu().reshape(-1)
    step = PIECE // flat.element_size()
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step].view(torch.uint8).numpy().data
    wide.release([name])


def config_json(raw: Mapping[str, Any], config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The source's config.json with the wide model's numbers, from which `config` is read again."""
    old = ("auto_map", "rope_scaling", "rope_theta", "original_max_position_embeddings", "dtype")
    made = {name: value for name, value in raw.items() if name not in old} | {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_parameters": dict(config.rope),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if any(config.windows):
        made["layer_types"] = ["sliding_attention" if window else "full_attention" for window in config.windows]
    else:
        made.pop("layer_types", None)
    if ModelConfig.from_dict(made) != config:
        raise HspecError("the wide model's config.json would be read as another model's")
    return made


# --- the command -------------------------------------------------------------------------------------------------


def main() -> int:
    """Carry out the command line; 0, or the exit code of what failed."""
    options = read_options()
    try:
        return run(options)
    except HspecError as failure:
        print(f"error: {failure.message}", file=sys.stderr)
        if failure.hint:
            print(f"\nhint: {failure.hint}", file=sys.stderr)
        return failure.exit_code


def run(options: argparse.Namespace) -> int:
    """Compare, then write, as asked. Refuses what cannot be before weights are read."""
    if options.out is None and not options.check:
        raise HspecError("there is nothing to do", "give a directory to write to, `--check`, or both")
    if options.original and not options.yarn:
        raise HspecError("`--original` is the length that `--yarn` stretches, which is not given")
    if options.out:
        refuse_existing(options.out)
    config = ModelConfig.from_dict(hub.read_config(options.source, offline=options.offline, say=say))
    base = SHAPES[options.shape] if options.shape else Shape.of(config)
    given = {field.name: getattr(options, field.name) for field in fields(Shape)}
    shape = replace(base, **{name: size for name, size in given.items() if size is not None})
    widened(stretched(config, options.yarn, options.original) if options.yarn else config, shape)

    source = Checkpoint.open(hub.fetch(options.source, offline=options.offline, say=say))
    device = pick_device(options.device, [])
    if options.check and not check(
        Widened(source, shape, yarn=options.yarn, original=options.original, device=device), source, options
    ):
        return 1
    if options.out:
        dtype = DTYPES[options.dtype]
        wide = Widened(source, shape, yarn=options.yarn, original=options.original, dtype=dtype, device=device)
        wide.preflight()
        write(wide, source, options.out, say)
    return 0


def check(wide: Widened, source: Checkpoint, options: argparse.Namespace) -> bool:
    """Print how well the models agree over the first tokens of a text, and whether they do everywhere."""
    wide.preflight()
    tokenizer = Tokenizer.load(source.directory, source.generation)
    tokens = tokenizer.encode(options.text.read_text("utf-8"))[: options.tokens]
    agreement = compare(wide, tokens, wide.device)
    print(agreement)
    return agreement.agreeing == agreement.tokens


def say(line: str) -> None:
    print(line, file=sys.stderr)


def read_options() -> argparse.Namespace:
    about, _, _ = (__doc__ or "").partition("\n\nWhat is added")
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SOURCE", help="an alias, a directory, a GGUF file or a Hugging Face id")
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help="directory to write the wide model to")
    parser.add_argument("--shape", choices=SHAPES, help="sizes of a known model; by default the source's own")
    for field in fields(Shape):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, metavar="N", help="instead of the shape's")
    parser.add_argument("--yarn", type=float, metavar="FACTOR", help="stretch positions by this factor")
    parser.add_argument("--original", type=int, metavar="TOKENS", help="length YaRN stretches (default: the model's)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="type of what is written (%(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--offline", action="store_true", help="never use the network")
    parser.add_argument("--check", action="store_true", help="compare both models' logits in float32")
    parser.add_argument("--text", type=Path, default=DOCUMENT, help="what they are compared on (Python's argparse.py)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of it (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
