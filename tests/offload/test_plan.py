"""Plans of known machines beside what was measured on them, and what every plan must keep."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from plan_tools import GB, GIB, NONE, ONE, SERVER, gpus, model, shape

from hspec_decoding.stack import parse
from hspec_offload.ask import Limits, Workload
from hspec_offload.memory import SLACK
from hspec_offload.plan import Plan, plan
from hspec_offload.shape import ModelShape
from hspec_offload.speculation import TARGET, Level
from hspec_profiles.errors import DoesNotFit, UsageError
from hspec_profiles.profile import HostProfile, load_profile

LLAMA = shape("llama2-7b-128k")
DRAFT = shape("llama-68m")
PLAIN = ((TARGET,),)


def ms(made: Plan) -> float:
    """Milliseconds of a token."""
    return 1e3 * made.prediction.seconds_per_token


def held(made: Plan, name: str, device: int = 0) -> int:
    """Bytes of a term on a device."""
    return sum(term.nbytes for term in made.devices[device].terms if term.name == name)


class TestMeasured:
    """Predictions beside measurements on the H200 host."""

    @pytest.mark.parametrize(("tokens", "measured"), [(512, 4.11), (30_720, 7.64), (122_880, 18.34)])
    def test_plain_decoding_of_a_7b_that_fits(self, tokens: int, measured: float) -> None:
        made = plan(ONE, LLAMA, Workload(tokens, stacks=PLAIN))
        assert ms(made) == pytest.approx(measured, rel=0.1)
        assert made.resident

    def test_layers_on_the_cpu_as_llama_cpp_runs_them(self) -> None:
        """13 of 32 layers on the GPU, the rest by 16 CPU threads: 86 ms a token."""
        made = plan(ONE, LLAMA, Workload(512, stacks=PLAIN), Limits(gpu_layers=13))
        assert ms(made) == pytest.approx(86, rel=0.1)

    def test_7b_in_8_gb(self) -> None:
        """A resident 4-bit copy, the 16-bit weights in RAM for the last verifier alone."""
        code, prose = (
            plan(ONE, LLAMA, Workload(2048, text=text, draft=DRAFT), Limits(vram=8 * GIB)) for text in ("code", "prose")
        )
        assert 60e-3 < prose.prediction.plain.seconds < 120e-3
        assert 8 < code.prediction.speed_up < 25
        assert 2.5 < prose.prediction.speed_up < 8
        for made in (code, prose):
            assert "w=int4" in made.levels
            assert {run.weights for run in made.layers} >= {"stream", "gpu"}
            assert made.ring_pieces

    def test_kv_of_122880_tokens_in_24_gb(self) -> None:
        """On prose a 4-bit copy of all keys, which takes 17 to 18 GB, on code few keys do."""
        code, prose = (
            plan(ONE, LLAMA, Workload(122_880, text=text, draft=DRAFT), Limits(vram=24 * GIB))
            for text in ("code", "prose")
        )
        assert 0.6 < prose.prediction.plain.seconds < 0.8  # 64 GB over both DRAM paths
        assert 15 < code.prediction.speed_up < 35
        assert 4 < prose.prediction.speed_up < 10
        assert prose.key_copy == "int4"
        assert held(prose, "KV, 4-bit copy") == pytest.approx(17.6 * GB, rel=0.02)
        assert prose.prediction.texts["prose"] == prose.prediction.seconds_per_token > prose.prediction.texts["code"]
        for made in (code, prose):
            assert made.prediction.prefill.key_crossings == 1
            assert made.prediction.prefill.seconds == pytest.approx(8.25, rel=0.1)
            assert {run.keys for run in made.layers} & {"stream", "split"}

    def test_cpu_takes_a_share_where_few_rows_are_verified(self) -> None:
        few = ((Level("target", "retrieval", 4096, width=15), TARGET),)
        many = ((Level("target", "retrieval", 4096, width=63), TARGET),)
        shares = [
            plan(ONE, LLAMA, Workload(122_880, stacks=stacks), Limits(vram=24 * GIB, gpu_layers=32, kv_device="cpu"))
            for stacks in (few, many)
        ]
        assert 0.25 < shares[0].cpu_share < 0.45
        assert shares[1].cpu_share < 0.2
        streaming = 122_880 * LLAMA.key_bytes * 32 / (55e9 * 0.95)
        assert streaming / shares[0].prediction.verify.seconds > 1.25

    @pytest.mark.parametrize("profile", ["1x-h200", "1x-rtx-4090"])
    def test_32b_in_24_gb(self, profile: str) -> None:
        host, large = load_profile(profile), shape("qwen2.5-32b")
        made = plan(host, large, Workload(2048, text="code", draft=shape("qwen2.5-0.5b")), Limits(vram=24 * GIB))
        assert 0.3 < made.prediction.plain.seconds < 1.2
        assert 6 < made.prediction.speed_up < 25
        assert held(made, "weights, 4-bit copy") == pytest.approx(0.2825 * 62.4 * GB, rel=0.2)

    def test_two_rtx_4090(self) -> None:
        """TriForce: 840 ms of plain decoding, 108 with speculation; the authors leave the CPU idle."""
        host = load_profile("2x-rtx-4090")
        made = plan(host, LLAMA, Workload(130_048, text="code", draft=DRAFT))
        assert made.gpus == (0, 1)
        assert made.kv_heads == (16, 16)
        assert ms(made) < 60
        idle = replace(host, host=replace(host.host, attention=1e8, attention_rows=1e8, product=1e8))
        streamed = plan(idle, LLAMA, Workload(130_048, text="prose", draft=DRAFT))
        assert 0.6 < streamed.prediction.plain.seconds < 1.0
        assert 40 < ms(streamed) < 250
        alone = plan(replace(host, gpus=host.gpus[:1], both_links=None), LLAMA, Workload(130_048, text="code"))
        assert 1.5 < ms(alone) / ms(made) < 2.5
        assert any("the best one alone" in note for note in made.notes)


class TestPlacement:
    """What goes where."""

    def test_what_fits_is_resident(self) -> None:
        made = plan(gpus(24), LLAMA, Workload(2048))
        assert made.resident
        assert made.ring_pieces == 0
        assert made.embedding == "gpu"
        assert [term.name for term in made.devices[-1].terms] == ["reserve"]
        assert any("nothing is offloaded" in note for note in made.notes)

    def test_the_gpu_is_filled(self) -> None:
        """A whole layer of 16-bit weights would not have found room any more."""
        made = plan(gpus(8), LLAMA, Workload(2048, stacks=PLAIN))
        card = made.devices[0]
        assert 0 <= card.available - card.used < LLAMA.layer_bytes

    @pytest.mark.parametrize("name", ["mistral-small-24b", "qwen3-4b", "llama3.1-8b", "qwen2.5-0.5b"])
    def test_kv_is_counted_by_its_heads(self, name: str) -> None:
        config = {"mistral-small-24b": (40, 8, 128), "qwen3-4b": (36, 8, 128), "llama3.1-8b": (32, 8, 128)}
        layers, heads, dim = config.get(name, (24, 2, 64))
        made = plan(ONE, shape(name), Workload(4096, batch=2))
        assert held(made, "KV cache") == 2 * layers * heads * dim * 2 * (4096 + SLACK) * 2

    def test_tied_weights_count_once(self) -> None:
        tied, own = (model(tied=tied) for tied in (True, False))
        one, two = (plan(ONE, shape_, Workload(1000, stacks=PLAIN)) for shape_ in (tied, own))
        assert two.devices[0].used - one.devices[0].used == 32_000 * 1024 * 2
        assert held(one, "embedding") == 0

    def test_layers_of_the_cpu_lie_among_the_streamed(self) -> None:
        made = plan(ONE, LLAMA, Workload(512, stacks=PLAIN), Limits(gpu_layers=2))
        weights = [run.weights for run in made.layers for _ in range(run.count)]
        assert len(weights) == 32
        assert weights[-2:] == ["gpu", "gpu"]
        if "stream" in weights and "cpu" in weights:
            cpu = [n for n, kind in enumerate(weights) if kind == "cpu"]
            gaps = {after - before for before, after in pairwise(cpu)}
            assert max(gaps) - min(gaps) <= 1

    def test_more_weights_than_ram(self) -> None:
        made = plan(gpus(8), LLAMA, Workload(2048), Limits(ram=8 * GB))
        assert "disk" in {run.weights for run in made.layers}
        assert any("read from the disk" in note for note in made.notes)
        assert made.devices[-1].used <= 8 * GB

    def test_memory_that_cannot_be_pinned(self) -> None:
        tight = replace(gpus(8), host=replace(SERVER, pinnable=GB))
        made, better = (plan(host, LLAMA, Workload(2048, stacks=PLAIN)) for host in (tight, gpus(8)))
        assert ms(made) >= ms(better)
        assert any("can be pinned" in note for note in made.notes)

    def test_sliding_layers_read_their_window(self) -> None:
        sliding = replace(model(), windows=(4096,) * 8)
        assert ms(plan(ONE, sliding, Workload(100_000))) < ms(plan(ONE, model(), Workload(100_000)))

    def test_sliding_layers_keep_their_kv_on_the_gpu(self) -> None:
        """All of it: there the engine keeps it, and the plan counts it."""
        sliding, work = replace(LLAMA, windows=(4096,) * 32), Workload(16_384)
        made = plan(gpus(12), sliding, work)
        assert {run.keys for run in made.layers} == {"gpu"}
        assert {run.weights for run in made.layers} != {"gpu"}
        assert held(made, "KV cache") >= 32 * sliding.key_bytes * 16_384
        with pytest.raises(UsageError, match="KV of the sliding windows of llama2-7b-128k stays on the GPU"):
            plan(gpus(12), sliding, work, Limits(kv_device="cpu"))

    def test_without_a_gpu(self) -> None:
        made = plan(NONE, model(), Workload(4000))
        assert made.gpus == made.kv_heads == ()
        assert made.resident
        assert {(run.weights, run.keys) for run in made.layers} == {("cpu", "cpu")}
        assert [device.name for device in made.devices] == ["RAM"]
        assert "w=int4" not in made.levels
        assert made.block == 8


class TestLimits:
    """Every option shows in the plan, or is an error."""

    @pytest.mark.parametrize(
        "limits",
        [
            Limits(vram=12 * GIB),
            Limits(ram=12 * GB),
            Limits(reserve=2 * GB),
            Limits(gpu_layers=1),
            Limits(kv_device="cpu"),
            Limits(offload="weights"),
            Limits(offload="kv"),
        ],
    )
    def test_options_show(self, limits: Limits) -> None:
        assert plan(gpus(16), LLAMA, Workload(20_000), limits) != plan(gpus(16), LLAMA, Workload(20_000))

    def test_layers_and_keys_where_they_were_asked_for(self) -> None:
        made = plan(ONE, LLAMA, Workload(4096), Limits(gpu_layers=5, kv_device="cpu"))
        assert sum(run.count for run in made.layers if run.weights == "gpu") == 5
        assert all(run.keys != "gpu" for run in made.layers)
        assert plan(ONE, LLAMA, Workload(4096), Limits(gpu_layers=99, kv_device="gpu")).resident

    def test_kinds_of_offloading(self) -> None:
        """20,000 tokens of KV take 10.6 GB, the weights 13.5."""
        weights, keys = (plan(gpus(16), LLAMA, Workload(20_000), Limits(offload=kind)) for kind in ("weights", "kv"))
        assert {run.keys for run in weights.layers} == {"gpu"} != {run.weights for run in weights.layers}
        assert {run.weights for run in keys.layers} == {"gpu"} != {run.keys for run in keys.layers}

    def test_without_offloading(self) -> None:
        assert plan(gpus(24), LLAMA, Workload(2048), Limits(offload="none")).resident
        with pytest.raises(DoesNotFit) as failure:
            plan(gpus(8), LLAMA, Workload(2048), Limits(offload="none"))
        assert "--offload" in str(failure.value.hint)

    @pytest.mark.parametrize("limits", [Limits(vram=GB), Limits(gpu_layers=3), Limits(kv_device="gpu")])
    def test_options_of_a_gpu_need_one(self, limits: Limits) -> None:
        with pytest.raises(UsageError, match="has none"):
            plan(NONE, model(), Workload(100), limits)

    @pytest.mark.parametrize(
        ("work", "limits"),
        [(Workload(0), Limits()), (Workload(9, text="verse"), Limits()), (Workload(9), Limits(offload="some"))],
    )
    def test_what_cannot_be_meant(self, work: Workload, limits: Limits) -> None:
        with pytest.raises(UsageError):
            plan(ONE, model(), work, limits)


class TestRefusals:
    """Which device, needed, available, the longest context, the flag."""

    def test_ram_is_short(self) -> None:
        with pytest.raises(DoesNotFit) as failure:
            plan(gpus(8), LLAMA, Workload(120_000), Limits(ram=16 * GB))
        assert "RAM needs" in failure.value.message
        assert "has 16.0 GB" in failure.value.message
        assert "--ctx" in str(failure.value.hint)
        assert "--ram" in str(failure.value.hint)

    def test_the_gpu_is_short(self) -> None:
        with pytest.raises(DoesNotFit) as failure:
            plan(gpus(80, 1), replace(LLAMA, kv_heads=1, heads=1), Workload(4096), Limits(vram=GB // 4))
        assert "GPU 0 (NVIDIA H200) needs" in failure.value.message
        assert "has 250 MB" in failure.value.message
        assert "--vram" in str(failure.value.hint)

    def test_the_model_holds_less(self) -> None:
        with pytest.raises(DoesNotFit, match=r"131,073 tokens .* holds 131,072"):
            plan(ONE, LLAMA, Workload(131_073))

    @pytest.mark.parametrize(
        ("work", "limits"),
        [
            (Workload(2048, stacks=((Level("target", "retrieval", 256), TARGET),)), Limits(gpu_layers=3)),
            (Workload(2048, stacks=((Level("target", "full", weights="nf4"), TARGET),)), Limits(kv_device="cpu")),
            (Workload(2048), Limits(gpu_layers=3, offload="none")),
        ],
    )
    def test_what_contradicts_itself(self, work: Workload, limits: Limits) -> None:
        with pytest.raises(UsageError, match="keeps things elsewhere"):
            plan(ONE, LLAMA, work, limits)

    def test_levels_that_need_more(self) -> None:
        """A level that reads the 16-bit weights cannot be had where they do not fit."""
        with pytest.raises(DoesNotFit, match="GPU 0"):
            plan(gpus(8), LLAMA, Workload(2048, stacks=((Level("target", "retrieval", 256), TARGET),)))


class TestLevels:
    """Which levels, and how wide."""

    def test_levels_are_in_the_grammar(self) -> None:
        for vram in (6, 10, 24, 100):
            made = plan(gpus(vram), LLAMA, Workload(8192, draft=DRAFT))
            assert parse(made.levels)[-1].decides

    def test_asked_for(self) -> None:
        asked = (Level("ngram", width=3), Level("target", "full", weights="nf4", width=9), TARGET)
        made = plan(gpus(12), LLAMA, Workload(4096, stacks=(asked,)))
        assert made.levels == "ngram(width=3) > target(full, w=nf4, width=9) > target(full)"

    def test_measured_acceptance(self) -> None:
        """Where everything that is guessed is wrong, plain decoding is best."""
        never = dict.fromkeys(Workload(9).accepted(LLAMA, "prose"), 0.0)
        made = plan(gpus(12), LLAMA, Workload(4096, acceptance=never))
        assert made.levels == "target(full)"
        assert made.prediction.speed_up == 1
        surer = plan(gpus(12), LLAMA, Workload(4096, acceptance={"full nf4": 0.999}))
        assert ms(surer) < ms(plan(gpus(12), LLAMA, Workload(4096)))
        assert not any("assumed" in note for note in surer.notes)

    def test_a_batch_shares_its_weights(self) -> None:
        one, eight = (plan(ONE, LLAMA, Workload(1024, batch=n, stacks=PLAIN)) for n in (1, 8))
        assert ms(one) < ms(eight) < 2 * ms(one)
        assert held(eight, "KV cache") == 8 * held(one, "KV cache")


class TestPairs:
    """Two GPUs that are not alike."""

    def pair(self, *, first: float = 24, second: float = 12, **fields: float) -> HostProfile:
        one, other = gpus(first, second).gpus
        return replace(ONE, gpus=(one, replace(other, **fields)), peer=2e10)  # type: ignore[arg-type]

    @pytest.mark.parametrize("context", [2048, 60_000])
    def test_heads_are_split_unevenly(self, context: int) -> None:
        made = plan(self.pair(copy=1e12, to_device=1.2e10), LLAMA, Workload(context))
        if len(made.gpus) > 1:
            assert made.kv_heads[0] > made.kv_heads[1] >= 1
        assert all(device.used <= device.available for device in made.devices)
        assert any("together" in note and "alone" in note for note in made.notes)

    def test_memory_decides_where_links_are_alike(self) -> None:
        made = plan(self.pair(), LLAMA, Workload(20_000, stacks=PLAIN), Limits(offload="none"))
        assert made.kv_heads[0] > made.kv_heads[1]

    def test_one_kv_head_stays_on_one_gpu(self) -> None:
        single = replace(model(kv_heads=1, group=4), context=4096)
        made = plan(self.pair(), single, Workload(2048))
        assert made.gpus == (0,)

    def test_a_slow_partner_is_left_out(self) -> None:
        made = plan(self.pair(second=2, copy=1e10, to_device=1e9), shape("qwen2.5-0.5b"), Workload(2048))
        assert made.gpus == (0,)


def test_plans_are_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same question has the same answer, without a clock, a device or a file."""
    monkeypatch.setattr("time.perf_counter", lambda: pytest.fail("a plan reads no clock"))
    asked: tuple[HostProfile, ModelShape, Workload] = gpus(12), LLAMA, Workload(10_000)
    assert plan(*asked) == plan(*asked)


