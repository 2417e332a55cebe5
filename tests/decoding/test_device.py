"""Devices and precisions, on machines that this one pretends to be."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from hspec_decoding.device import CPU_SHAPE, exact_shape, pick_device, pick_dtype
from hspec_kernels.linear import ROWS
from hspec_profiles.errors import HspecError, UsageError

OLD = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx "
    "Alternatively, go to: https://pytorch.org to install a PyTorch version that has been compiled with your version "
    "of the CUDA driver. (Triggered internally at c10/cuda/CUDAFunctions.cpp:109.)"
)
BROKEN = (
    "CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env "
    "variable CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."
)
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """`machine(gpus, says)`: as many GPUs, or none and a warning of torch that says why."""

    def pretend(gpus: int, says: str | None = None, capability: tuple[int, int] = (8, 9)) -> None:
        def available() -> bool:
            if says:
                warnings.warn(says, stacklevel=2)
            return gpus > 0

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)

    return pretend


def test_a_gpu_is_taken_where_there_is_one(machine: Machine) -> None:
    machine(2)
    notes: list[str] = []
    assert pick_device("auto", notes) == torch.device("cuda", 0)
    assert pick_device("cuda", notes) == torch.device("cuda", 0)
    assert pick_device("cuda:1", notes) == torch.device("cuda", 1)
    assert pick_device("cpu", notes) == torch.device("cpu")
    assert notes == []


@pytest.mark.parametrize(("gpus", "says"), [(1, "'cuda:1', 1 GPU here"), (2, "'cuda:2', 2 GPUs here")])
def test_a_gpu_that_is_not_there(machine: Machine, gpus: int, says: str) -> None:
    machine(gpus)
    with pytest.raises(UsageError, match=says):
        pick_device(f"cuda:{gpus}", [])


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", "mps", "cuda:³"])
def test_an_unknown_device(machine: Machine, name: str) -> None:
    machine(1)
    with pytest.raises(UsageError, match="unknown device"):
        pick_device(name, [])


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (OLD, "the NVIDIA driver is too old for CUDA 13.0, which this PyTorch needs"),
        (BROKEN, "CUDA unknown error"),
        (None, "no NVIDIA driver or device was found"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_one_sentence(
    machine: Machine, says: str | None, reason: str, recwarn: pytest.WarningsRecorder
) -> None:
    machine(0, says)
    with pytest.raises(HspecError) as caught:
        pick_device("cuda", [])
    message = caught.value.message
    assert message.startswith("`--device cuda` cannot be used: ")
    assert reason in message
    assert "\n" not in message
    assert ". " not in message.replace("e.g. ", "")
    assert not message.endswith(".")
    assert "--device cpu" in (caught.value.hint or "")
    assert not recwarn.list, "torch's own words reach the user too"


def test_auto_says_that_the_driver_is_too_old(machine: Machine) -> None:
    """And nothing where there is no GPU to be missed."""
    notes: list[str] = []
    machine(0)
    assert pick_device("auto", notes) == torch.device("cpu")
    assert notes == []
    machine(0, OLD)
    assert pick_device("auto", notes) == torch.device("cpu")
    assert len(notes) == 1
    assert "driver is too old for CUDA 13.0" in notes[0]


def test_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert pick_device("auto", []) == torch.device("cpu")
    with pytest.raises(HspecError, match="built without CUDA"):
        pick_device("cuda:0", [])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp32", torch.float32),
        ("float32", torch.float32),
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("fp16", torch.float16),
        ("float16", torch.float16),
    ],
)
def test_dtypes_by_name(name: str, dtype: torch.dtype) -> None:
    assert pick_dtype(name, torch.device("cpu")) == dtype


@pytest.mark.parametrize("name", ["int8", "FP32", "", "half"])
def test_an_unknown_dtype(name: str) -> None:
    with pytest.raises(UsageError, match="unknown dtype") as caught:
        pick_dtype(name, torch.device("cpu"))
    assert "bf16" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)]
)
def test_auto_dtype_of_a_gpu(machine: Machine, capability: tuple[int, int], dtype: torch.dtype) -> None:
    machine(1, capability=capability)
    assert pick_dtype("auto", torch.device("cuda", 0)) == dtype


@pytest.mark.parametrize(
    ("features", "dtype"),
    [({}, torch.float32), ({"avx512_bf16": True}, torch.bfloat16), ({"amx_bf16": True}, torch.bfloat16)],
)
def test_auto_dtype_of_a_cpu(monkeypatch: pytest.MonkeyPatch, features: dict[str, bool], dtype: torch.dtype) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features, raising=False)
    assert pick_dtype("auto", torch.device("cpu")) == dtype


@pytest.mark.parametrize(("sequences", "rows"), [(1, 32), (16, 32), (17, 16), (32, 16), (33, 4), (128, 4), (129, 1)])
def test_a_batch_stays_within_what_the_kernels_take(sequences: int, rows: int) -> None:
    shape = exact_shape(torch.device("cuda"), torch.bfloat16, sequences)
    assert (shape.rows, shape.padded) == (rows, False)
    assert sequences * rows <= ROWS
    assert exact_shape(torch.device("cuda"), torch.float32, sequences).padded
    assert exact_shape(torch.device("cpu"), torch.bfloat16, sequences) == CPU_SHAPE
