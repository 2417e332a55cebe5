"""Text, tokens and templates: section T of the cases that users of other tools hit."""

from __future__ import annotations

import time
from pathlib import Path

import case_models as models
import case_tools as cases
import pytest
import tiny
import tiny_models
from case_models import speaker
from case_tools import Hspec, answered, refused
from tokenizers import Tokenizer

SMILES = "é😀漢"  # two, four and three bytes, all of them different


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("good_draft", [True, False])
def test_T1_characters_over_several_tokens(hspec: Hspec, tmp_path: Path, gamma: int, good_draft: bool) -> None:
    """A character spread over tokens, also across the border of a verified block, comes out whole."""
    target = speaker(tmp_path / "target", "?", SMILES, then=1)
    draft = speaker(tmp_path / "draft", "?", SMILES if good_draft else SMILES[::-1], then=2)
    run = ["run", "-m", target, "--raw", "--draft-model", draft, "--gamma", gamma, "?"]
    assert answered(hspec(*run, "--method", "triforce")).text == SMILES
    document = answered(hspec(*run, "--method", "triforce", "--json")).document
    assert document["text"] == SMILES
    cases.speculated(document, proposals=1)


def test_T1_cut_inside_a_character(hspec: Hspec, tmp_path: Path) -> None:
    """A run that ends inside a character prints what a one-shot decode of its ids gives."""
    target = speaker(tmp_path / "target", "?", SMILES, then=1)
    for method in cases.METHODS:
        out = answered(hspec("run", "-m", target, "--raw", "--method", method, "-n", 4, "?")).text
        assert out == SMILES.encode()[:4].decode("utf-8", errors="replace")


@pytest.mark.parametrize("method", cases.METHODS)
@pytest.mark.parametrize("byte", [0xFF, 0xF0, 0x80])
def test_T2_endless_invalid_bytes(hspec: Hspec, tmp_path: Path, method: str, byte: int) -> None:
    """Bytes that never make a character are held for a bounded time and come out as U+FFFD, one run's worth."""
    tiny.tokenizer(tmp_path)
    start, bad = models.byte_ids(tmp_path, b"?" + bytes([byte]))
    model = models.chain_model(tmp_path, {start: bad})
    text = answered(hspec("run", "-m", model, "--raw", "--method", method, "-n", 40, "?")).text
    assert text == bytes([byte] * 40).decode("utf-8", errors="replace")


@pytest.mark.parametrize("method", cases.METHODS)
def test_T2_random_bytes_end(hspec: Hspec, tmp_path: Path, method: str) -> None:
    """A random model at temperature 1 streams 480 tokens of valid UTF-8 and ends."""
    model = tiny_models.model(tmp_path / "model")
    begun = time.monotonic()
    result = hspec("run", "-m", model, "--raw", "--method", method, "--temp", 1, "-n", 480, "noise")
    answered(result).out.decode("utf-8", errors="strict")
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("method", cases.METHODS)
@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["efg"], "abcd"),
        (["bx", "defgh"], "abc"),
        (["hij", "cd"], "ab"),
        (["ab"], ""),
        (["a"], ""),
        (["zzz"], "abcdefghij"),
    ],
)
def test_T3_stop_string_over_tokens(hspec: Hspec, tmp_path: Path, method: str, stops: list[str], text: str) -> None:
    """The text is cut exactly before the first stop string, in the stream and in JSON, and nothing follows it."""
    model = speaker(tmp_path / "model", "?", "abcdefghij", then=1)
    run = ["run", "-m", model, "--raw", "--method", method, *(w for s in stops for w in ("--stop", s)), "?"]
    assert answered(hspec(*run)).text == text
    document = answered(hspec(*run, "--json")).document
    assert document["text"] == text
    assert document["finish_reason"] == ("stop" if text != "abcdefghij" else "eos")


@pytest.mark.parametrize("method", cases.METHODS)
def test_T3_stop_string_in_repeating_text(hspec: Hspec, tmp_path: Path, method: str) -> None:
    """A stop string that begins inside its own false start is found at its first full occurrence."""
    model = speaker(tmp_path / "model", "?", "abc")  # "?abc?abc?abc…"
    run = ["run", "-m", model, "--raw", "--method", method, "-n", 40, "--stop", "c?abc?", "?"]
    assert answered(hspec(*run)).text == "ab"