class TestSharing:
    """GPUs that share a model because they are told to."""

    def test_unlike_gpus_share_by_whole_heads(self) -> None:
        """A card of 24 GB and one of 12: more heads for the larger, and what it would do alone is said."""
        made = plan(gpus(24, 12), LLAMA, Workload(60_000), Limits(ranks=2))
        assert made.gpus == (0, 1)
        assert sum(made.kv_heads) == LLAMA.kv_heads
        assert made.kv_heads[0] > made.kv_heads[1] > 0
        for device in made.devices:
            assert device.used <= device.available
        assert any("all GPUs together" in note and "the best one alone" in note for note in made.notes)

    def test_one_or_all(self) -> None:
        one = plan(gpus(24, 24), LLAMA, Workload(60_000), Limits(ranks=1))
        two = plan(gpus(24, 24), LLAMA, Workload(60_000), Limits(ranks=2))
        assert (len(one.gpus), len(two.gpus)) == (1, 2)
        assert two.prediction.seconds_per_token < one.prediction.seconds_per_token
        fastest = plan(gpus(24, 24), LLAMA, Workload(60_000))
        assert fastest.prediction.seconds_per_token == two.prediction.seconds_per_token

    def test_what_cannot_be_shared_is_refused_with_numbers(self) -> None:
        with pytest.raises(UsageError, match="`--gpus 3` is asked for, the profile `one` has 2"):
            plan(gpus(24, 24), LLAMA, Workload(2048), Limits(ranks=3))
        with pytest.raises(UsageError, match="whole KV heads, of which `model` has 1"):
            plan(gpus(24, 24), replace(LLAMA, name="model", kv_heads=1), Workload(2048), Limits(ranks=2))
        with pytest.raises(DoesNotFit, match=r"GPU 0 .* needs .* and has 24\.0 GB"):
            plan(gpus(24, 2), LLAMA, Workload(60_000), Limits(ranks=2, offload="none"))

    def test_processes_and_what_each_has_whole_are_counted_in_ram(self) -> None:
        one, two = (plan(gpus(24, 24), LLAMA, Workload(60_000), Limits(ranks=n, kv_device="cpu")) for n in (1, 2))
        for term in ("embedding", "hidden states"):
            assert held(two, term, -1) == 2 * held(one, term, -1) > 0
        assert held(two, "reserve", -1) - held(one, "reserve", -1) == GB
