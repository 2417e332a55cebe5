"""The files of a tokenizer, read into a `tokenizers` backend and what surrounds it.

`tokenizer.json` is taken as it is: the classes that a repository names in its configuration may rebuild it
differently, and importing them costs half a second. `tokenizer.model` is converted. Nothing of a repository is
ever executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from hspec_decoding.text.sentencepiece_model import SentencePiece
from hspec_profiles.errors import HspecError

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerFiles:
    """What a directory says about its tokenizer."""

    backend: Tokenizer
    roles: Mapping[str, str]  # by the names in ROLES: the special tokens' texts
    template: str | None  # the chat template's source


def read(directory: Path) -> TokenizerFiles:
    """Read a model directory. Raises HspecError naming the file that is missing or broken."""
    backend, settings = _backend(directory)
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings |= load_json(directory / name)
    roles = {role: text for role in ROLES if (text := _text(settings.get(role))) is not None}
    _add_tokens(backend, settings, load_json(directory / "added_tokens.json"))
    _mark_special(backend, [*roles.values(), *_more_special(settings)])
    _wrap(backend, settings, roles)
    backend.no_truncation()
    backend.no_padding()
    return TokenizerFiles(backend, roles, _template(directory, settings))


def load_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty when there is no such file. Raises HspecError when it is not one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _broken(path, error) from None
    if not isinstance(value, dict):
        raise _broken(path, "not an object")
    return value


def _backend(directory: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The backend, and the settings that hold where no configuration says otherwise."""
    whole, model = directory / "tokenizer.json", directory / "tokenizer.model"
    path = whole if whole.is_file() else model
    if not path.is_file():
        raise HspecError(f"no tokenizer: neither `{whole}` nor `tokenizer.model` beside it exists")
    try:
        if path == whole:
            return Tokenizer.from_file(str(whole)), {}
        pieces = SentencePiece.parse(model.read_bytes())
        roles = {"bos_token": pieces.bos, "eos_token": pieces.eos, "unk_token": pieces.unk}
        defaults: dict[str, Any] = {role: pieces.named(token) for role, token in roles.items()}
        return pieces.backend(), {**defaults, "add_bos_token": True}
    except Exception as error:  # the Rust side raises bare Exceptions
        raise _broken(path, error) from None


def _broken(path: Path, error: object) -> HspecError:
    reason = " ".join(str(error).split())[:200].rstrip(".")
    return HspecError(f"broken tokenizer file `{path}`: {reason}", "download the model again")


def _text(token: object) -> str | None:
    """A token's text, which configurations write as a string or as an object around it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _add_tokens(backend: Tokenizer, settings: Mapping[str, Any], added: Mapping[str, Any]) -> None:
    """Add the tokens that only the configuration lists, by rising id, where the id comes out right."""
    listed: dict[int, Any] = {token: text for text, token in added.items() if isinstance(token, int)}
    decoder = settings.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        listed |= {int(token): about for token, about in decoder.items() if token.isdecimal()}
    there = backend.get_added_tokens_decoder()
    for place, about in sorted(listed.items(), key=lambda item: item[0]):
        text = _text(about)
        if text is None or place in there:
            continue
        if backend.token_to_id(text) == place or place == backend.get_vocab_size():
            flags = about if isinstance(about, dict) else {}
            left, right, special = (bool(flags.get(key)) for key in ("lstrip", "rstrip", "special"))
            token = AddedToken(text, lstrip=left, rstrip=right, normalized=False, special=special)
            (backend.add_special_tokens if special else backend.add_tokens)([token])


def _more_special(settings: Mapping[str, Any]) -> list[str]:
    """The texts of the special tokens that have no role, in the older and the newer spelling."""
    listed = settings.get("additional_special_tokens") or settings.get("extra_special_tokens")
    if isinstance(listed, dict):
        listed = list(listed.values())
    return [text for token in listed if (text := _text(token))] if isinstance(listed, list) else []


def _mark_special(backend: Tokenizer, texts: list[str]) -> None:
    """Make the named tokens special. Names without an id are skipped: a new id would have no embedding."""
    there = {token.content for token in backend.get_added_tokens_decoder().values()}
    new = [text for text in texts if text not in there and backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in new])


def _wrap(backend: Tokenizer, settings: Mapping[str, Any], roles: Mapping[str, str]) -> None:
    """Follow `add_bos_token` and `add_eos_token` where a configuration sets them, else the file's processor."""
    around = backend.encode("").ids
    has, wants, ends = [], [], []
    for role in ("bos_token", "eos_token"):
        text = roles.get(role, "")
        token = backend.token_to_id(text)
        asked = settings.get(f"add_{role}")
        has.append(token is not None and token in around)
        wants.append(has[-1] if asked is None else bool(asked) and token is not None)
        ends.append([(text, token)] if wants[-1] else [])
    if wants != has:
        bos, eos = ends
        single = [*(text for text, _ in bos), "$A", *(text for text, _ in eos)]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[*{*bos, *eos}])


def _template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise _broken(path, error) from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None
