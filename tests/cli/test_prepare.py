"""From the request to what the engine takes: room for the answer, sampling options, templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from case_tools import Hspec

from hspec_cli import prepare
from hspec_cli.run import Run
from hspec_cli.voice import Voice
from hspec_profiles.errors import DoesNotFit


def room(usable: int, prompt: int, **flags: Any) -> tuple[int, int, bool]:
    return prepare.room(Run(model="m", **flags), prompt, usable, Voice())


def test_room_for_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert room(8192, 100) == (512, 612, False)
    assert room(8192, 100, max_tokens=8092) == (8092, 8192, False)
    assert room(8192, 100, ctx=4096) == (512, 4096, False)
    assert capsys.readouterr().err == ""
    assert room(8192, 8000) == (192, 8192, True)
    assert room(8192, 8000, max_tokens=193) == (192, 8192, True)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert not [n for n in ("192", "512", "8,000", "8,192") if n not in said[0]]


@pytest.mark.parametrize(
    ("prompt", "flags", "said"),
    [
        (9000, {}, ("9,000", "8,192", "`m`")),
        (8192, {}, ("8,192",)),
        (100, {"ctx": 100}, ("100", "--ctx", "8192")),
        (100, {"ctx": 9000}, ("9,000", "8,192", "--ctx 8192")),
    ],
)
def test_no_room(prompt: int, flags: dict[str, int], said: tuple[str, ...]) -> None:
    with pytest.raises(DoesNotFit) as failure:
        room(8192, prompt, **flags)
    words = f"{failure.value.message} {failure.value.hint}"
    assert not [word for word in said if word not in words], words


def test_sampling_defaults_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    def chosen(generation: dict[str, Any], **flags: Any) -> tuple[float, float, int, float]:
        made = prepare.sampling(Run(**flags), generation, Voice())
        return made.temperature, made.top_p, made.top_k, made.min_p

    model = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1}
    assert chosen({}) == chosen({"temperature": 0.6, "top_p": 0.5}) == (0.0, 1.0, 0, 0.0)
    assert chosen({"do_sample": True}) == (1.0, 1.0, 0, 0.0)
    assert chosen(model) == (0.6, 0.9, 20, 0.1)
    assert chosen(model, temperature=0.0) == (0.0, 0.9, 20, 0.1)
    assert chosen(model, top_p=1.0, top_k=0, min_p=0.0) == (0.6, 1.0, 0, 0.0)
    assert chosen(model, top_p=0.0)[:2] == (0.0, 1.0)
    assert chosen({}, temperature=0.8, top_k=5) == (0.8, 1.0, 5, 0.0)
    assert capsys.readouterr().err == ""
    assert chosen({}, top_k=5) == (0.0, 1.0, 5, 0.0)
    assert "`--top-k` changes nothing at temperature 0" in capsys.readouterr().err


def test_no_chat_template(hspec: Hspec, model: Path) -> None:
    """The prompt goes in as it is, the system prompt before it, and that is said once."""
    tiny.tokenizer(model, template=None)
    raw = hspec("run", "-m", model, "-n", 2, "--json", "--raw", "be brief\n\nhello").document
    result = hspec("run", "-m", model, "-n", 2, "--json", "-s", "be brief", "hello")
    assert result.document["prompt_tokens"] == raw["prompt_tokens"]
    assert result.err.count("no chat template") == 1
    assert "system prompt before it" in result.err