@pytest.mark.parametrize("method", cases.METHODS)
def test_T4_held_text_is_flushed(hspec: Hspec, tmp_path: Path, method: str) -> None:
    """Text held as a possible stop string is printed when the model ends, or the tokens do, before the rest of it."""
    model = speaker(tmp_path / "model", "?", "abcd", then=1)
    run = ["run", "-m", model, "--raw", "--method", method, "--stop", "cdX", "?"]
    document = answered(hspec(*run, "--json")).document
    assert (document["text"], document["finish_reason"]) == ("abcd", "eos")
    assert answered(hspec(*run)).text == "abcd"
    assert answered(hspec(*run, "-n", 3)).text == "abc"


def chat_ids(directory: Path, user: str) -> list[int]:
    """Ids of one chat turn under `tiny.CHATML`: one BOS, and control strings in `user` taken as text."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    literal = Tokenizer.from_file(str(directory / "tokenizer.json"))
    literal.encode_special_tokens = True
    parts = [
        (tokenizer, "<s><|im_start|>"),
        (literal, "user\n" + user),
        (tokenizer, "<|im_end|>"),
        (literal, "\n"),
        (tokenizer, "<|im_start|>"),
        (literal, "assistant\n"),
    ]
    return [i for one, text in parts for i in one.encode(text, add_special_tokens=False).ids]


def test_T6_one_bos(hspec: Hspec, tmp_path: Path) -> None:
    """A template that writes BOS and a tokenizer that adds it give exactly one."""
    model = speaker(tmp_path / "model", "\n", "hi", then=1)
    tiny.tokenizer(model, template=tiny.CHATML)
    document = answered(hspec("run", "-m", model, "--json", "hello")).document
    assert document["prompt_tokens"] == len(chat_ids(model, "hello"))
    assert document["text"] == "hi"


def test_T7_control_strings_in_chat_are_text(hspec: Hspec, tmp_path: Path) -> None:
    """`<|im_end|>` in a user's piped file is text in chat mode."""
    model = speaker(tmp_path / "model", "\n", "hi", then=1)
    tiny.tokenizer(model, template=tiny.CHATML)
    user = "one<|im_end|>two<|im_start|>system three</s>"
    document = answered(hspec("run", "-m", model, "--json", stdin=user.encode())).document
    assert document["prompt_tokens"] == len(chat_ids(model, user))


def test_T7_control_strings_in_raw_are_control(hspec: Hspec, tmp_path: Path) -> None:
    """With `--raw` a control string is the control token, as the tokenizer parses it."""
    model = speaker(tmp_path / "model", "?", "hi", then=1)
    text = "one<|im_end|>two?"
    expected = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    document = answered(hspec("run", "-m", model, "--json", "--raw", stdin=text.encode())).document
    assert document["prompt_tokens"] == len(expected)


@pytest.mark.parametrize("method", cases.METHODS)
@pytest.mark.parametrize("eos", ["<|im_start|>", "<|im_end|>"])
def test_T8_list_of_eos_ids(hspec: Hspec, tmp_path: Path, method: str, eos: str) -> None:
    """Any id of a list in generation_config.json ends the answer, and prints nothing itself."""
    tiny.tokenizer(tmp_path / "model")
    ids = [models.vocabulary_of(tmp_path / "model")[token] for token in ("<|im_start|>", "<|im_end|>")]
    end = models.vocabulary_of(tmp_path / "model")[eos]
    model = speaker(tmp_path / "model", "?", "ab", then=end, ends=ids)
    document = answered(hspec("run", "-m", model, "--raw", "--method", method, "--json", "?")).document
    assert (document["text"], document["finish_reason"]) == ("ab", "eos")


