"""A small Llama that drafts by itself over a window (TriForce, arXiv 2404.11912), distilled from its target.

It has the target's embedding and head, which are frozen and not stored with it, and few layers of its own between.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save as saved
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hspec_decoding.checkpoints.checkpoint import SHARED
from hspec_decoding.chimera.files import replace
from hspec_decoding.config import ModelConfig
from hspec_decoding.model import EMBEDDING, Decoder
from hspec_decoding.training.corpus import Batch
from hspec_decoding.training.depths import PATHS, Figures
from hspec_decoding.training.target import SCORED, Said

DRAFTED = 6  # tokens of a simulated step
CONTEXT = 2048  # positions that the draft is made for
TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")


def draft_config(target: ModelConfig, layers: int) -> dict[str, Any]:
    """The config.json of a draft for a target."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": min(target.ffn_size, 4 * target.hidden_size),
        "num_hidden_layers": layers,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.norm_eps,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": target.tied,
        SHARED: [EMBEDDING] if target.tied else [EMBEDDING, "lm_head.weight"],
    }


class Streaming(nn.Module):
    """A draft model under training."""

    entering: tuple[int, ...] = ()

    def __init__(self, config: dict[str, Any], target: Decoder) -> None:
        from transformers import LlamaConfig, LlamaModel

        super().__init__()
        self.config = config
        if not isinstance(target.head, Tensor):
            raise TypeError("the head of a target under training is not in 4 bits")
        self.head = target.head
        with torch.device("meta"):
            trunk = LlamaModel(LlamaConfig(**{k: v for k, v in config.items() if k != SHARED}))
        trunk.embed_tokens = nn.Identity()  # the target's, which no state is to hold
        self.embedding = target.embedding
        self.trunk = trunk.to_empty(device="cpu")
        for parameter in self.trunk.parameters():
            nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
        nn.init.constant_(self.trunk.norm.weight, float(target.norm.float().square().mean().sqrt()))
        self.trunk.rotary_emb = type(trunk.rotary_emb)(trunk.config)
        self.to(target.device)

    def forward(self, batch: Batch, said: Said, step: int) -> Tensor:  # noqa: ARG002
        """The mean cross-entropy to the target's law, of the tokens that the target chose."""
        losses = [
            checkpoint(self._loss, mine, theirs, counts, use_reentrant=False)
            for mine, theirs, counts, *_ in self._parts(batch, said)
        ]
        return torch.stack(losses).sum() / batch.own[:, 1:].sum().clamp(min=1)

    @torch.no_grad()
    def figures(self, batch: Batch, said: Said) -> Figures:
        """How well it does on a batch, drafting DRAFTED tokens a step."""
        own = batch.own[:, 1:]
        loss, ranks, likely = torch.zeros(1, device=own.device), [], []
        for mine, theirs, counts, true, top in self._parts(batch, said):
            loss = loss + self._loss(mine, theirs, counts)
            logits = self._logits(mine)
            ranks.append((logits > logits.gather(-1, true[:, None])).sum(-1) + 1)
            likely.append((logits.argmax(-1) == top) & counts)
        rank = torch.cat(ranks).view(own.shape)
        span = own.shape[1] - DRAFTED
        first, product = own[:, :span], torch.ones_like(rank[:, :span])
        chain = tree = torch.zeros_like(product)
        for depth in range(DRAFTED):
            here, theirs_own = rank[:, depth:][:, :span], own[:, depth:][:, :span]
            chain = chain + ((here == 1) & theirs_own & (chain == depth))
            product = product * here.clamp(max=PATHS + 1)
            tree = tree + ((product <= PATHS) & theirs_own & (tree == depth))
        total = own.sum()[None].float()
        by_step = (((kept + 1) * first).sum()[None].float() for kept in (chain, tree))
        agreed = torch.cat(likely).sum()[None].float()
        return Figures._make((loss, total, agreed, total, *by_step, first.sum()[None].float()))

    def _parts(self, batch: Batch, said: Said) -> Iterator[tuple[Tensor, ...]]:
        """Few rows at a time: own and the target's hidden states, whether they count, the next token, the likeliest."""
        hidden = self.trunk(
            inputs_embeds=F.embedding(batch.tokens, self.embedding).float(), use_cache=False
        ).last_hidden_state
        theirs = said.features[..., -hidden.shape[-1] :]
        rows = (hidden[:, :-1], theirs[:, :-1], batch.own[:, 1:], batch.tokens[:, 1:], said.likeliest[:, :-1])
        yield from zip(*(torch.split(part.flatten(0, 1), SCORED) for part in rows), strict=True)

    def _loss(self, mine: Tensor, theirs: Tensor, counts: Tensor) -> Tensor:
        with torch.no_grad():
            law = F.linear(theirs, self.head).float().softmax(-1)
        logits = self._logits(mine)
        found: Tensor = ((logits.logsumexp(-1) - (law * logits).sum(-1)) * counts).sum()
        return found

    def _logits(self, mine: Tensor) -> Tensor:
        return F.linear(mine.to(self.head.dtype), self.head).float()

    def save(self, directory: Path, tokenizer: Path) -> None:
        """Write a model directory that `--draft-model` takes, with the tokenizer's files of the target's directory."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{name}": t.to(torch.bfloat16).cpu() for name, t in self.trunk.state_dict().items()}
        replace(directory / "model.safetensors", saved(tensors))
        replace(directory / "config.json", (json.dumps(self.config, indent=2) + "\n").encode())
        for name in TOKENIZER:
            if (tokenizer / name).exists():
                shutil.copyfile(tokenizer / name, directory / name)
