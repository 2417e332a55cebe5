"""Widening: the wide model says what the small one says, in every family, in memory and from its files."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import tiny_engine
import tiny_gguf
import tiny_models
import torch
from tiny_engine import CPU, scores
from torch import Tensor

from benchmarks import widen
from benchmarks.widen import SHAPES, Shape, Widened, compare, head_slots, stretched, widened
from hspec_cli.main import main as hspec
from hspec_decoding.checkpoints import hub
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.config import ModelConfig
from hspec_decoding.engine import Engine, Request, Settings
from hspec_decoding.model import Decoder
from hspec_decoding.rope import frequencies
from hspec_decoding.text.tokens import Tokenizer
from hspec_profiles.errors import HspecError

LENGTH = 100  # tokens of the texts scored: longer than the windows and than the original length of the RoPE kinds
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, all kv heads": ("llama", {"num_key_value_heads": 4}),
    "llama, every bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, large eps": ("llama", {"rms_norm_eps": 0.1}),
    "mistral, window": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied, yarn": ("qwen2", {"tie_word_embeddings": True, **tiny_engine.rope_shape("yarn")}),
    "qwen2, window": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3": ("qwen3", {}),
    "qwen3, large eps, bias": ("qwen3", {"rms_norm_eps": 0.1, "attention_bias": True}),
    **{f"rope: {kind}": ("llama", tiny_engine.rope_shape(kind)) for kind in tiny_engine.ROPES if kind != "dynamic"},
}
LARGER: dict[str, Callable[[Shape], Shape]] = {  # by what the small one has
    "hidden": lambda s: replace(s, hidden=104),
    "layers": lambda s: replace(s, layers=s.layers + 2),
    "ffn": lambda s: replace(s, ffn=s.ffn + 40),
    "heads, all kv heads": lambda s: replace(s, heads=13, kv_heads=13),
    "heads, grouped by 2": lambda s: replace(s, heads=12, kv_heads=6),
    "heads, larger groups": lambda s: replace(s, heads=8 * s.kv_heads),
    "head_dim x 2": lambda s: replace(s, head_dim=2 * s.head_dim),
    "head_dim x 4": lambda s: replace(s, head_dim=4 * s.head_dim),
    "all": lambda s: Shape(160, s.layers + 1, 16, 8, 2 * s.head_dim, 200),
}


class Dictionary:
    """A checkpoint in memory, which notes what it is asked to let go."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
        self.config, self.tensors = config, tensors
        self.released: list[str] = []
        self.checked = 0

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def preflight(self) -> None:
        self.checked += 1

    def release(self, names: Iterable[str]) -> None:
        self.released += [name for name in names if self.tensors[name] is not None]


def dictionary(family: str = "llama", **overrides: Any) -> Dictionary:
    config = tiny_engine.config(family, **overrides)
    return Dictionary(config, tiny_engine.weights(config, 5))


def decoder(source: Dictionary | Widened | Checkpoint, config: ModelConfig | None = None) -> Decoder:
    return Decoder(config or source.config, source.tensor, dtype=torch.float32, device=CPU, context=LENGTH)


def difference(found: Tensor, wanted: Tensor) -> float:
    """Largest, relative to the largest logit; infinite where another token is the likeliest."""
    if not torch.equal(found.argmax(-1), wanted.argmax(-1)):
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max())


SIZES = list(LARGER)
GRID = [(kind, size) for kind in MODELS for size in SIZES]
FEW = {(kind, SIZES[(n + step) % len(SIZES)]) for n, kind in enumerate(MODELS) for step in (0, 4)}