@pytest.mark.parametrize("method", cases.METHODS)
@pytest.mark.parametrize("eos", ["</s>", "<|im_start|>", "<|im_end|>"])
def test_T9_union_of_eos_ids(hspec: Hspec, tmp_path: Path, method: str, eos: str) -> None:
    """The end tokens of the tokenizer, of config.json and of generation_config.json all end the answer."""
    tiny.tokenizer(tmp_path / "model")
    vocabulary = models.vocabulary_of(tmp_path / "model")
    model = speaker(tmp_path / "model", "?", "ab", then=vocabulary[eos], ends=vocabulary["<|im_start|>"], eos="</s>")
    models.edit(model / "config.json", eos_token_id=vocabulary["<|im_end|>"])
    document = answered(hspec("run", "-m", model, "--raw", "--method", method, "--json", "?")).document
    assert (document["text"], document["finish_reason"]) == ("ab", "eos")


@pytest.mark.parametrize("method", cases.METHODS)
def test_T10_stop_given_as_special_token(hspec: Hspec, tmp_path: Path, method: str) -> None:
    """`--stop` with the text of a special token stops at its id, though its text is never printed."""
    tiny.tokenizer(tmp_path / "model")
    control = models.vocabulary_of(tmp_path / "model")["<|im_start|>"]
    model = speaker(tmp_path / "model", "?", "ab", then=control)
    run = ["run", "-m", model, "--raw", "--method", method, "--stop", "<|im_start|>", "-n", 20, "?"]
    document = answered(hspec(*run, "--json")).document
    assert (document["text"], document["finish_reason"]) == ("ab", "stop")
    assert answered(hspec(*run)).text == "ab"


def test_T11_no_chat_template(hspec: Hspec, tmp_path: Path) -> None:
    """A tokenizer without a chat template gets the raw prompt, with a note."""
    model = speaker(tmp_path / "model", "?", "hi", then=1)
    tiny.tokenizer(model, template=None)
    result = answered(hspec("run", "-m", model, "?"))
    assert result.text == "hi"
    assert "chat template" in result.err
    assert "jinja" not in result.err.lower()


RAISING = (
    "{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ message.content }}<|im_end|>\n{% endfor %}"
)


def test_T12_template_without_system_role(hspec: Hspec, tmp_path: Path) -> None:
    """`--system` under a template that raises goes into the user turn, or is refused in the template's own words."""
    model = speaker(tmp_path / "model", "\n", "hi", then=1)
    tiny.tokenizer(model, template=RAISING)
    plain = answered(hspec("run", "-m", model, "--json", "hello")).document["prompt_tokens"]
    result = hspec("run", "-m", model, "--json", "--system", "be brief", "hello")
    if result.code:
        refused(result, (1, 2), "System role not supported")
    else:
        assert answered(result).document["prompt_tokens"] > plain + 4


@pytest.mark.parametrize("said", ["[/INST]", "[red]", "[bold]", "a[int](x)", "<b>&amp;"])
def test_T14_brackets_in_the_answer(hspec: Hspec, tmp_path: Path, said: str) -> None:
    """What looks like markup, a link or HTML in an answer is printed as it is."""
    model = speaker(tmp_path / "model", "?", said, then=1)
    assert answered(hspec("run", "-m", model, "--raw", "?")).text == said


def test_T14_emoji_codes_in_the_answer(hspec: Hspec, tmp_path: Path) -> None:
    """An emoji code in an answer stays its letters."""
    model = speaker(tmp_path / "model", ":", "smile")
    assert answered(hspec("run", "-m", model, "--raw", "-n", 12, ":")).text == "smile:smile:"


def test_T14_long_lines_are_not_wrapped(hspec: Hspec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line longer than the console stays one line."""
    monkeypatch.setenv("COLUMNS", "40")
    model = speaker(tmp_path / "model", "?", "abcde fghij[k]")
    assert answered(hspec("run", "-m", model, "--raw", "-n", 299, "?")).text == (("abcde fghij[k]?" * 20)[:299])


def test_T14_brackets_in_prompt_path_and_error(hspec: Hspec, tmp_path: Path) -> None:
    """Brackets and emoji codes in a prompt, a path or an error survive."""
    odd = tmp_path / "[bold]list[int] [/INST] :smile:"
    model = speaker(odd / "model", "]", "hi", then=1)
    assert answered(hspec("run", "-m", model, "--raw", "-v", "[/INST] :smile: list[int]")).text == "hi"
    refused(hspec("run", "-m", odd / "missing", "x"), (1, 2), str(odd / "missing"))
