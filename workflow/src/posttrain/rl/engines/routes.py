"""The experts that an engine routed each token to, from SGLang's `routed_experts`.

Expert ids, [tokens, layers, experts per token], for every decoder layer (zeros in dense layers) and every token except
a response's last, which no engine reads. Ours take one byte each if possible; SGLang's own take four. They follow the
JSON of an answer (`posttrain_weights.routed_experts`), or are part of it in base64.

Source of the field names: SGLang 0.5.23, srt/state_capturer/routed_experts.py and srt/managers/detokenizer_manager.py.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.config.schema import Architecture

ASKED, TOLD = "return_routed_experts", "routed_experts"
# Key for the prefill engine's routes if another engine decodes: each knows only the tokens that it has read.
PREFILLED = "prefill_routed_experts"
# Content type of an answer followed by routes, and the size of its length prefix.
BINARY, SIZE_BYTES = "application/x-json-and-routes", 8
SMALL, LARGE = np.dtype("uint8"), np.dtype("<i2")


@dataclass(frozen=True)
class RoutesLayout:
    """The shape of a model's routes.

    Args:
        num_layers: Decoder layers.
        first: The first MoE layer; all later layers are MoE, too.
        per_token: Experts per token.
        num_experts: Experts per layer.
    """

    num_layers: int
    first: int
    per_token: int
    num_experts: int

    @staticmethod
    def of(arch: Architecture) -> RoutesLayout:
        """Return the layout of an MoE model."""
        assert arch.n_routed_experts, "a dense model sends tokens nowhere"
        return RoutesLayout(
            arch.num_hidden_layers, arch.first_k_dense_replace, arch.num_experts_per_tok, arch.n_routed_experts
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Compact dtype of the expert ids."""
        return smallest(self.num_experts)

    def read(self, meta: Mapping[str, Any], num_prompt: int, num_tokens: int) -> np.ndarray:
        """Return the routes of a response [tokens, MoE layers, experts per token].

        Args:
            meta: `meta_info` of the answer.
            num_prompt: Tokens of the prompt.
            num_tokens: Tokens of prompt and response together.

        Raises:
            ValueError: The routes are missing, or do not fit these tokens.
        """
        num_read = num_tokens - 1
        if PREFILLED not in meta:
            routes = self._array(meta, TOLD, num_read)
        elif num_read == num_prompt:  # the prefill engine sampled the only token: the decode engine reports nothing
            routes = self._array(meta, PREFILLED, num_prompt)
        else:
            decoded = self._array(meta, TOLD, num_read)[num_prompt:]
            routes = np.concatenate([self._array(meta, PREFILLED, num_prompt), decoded])
        if int(routes.max()) >= self.num_experts or int(routes.min()) < 0:
            raise ValueError(f"tokens sent to expert {routes.max()} of {self.num_experts}")
        # Routes that no engine filled in are all zero.
        if self.per_token > 1 and (routes[..., 0] == routes[..., 1]).any():
            raise ValueError("tokens sent twice to the same expert")
        return routes

    def _array(self, meta: Mapping[str, Any], name: str, num_tokens: int) -> np.ndarray:
        try:
            told = meta[name]
            content = told if isinstance(told, memoryview) else base64.b64decode(told, validate=True)
        except (KeyError, TypeError, binascii.Error) as error:
            raise ValueError(f"no {name} in the answer: {error!r}") from error
        count = num_tokens * self.num_layers * self.per_token
        found = SMALL if len(content) == count * SMALL.itemsize else LARGE
        if len(content) != count * found.itemsize or found.itemsize > self.dtype.itemsize:
            raise ValueError(f"{len(content)} bytes of {name} for {count} places of {num_tokens} tokens")
        routes = np.frombuffer(content, found).reshape(num_tokens, self.num_layers, self.per_token)
        return routes[:, self.first :].astype(self.dtype, copy=False)


def read_behind_json(body: bytes) -> Any:
    """Parse a /generate answer that is followed by routes, and insert them.

    Raises:
        ValueError: It is not such an answer.
    """
    begin = SIZE_BYTES + int.from_bytes(body[:SIZE_BYTES], "little")
    answer, view = json.loads(body[SIZE_BYTES:begin]), memoryview(body)
    try:
        for item in answer if isinstance(answer, list) else [answer]:
            end = begin + item["meta_info"][TOLD]
            item["meta_info"][TOLD], begin = view[begin:end], end
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"routes behind it are not told of: {error!r}") from error
    if begin != len(body):
        raise ValueError(f"{len(body)} bytes instead of {begin}")
    return answer


def smallest(num_experts: int) -> np.dtype[Any]:
    """Return the smallest dtype that holds the ids of so many experts."""
    return SMALL if num_experts <= 256 else LARGE