@pytest.mark.parametrize(
    ("kind", "size"), [pytest.param(*case, marks=[pytest.mark.long] * (case not in FEW)) for case in GRID]
)
def test_the_wide_model_says_what_the_small_one_says(kind: str, size: str) -> None:
    """Whole and in pieces, in float32; every kind and every size here, every pair in the long run."""
    family, overrides = MODELS[kind]
    source = dictionary(family, **overrides)
    shape = LARGER[size](Shape.of(source.config))
    wide = Widened(source, shape)
    assert Shape.of(wide.config) == shape
    tokens = tiny_engine.prompt(LENGTH)
    wanted = scores(decoder(source), tokens, [])
    for pieces in ([], [37, 1, 23, 8, 1]):
        assert difference(scores(decoder(wide), tokens, pieces), wanted) <= 1e-4


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_yarn_may_be_given(kind: str, ratio: int) -> None:
    """The wide model agrees with the small one as YaRN stretches it, beyond the original length too."""
    source = dictionary(kind, max_position_embeddings=48)
    shape = replace(Shape.of(source.config), hidden=100, head_dim=ratio * source.config.head_dim)
    wide = Widened(source, shape, yarn=4)
    assert wide.small == stretched(source.config, 4)
    assert (wide.config.context, wide.config.max_positions) == (192, 192)
    tokens = tiny_engine.prompt(LENGTH)
    wanted = scores(decoder(source, wide.small), tokens, [])
    assert difference(scores(decoder(wide), tokens, []), wanted) <= 1e-4
    assert difference(scores(decoder(source), tokens, []), wanted) > 1e-2


@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("theta", [50.0, 1e4, 1e6])
@pytest.mark.parametrize("original", [8, 100, 4096, 32_768])
@pytest.mark.parametrize("betas", [{}, {"beta_fast": 16, "beta_slow": 2}, {"beta_fast": 3.0, "beta_slow": 2.9}])
@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_frequencies_are_found_at_the_spread_pairs(
    dim: int, theta: float, original: int, betas: dict[str, float], truncate: bool
) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original, "rope_theta": theta}
    rope |= {**betas, "truncate": truncate}
    small = tiny_engine.config(head_dim=dim, rope_parameters=rope, max_position_embeddings=4 * original)
    wanted, factor = frequencies(small, 64)
    for ratio in (2, 4):
        wide = widened(small, replace(Shape.of(small), head_dim=ratio * dim))
        found, same = frequencies(wide, 64)
        assert same == factor
        assert torch.allclose(found[::ratio], wanted, rtol=1e-6, atol=0)


