"""GRPO and AdamW a second time, written from the papers, over transformers' model: nothing of ours is imported here.

One sample after the other, in sequences of its own, with torch's autograd, torch's AdamW and torch's clipping by norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Settings:
    """The numbers of an experiment, in the papers' words."""

    temperature: float
    clip_low: float
    clip_high: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_norm: float


def advantages(rewards: Sequence[Sequence[float]]) -> np.ndarray:
    """Return (r - mean) / (std + 1e-6) in each group, flat; 0 in a group of equal rewards."""
    table = np.array(rewards, dtype=np.float64)
    difference = table - table.mean(axis=1, keepdims=True)
    is_mixed = table.max(axis=1, keepdims=True) > table.min(axis=1, keepdims=True)
    return np.where(is_mixed, difference / (table.std(axis=1, ddof=1, keepdims=True) + 1e-6), 0.0).ravel()


def histogram(ratio: np.ndarray, lengths: Sequence[int]) -> dict[str, float]:
    """Return the share of all tokens in each bin of a quarter of their response."""
    edges = [0, 0.8, 0.95, 1.05, 1.25, np.inf]
    quarter = np.concatenate([np.floor(4 * np.arange(length) / length) for length in lengths])
    names = ("far_below", "below", "near", "above", "far_above")
    return {
        f"ratio_part{part + 1}_{name}": count / len(ratio)
        for part in range(4)
        for name, count in zip(names, np.histogram(ratio[quarter == part], edges)[0].tolist(), strict=True)
    }


class IndependentGrpo:
    """A model that is trained.

    Args:
        model: Of transformers, in FP32; its indexers are frozen.
        settings: See there.
    """

    def __init__(self, model: torch.nn.Module, settings: Settings):
        self.model, self._settings = model, settings
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".indexer." not in name)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # Norms are not decayed: Megatron's default, and everybody's.
        groups = [
            {"params": [p for p in self._trained if p.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in self._trained if p.ndim == 1], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps)

    def logprobs(self, tokens: Sequence[int], mask: Sequence[int]) -> torch.Tensor:
        """Return the log-probability of each sampled token."""
        sampled = [token for token, is_sampled in zip(tokens, mask, strict=True) if is_sampled]
        return self._distributions(tokens, mask)[range(len(sampled)), sampled]

    def _distributions(self, tokens: Sequence[int], mask: Sequence[int]) -> torch.Tensor:
        """Return the log-probability of every word at each sampled token, [sampled, V]."""
        before = [place - 1 for place, is_sampled in enumerate(mask) if is_sampled]
        logits = self.model(torch.tensor([[*tokens]])).logits[0, before]
        return torch.log_softmax(logits / self._settings.temperature, -1)

    def update(self, samples: Sequence[Any], old: Sequence[torch.Tensor], advantage: np.ndarray, lr: float) -> dict:
        """Make one step of AdamW on samples with tokens and the mask of those sampled, and return what it did.

        The loss is the mean over samples of the mean over tokens of -min(w A, clip(w) A).
        """
        low, high = 1 - self._settings.clip_low, 1 + self._settings.clip_high
        self._optimizer.zero_grad()
        new, entropies, loss = [], [], 0.0
        for sample, before, value in zip(samples, old, advantage, strict=True):
            words = self._distributions(sample.tokens, sample.loss_mask)
            now = words[range(len(words)), list(sample.sampled_tokens)]
            logs = words.detach().double().numpy()
            entropies.append(-(np.exp(logs) * logs).sum(-1))
            ratio = torch.exp(now - before)
            objective = torch.minimum(ratio * value, ratio.clamp(low, high) * value)
            sample_loss = -objective.mean() / len(samples)
            sample_loss.backward()
            loss += sample_loss.item()
            new.append(now.detach().double().numpy())
        norm = torch.nn.utils.clip_grad_norm_(self._trained, self._settings.max_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        signs = np.concatenate([np.full(len(now), value) for now, value in zip(new, advantage, strict=True)])
        log_ratio = np.concatenate(new) - np.concatenate([before.double().numpy() for before in old])
        ratio = np.exp(log_ratio)
        return {
            "loss": loss,
            "grad_norm": float(norm),
            "num_tokens": len(ratio),
            "entropy": np.concatenate(entropies).mean(),
            "importance_ratio_mean": ratio.mean(),
            "importance_ratio_square_mean": (ratio**2).mean(),
            **histogram(ratio, [len(now) for now in new]),
            "first_update_ratio_max_abs_deviation": np.abs(ratio - 1).max(),
            "clip_fraction": np.where(signs > 0, ratio > high, (signs < 0) & (ratio < low)).mean(),
            "approx_kl": (ratio - 1 - log_ratio).mean(),
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of all weights by their names on the Hub."""
        named = self.model.named_parameters()
        return {hub: part.clone() for name, p in named for hub, part in by_hub_name(name, p.detach())}


def by_hub_name(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor of transformers' model under the Hub's names: it stacks a layer's experts, the Hub does not."""
    if name.endswith("experts.gate_up_proj"):
        for expert, stacked in enumerate(tensor):
            gate, up = stacked.chunk(2)
            prefix = name.removesuffix("gate_up_proj")
            yield f"{prefix}{expert}.gate_proj.weight", gate
            yield f"{prefix}{expert}.up_proj.weight", up
    elif name.endswith("experts.down_proj"):
        for expert, down in enumerate(tensor):
            yield f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", down
    else:
        yield name, tensor
