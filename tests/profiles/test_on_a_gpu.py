"""The probes on real GPUs."""

from __future__ import annotations

import time

import psutil
import pytest
import torch

from hspec_profiles.measure import here, measure, quick_probe
from hspec_profiles.probes import gpu
from hspec_profiles.profile import HostProfile, host_key, save_profile, saved_profile

MB = 1 << 20
LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # bytes a second of one, by generation


def plausible(profile: HostProfile) -> None:
    """Figures that a quick measurement has too, against what no GPU and no bus can be."""
    assert len(profile.gpus) == torch.cuda.device_count()
    for index, card in enumerate(profile.gpus):
        unknown = {name: profile.sources.get(f"gpus.{index}.{name}") for name, v in vars(card).items() if v is None}
        assert not {"to_device", "to_host", "copy", "matrix"} & set(unknown), unknown
        assert 0 < card.free <= card.memory
        assert card.to_device is not None
        assert card.to_host is not None
        assert card.copy is not None
        assert card.matrix is not None
        assert 20e9 < card.copy < 40e12
        assert 1e12 < card.matrix < 20e15
        assert 0.5e9 < card.to_device < card.copy
        assert 0.5e9 < card.to_host < card.copy
        if card.pcie_generation and card.pcie_width:
            assert max(card.to_device, card.to_host) < 1.02 * LANE[card.pcie_generation] * card.pcie_width
        assert "driver unknown" not in card.identity
    assert profile.host.pin, profile.sources["host.pin"]
    assert profile.host.pinnable, profile.sources["host.pinnable"]


@pytest.mark.gpu
def test_a_full_measurement() -> None:
    began = time.monotonic()
    profile = measure()
    assert time.monotonic() - began < 60
    print(profile)
    plausible(profile)
    for index, card in enumerate(profile.gpus):
        assert card.to_device_pageable, profile.sources[f"gpus.{index}.to_device_pageable"]
        assert card.to_host_pageable, profile.sources[f"gpus.{index}.to_host_pageable"]
        assert card.to_device
        assert card.to_device_pageable < 1.1 * card.to_device
    if len(profile.gpus) > 1:
        assert profile.peer, profile.sources["peer"]
        assert profile.both_links, profile.sources["both_links"]
    save_profile(profile, host_key())
    assert saved_profile() == profile
    assert [card.identity for card in here().gpus] == [card.identity for card in profile.gpus]


@pytest.mark.gpu
def test_a_quick_measurement() -> None:
    torch.zeros(1, device="cuda")  # what a run has done before it
    began = time.monotonic()
    profile = quick_probe()
    assert time.monotonic() - began < 7
    plausible(profile)


@pytest.mark.gpu
def test_memory_is_given_back() -> None:
    quick_probe()  # contexts and libraries stay
    before = [gpu.free(device) for device in range(gpu.count())], psutil.Process().memory_info().rss
    quick_probe()
    after = [gpu.free(device) for device in range(gpu.count())], psutil.Process().memory_info().rss
    assert all(then - now < 64 * MB for then, now in zip(before[0], after[0], strict=True))
    assert after[1] - before[1] < 64 * MB
