"""A fixed short text, run with an adapter and without, to see how far the answer moves.

One small forward pass between two steps, beside the KV cache and the scheduler; or, on models that
generate, pieces that ride in running steps. `P` tokens of the probe, `V` vocabulary, `W` labels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from lora_layers import RowRun
from lora_server.effect import ShiftOf
from lora_server.model.attention_step import AttentionStep, PrefillChunk
from lora_server.model.kv_cache import KvCache
from lora_server.model.pooling_inputs import pack, pad
from lora_server.model.pooling_model import HeadRows

from .riding_probe import RidingProbe
from .shift import compare_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lora_layers import LoraModelManager
    from lora_server.effect import LogitShift
    from lora_server.model.load import LoadedModel
    from lora_server.model.pooling_model import LoadedPooler

PROBE_TEXT = "Question: What is the capital of France, and what is it known for? Answer:"
"""Plain words that every tokenizer knows, ending where an answer begins."""
MAX_PROBE_TOKENS = 16


class Probe(Protocol):
    """Compares an adapter with the base. Belongs to the engine thread."""

    def prepare(self) -> None:
        """Run the base alone, so that `measure` need not."""

    def measure(self, digest: str) -> LogitShift | None:
        """Run the probe with an adapter that is in a slot; None where no number is finite."""


class GenerationProbe:
    """The probe of a model that generates: log-probabilities of all next tokens."""

    def __init__(
        self, model: LoadedModel, manager: LoraModelManager, token_ids: Sequence[int]
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            model: the model.
            manager: of its adapters.
            token_ids: what is asked, at most `MAX_PROBE_TOKENS`, at least one.
        """
        self._model = model
        self._manager = manager
        self._token_ids = list(token_ids)
        self._base: torch.Tensor | None = None

    def prepare(self) -> None:
        """Run the base alone, so that `measure` need not."""
        if self._base is None:
            self._base = self._run(())

    def ride(self, digest: str) -> RidingProbe:
        """Return the probe of an adapter in pieces, for the steps of running requests."""
        model = self._model
        return RidingProbe(
            digest,
            self._token_ids,
            clear_blocks=model.clear_blocks,
            reference=self._base if model.dtype is torch.float32 else None,
        )

    def measure(self, digest: str) -> LogitShift | None:
        """Run the probe with an adapter that is in a slot; None where no number is finite."""
        self.prepare()
        assert self._base is not None
        own = self._run(((digest, 1.0),))
        return compare_rows(self._base, own, of=ShiftOf.LOG_PROBABILITIES)

    def _run(self, adapters: tuple[tuple[str, float], ...]) -> torch.Tensor:
        """Return log-probabilities `[P, V]`, float32."""
        model, count = self._model, len(self._token_ids)
        runs = (RowRun(num_rows=count, adapters=adapters),)
        self._manager.set_routing(runs, runs)
        positions = torch.arange(count, device=model.device)
        attention = model.attention
        kept, attention.cache = attention.cache, self._new_cache()
        try:
            logits = model.forward(
                torch.tensor([self._token_ids], device=model.device),
                positions.unsqueeze(0),
                AttentionStep(token_slots=positions, decode=(), prefill=(self._chunk(),)),
                positions,
            )
        finally:
            attention.cache = kept
        return logits.float().log_softmax(dim=-1)

    def _new_cache(self) -> KvCache:
        """Return keys and values of the probe's own: the pool's blocks stay with the requests."""
        model = self._model
        return KvCache(
            model.kv_shapes,
            num_blocks=1,
            block_size=max(len(self._token_ids), 1),
            dtype=model.dtype,
            device=model.device,
        )

    def _chunk(self) -> PrefillChunk:
        block = torch.zeros(1, dtype=torch.int64, device=self._model.device)
        return PrefillChunk(start=0, num_tokens=len(self._token_ids), context=0, blocks=block)


class PoolingProbe:
    """The probe of a model that classifies or embeds.

    Logits are compared where the adapter's labels are as many as the base's, else embeddings.
    """

    def __init__(
        self,
        model: LoadedPooler,
        manager: LoraModelManager,
        token_ids: Sequence[int],
        type_ids: Sequence[int],
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            model: the model.
            manager: of its adapters.
            token_ids: one text with its special tokens.
            type_ids: which text of a pair each token is of.
        """
        self._model = model
        self._manager = manager
        self._token_ids = list(token_ids)
        self._type_ids = list(type_ids)
        self._base: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def prepare(self) -> None:
        """Run the base alone, so that `measure` need not."""
        if self._base is None:
            self._base = self._run(())

    def measure(self, digest: str) -> LogitShift | None:
        """Run the probe with an adapter that is in a slot; None where no number is finite."""
        self.prepare()
        assert self._base is not None
        embedding, logits = self._base
        own_embedding, own_logits = self._run(((digest, 1.0),))
        if logits is None or own_logits is None or logits.shape != own_logits.shape:
            return compare_rows(embedding, own_embedding, of=ShiftOf.EMBEDDING)
        if logits.shape[1] == 1:
            return compare_rows(logits, own_logits, of=ShiftOf.LOGITS)
        own, base = own_logits.log_softmax(dim=-1), logits.log_softmax(dim=-1)
        return compare_rows(base, own, of=ShiftOf.LOG_PROBABILITIES)

    def _run(
        self, adapters: tuple[tuple[str, float], ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the embedding `[1, H]` of length 1, and logits `[N, W]`, None without a head."""
        model, count = self._model, len(self._token_ids)
        is_per_token = model.head is not None and model.head.rows is HeadRows.ALL
        head_rows = RowRun(num_rows=count if is_per_token else 1, adapters=adapters)
        self._manager.set_routing((RowRun(num_rows=count, adapters=adapters),), (head_rows,))
        ids, types = [self._token_ids], [self._type_ids]
        inputs = (
            pack(ids, types, device=model.device)
            if model.is_packed
            else pad(ids, types, pad_token_id=model.pad_token_id, device=model.device)
        )
        hidden = model.hidden(inputs)
        embedding = torch.nn.functional.normalize(model.recipe.apply(hidden).float(), dim=-1)
        if model.head is None:
            return embedding.unsqueeze(0), None
        logits = model.logits(model.head_rows(hidden, self._token_ids)).float()
        labels = self._manager.num_labels([digest for digest, _ in adapters])
        return embedding.unsqueeze(0), logits[:, :labels]