def test_heads_stand_beside_their_keys() -> None:
    """12 query heads over 2 KV heads, as Qwen2.5-1.5B has them, in Llama's shapes."""
    small = tiny_engine.config(num_attention_heads=12, num_key_value_heads=2, head_dim=16)
    queries, keys = head_slots(small, SHAPES["llama2-7b"])
    assert queries == [(i, i) for i in range(12)]
    assert keys == [(i, i // 6) for i in range(12)]
    queries, keys = head_slots(small, SHAPES["llama3-8b"])
    assert [to for to, _ in queries] == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13]
    assert keys == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_what_is_added_is_zero() -> None:
    source = dictionary("qwen2")
    wide = Widened(source, replace(Shape.of(source.config), hidden=80, layers=4, heads=8, ffn=128))
    assert not wide.tensor("model.embed_tokens.weight")[:, 64:].any()
    assert not wide.tensor("model.layers.0.input_layernorm.weight")[64:].any()
    assert not wide.tensor("model.layers.0.mlp.down_proj.weight")[:, 96:].any()
    assert not wide.tensor("model.layers.0.self_attn.q_proj.bias").view(8, 16)[[3, 7]].any()
    assert not wide.tensor("model.layers.3.self_attn.o_proj.weight").any()
    assert not wide.tensor("model.layers.3.mlp.down_proj.weight").any()


def test_scales_that_are_powers_of_two_are_exact_in_bfloat16() -> None:
    """Nothing is rounded but by the source's own dtype, in which tensors then come too."""
    config = tiny_engine.config("qwen2")
    source = Dictionary(config, {name: t.bfloat16() for name, t in tiny_engine.weights(config).items()})
    shape = replace(Shape.of(config), hidden=256, head_dim=64)
    exact, rounded = Widened(source, shape), Widened(source, shape, dtype=torch.bfloat16)
    for name in exact.shapes:
        assert rounded.tensor(name).dtype == torch.bfloat16
        assert torch.equal(exact.tensor(name), rounded.tensor(name).float()), name


def test_it_is_used_as_a_checkpoint() -> None:
    """The engine loads it: it is checked first, and lets go of what was read, of the source's tensors only."""
    source = dictionary("qwen2", tie_word_embeddings=True)
    wide = Widened(source, Shape(96, 5, 8, 8, 16, 128))
    settings = Settings(method="autoregressive", device="cpu", dtype="float32")
    request = Request(tiny_engine.prompt(40), 30)
    found = tiny_engine.answer(Engine.load(cast(Checkpoint, wide), None, settings, 100), request)
    assert source.checked == 1
    assert sorted(source.released) == sorted(source.tensors)
    assert found == tiny_engine.answer(Engine.load(cast(Checkpoint, source), None, settings, 100), request)
    with pytest.raises(HspecError, match=r"no tensor `model\.layers\.5\.mlp\.up_proj\.weight`"):
        wide.tensor("model.layers.5.mlp.up_proj.weight")


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_same() -> None:
    source = dictionary("qwen3", attention_bias=True)
    shape = Shape(160, 4, 16, 8, 64, 200)
    here, there = Widened(source, shape), Widened(source, shape, device="cuda")
    for name in here.shapes:
        made = there.tensor(name)
        assert made.is_cuda
        assert torch.equal(made.cpu(), here.tensor(name)), name


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "hidden": ({}, {"hidden": 48}, "hidden cannot shrink from 64 to 48"),
    "layers": ({}, {"layers": 2}, "layers cannot shrink from 3 to 2"),
    "ffn": ({}, {"ffn": 95}, "ffn cannot shrink"),
    "heads": ({}, {"heads": 2}, "heads cannot shrink"),
    "narrow heads": ({}, {"head_dim": 8}, "power of two, .*: 16 to 8"),
    "heads x 3": ({}, {"head_dim": 48}, "power of two"),
    "heads x 1.5": ({}, {"head_dim": 24}, "power of two"),
    "groups": ({}, {"heads": 6, "kv_heads": 4}, "multiple of KV heads: 6 and 4"),
    "few groups": ({}, {"heads": 8, "kv_heads": 1}, "4 heads over 2 KV heads need 2 KV heads where each serves 8: 1"),
    "dynamic": (tiny_engine.rope_shape("dynamic"), {"head_dim": 32}, "dynamic RoPE scaling depends on head_dim"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_exact_is_refused(case: str) -> None:
    overrides, sizes, message = REFUSALS[case]
    small = tiny_engine.config(**overrides)
    shape = replace(Shape.of(small), **sizes)
    with pytest.raises(HspecError, match=message):
        widened(small, shape)


def test_yarn_is_refused() -> None:
    with pytest.raises(HspecError, match="own RoPE scaling, which is llama3"):
        stretched(tiny_engine.config(**tiny_engine.rope_shape("llama3")), 4)
    with pytest.raises(HspecError, match="factor must be more than 1: 1"):
        stretched(tiny_engine.config(), 1)


# --- files and the command ---------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Carries out a command line; the conversion of GGUF files goes to a place of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def carry_out(*words: object) -> int:
        monkeypatch.setattr("sys.argv", ["widen.py", "--device", "cpu", "--offline", *map(str, words)])
        return widen.main()

    return carry_out


WIDER = ("--hidden", 104, "--layers", 6, "--heads", 8, "--kv-heads", 8, "--head-dim", 64, "--ffn", 150)
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, yarn": ("llama", {"tie_word_embeddings": True, **tiny_engine.rope_shape("yarn")}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3": ("qwen3", {}),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_written_model_is_that_of_memory(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """In shards of the largest size, with an index; to transformers it is the same model as to hspec."""
    from transformers import AutoModelForCausalLM

    family, overrides = WRITTEN[kind]
    monkeypatch.setattr(widen, "SHARD", 400_000)
    source = tiny_models.model(tmp_path / "small", family, head_dim=32, **overrides)
    out = tmp_path / "wide"
    assert command(source, out, *WIDER, "--dtype", "float32") == 0
    assert len(list(out.glob("*.safetensors"))) > 3
    assert max(path.stat().st_size for path in out.glob("*.safetensors")) < 420_000
    small, made = Checkpoint.open(source), Checkpoint.open(out)
    made.preflight()
    wide = Widened(small, Shape(104, 6, 8, 8, 64, 150))
    assert made.config == wide.config
    assert all(torch.equal(made.tensor(name), wide.tensor(name)) for name in wide.shapes)
    tokens = tiny_engine.prompt(LENGTH)
    wanted = scores(decoder(small), tokens, [])
    assert difference(scores(decoder(made), tokens, []), wanted) <= 1e-4
    oracle = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        assert difference(oracle(torch.tensor([tokens])).logits[0], wanted) <= 1e-4


def test_a_gguf_file_is_widened_and_run(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default in bfloat16, with the tokenizer; `hspec run` takes what comes out."""
    tiny_gguf.model(tmp_path / "small.gguf", "qwen2")
    out = tmp_path / "wide"
    assert command(tmp_path / "small.gguf", out, *WIDER, "--yarn", 2) == 0
    assert {"config.json", "tokenizer.json", "generation_config.json"} < {path.name for path in out.iterdir()}
    config = json.loads((out / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert config["rope_parameters"]["factor"] == 2
    assert config["max_position_embeddings"] == 1024
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    assert hspec(["run", "-m", str(out), "--raw", "-n", "4", "--device", "cpu", "abc"]) == 0
    assert command(tmp_path / "small.gguf", out) == 1
    assert "is there already" in capsys.readouterr().err


def test_the_check_compares_both_models(command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_models.model(tmp_path / "small", "qwen2")
    (tmp_path / "text").write_text("the fox and the hen " * 20)
    words = (source, "--check", *WIDER, "--text", tmp_path / "text", "--tokens", 90)
    assert command(*words) == 0
    assert capsys.readouterr().out.startswith("90 of 90 likeliest next tokens agree, logits differ by at most ")
    assert command(*words, "--yarn", 4) == 0


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of comparing see one weight that is wrong."""
    source = dictionary()
    wide = Widened(source, Shape(96, 4, 8, 4, 32, 128))
    tokens = tiny_engine.prompt(LENGTH)
    assert compare(wide, tokens, CPU).agreeing == LENGTH
    monkeypatch.setitem(wide._scales, "norm", 1.0)
    agreement = compare(wide, tokens, CPU)
    assert agreement.difference > 0.1 * agreement.magnitude
    assert difference(scores(decoder(wide), tokens, []), scores(decoder(source), tokens, [])) > 0.1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "there is nothing to do"),
        (("--check", "--original", 64), "`--original` is the length that `--yarn` stretches"),
        (("--check", "--shape", "llama2-7b", "--layers", 2), "layers cannot shrink from 4 to 2"),
        (("--check", "--yarn", 0.5), "factor must be more than 1"),
    ],
)
def test_a_command_that_cannot_be_is_one_sentence(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[Any, ...], message: str
) -> None:
    source = tiny_models.model(tmp_path / "small", tokenizer=False)
    assert command(source, *words) == 1
    assert message in capsys.readouterr().err


def test_smollm2_in_a_larger_shape() -> None:
    """Real weights: hidden 576 in 1024, 9/3 heads × 64 in 16/16 × 128, 30 layers in 32."""
    source = Checkpoint.open(hub.fetch("smollm2-135m", offline=True, say=lambda _: None))
    wide = Widened(
        source, replace(Shape.of(source.config), hidden=1024, layers=32, heads=16, kv_heads=16, head_dim=128)
    )
    text = "The capital of France is Paris. The capital of Japan is Tokyo. The sum of two and two is four."
    agreement = compare(wide, Tokenizer.load(source.directory).encode(text), CPU)
    assert agreement.tokens > 20
    assert agreement.agreeing == agreement.tokens
    assert agreement.difference <= 1e-4 * agreement.magnitude
