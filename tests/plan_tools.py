"""Hosts and models to plan for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from hypothesis import strategies as st

from hspec_decoding.checkpoints import hub
from hspec_decoding.config import ModelConfig
from hspec_offload.ask import Limits, Workload
from hspec_offload.shape import ModelShape
from hspec_profiles.profile import Gpu, Host, HostProfile

GB, GIB = 10**9, 2**30
H200 = Gpu(
    "NVIDIA H200",
    150 * GB,
    150 * GB,
    copy=4.23e12,
    matrix=7.9e14,
    to_device=5.5e10,
    to_host=5.5e10,
    to_device_pageable=2e10,
    to_host_pageable=2e10,
)
SERVER = Host(
    "server",
    16,
    120 * GB,
    pinnable=120 * GB,
    pin=2e9,
    dram=9e10,
    attention=6.8e10,
    attention_rows=4e10,
    product=9e10,
    disk=2e9,
)
ONE = HostProfile("one", SERVER, (H200,))
NONE = HostProfile("none", SERVER)


def gpus(*memory: float, **fields: Any) -> HostProfile:
    """A host with GPUs of so many GB each."""
    sizes = [round(size * GB) for size in memory]
    return replace(ONE, gpus=tuple(replace(H200, memory=size, free=size, **fields) for size in sizes))


@cache
def shape(name: str) -> ModelShape:
    """The shape of a shipped alias."""
    return ModelShape.of(ModelConfig.from_dict(hub.read_config(name, offline=True, say=print)), name)


def model(layers: int = 8, hidden: int = 1024, kv_heads: int = 8, group: int = 1, tied: bool = False) -> ModelShape:
    """A model of some size."""
    heads, ffn, head_dim = kv_heads * group, 3 * hidden, 64
    elements = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * ffn
    return ModelShape(
        "some", layers, hidden, ffn, heads, kv_heads, head_dim, 32_000, 131_072, tied, 2 * elements, (None,) * layers
    )


models = st.builds(
    model,
    layers=st.sampled_from([24, 40, 5, 1]),
    hidden=st.sampled_from([4096, 8192, 512]),
    kv_heads=st.sampled_from([8, 12, 2, 1]),
    group=st.sampled_from([1, 4, 7]),
    tied=st.booleans(),
)
cards = st.builds(
    Gpu,
    st.just("card"),
    st.just(200 * GB),
    st.sampled_from([4, 8, 3, 6, 12, 24]).map(GB.__mul__),
    copy=st.none() | st.floats(2e11, 5e12),
    matrix=st.none() | st.floats(2e13, 1e15),
    to_device=st.none() | st.floats(3e9, 6e10),
    to_host=st.none() | st.floats(3e9, 6e10),
    to_device_pageable=st.none() | st.floats(1e9, 3e9),
)
machines = st.builds(
    Host,
    st.just("host"),
    st.integers(1, 64),
    st.integers(2 * GB, 100 * GB),
    pinnable=st.none() | st.integers(GB, 100 * GB),
    dram=st.none() | st.floats(2e10, 2e11),
    attention=st.none() | st.floats(1e9, 1e11),
    attention_rows=st.none() | st.floats(1e9, 1e11),
    product=st.none() | st.floats(1e9, 1e11),
    disk=st.none() | st.floats(1e8, 3e9),
)
profiles = st.builds(
    HostProfile,
    st.just("some"),
    machines,
    st.sampled_from([0, 1, 1, 1, 2, 2]).flatmap(lambda n: st.tuples(*[cards] * n)),
    peer=st.none() | st.floats(5e9, 1e11),
    both_links=st.none() | st.floats(6e9, 1e11),
)
works = st.builds(
    Workload,
    st.integers(1, 10) | st.integers(1000, 100_000),
    batch=st.integers(1, 3),
    text=st.sampled_from(["prose", "code"]),
    draft=st.none() | st.just(model(layers=2, hidden=512, kv_heads=2)),
)
bounds = st.just(Limits()) | st.builds(
    Limits,
    reserve=st.none() | st.integers(0, GB),
    gpu_layers=st.none() | st.integers(0, 24),
    kv_device=st.none() | st.sampled_from(["cpu", "gpu"]),
    offload=st.sampled_from(["auto", "auto", "weights", "kv", "none"]),
)
