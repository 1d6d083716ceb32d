"""Tiny checkpoints of several families: what is found out of them, and what is refused.

That packed and padded batches equal single passes is checked by the loader itself at every load.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    MPNetConfig,
    MPNetForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from lora_server.config import Task
from lora_server.errors import StartupError
from lora_server.model.embedding_recipe import PoolingMode
from lora_server.model.pooling_check import check_batched, run_alone
from lora_server.model.pooling_load import choose_task, load_pooler
from lora_server.model.pooling_model import HeadRows

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
}
BERT = BertConfig(**SIZES)
ROBERTA = RobertaConfig(**SIZES)
LLAMA = LlamaConfig(**SIZES)
MPNET = MPNetConfig(**SIZES)
MODERN: dict[str, Any] = {
    **SIZES,
    "local_attention": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}


@pytest.fixture
def save(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Return a function that writes a random checkpoint and returns its folder."""

    def write(kind: Any, config: Any) -> str:
        torch.manual_seed(0)
        kind(config).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        return str(tmp_path)

    return write


@pytest.mark.parametrize(
    ("kind", "config", "task"),
    [
        (BertForSequenceClassification, BERT, Task.CLASSIFY),
        (BertForSequenceClassification, BertConfig(**SIZES, num_labels=1), Task.SCORE),  # type: ignore[call-arg]
        (BertForTokenClassification, BERT, Task.TOKEN_CLASSIFY),
        (BertForMaskedLM, BERT, Task.EMBED),
        (BertModel, BERT, Task.EMBED),
        (LlamaModel, LLAMA, Task.EMBED),
        (LlamaForCausalLM, LLAMA, Task.GENERATE),
    ],
)
def test_the_architecture_tells_the_task(kind: Any, config: Any, task: Task, save: Any) -> None:
    assert choose_task(save(kind, config)) is task


@pytest.mark.parametrize(
    ("kind", "config", "found"),
    [
        (BertForSequenceClassification, BERT, (HeadRows.FIRST, 40, True)),
        (RobertaForSequenceClassification, ROBERTA, (HeadRows.FIRST, 38, True)),
        (LlamaForSequenceClassification, LLAMA, (HeadRows.LAST, 40, True)),
        (
            GPT2ForSequenceClassification,
            GPT2Config(vocab_size=320, n_embd=16, n_layer=2, n_head=2, n_positions=40),
            (HeadRows.LAST, 40, True),
        ),
        (
            ModernBertForSequenceClassification,
            ModernBertConfig(**MODERN),
            (HeadRows.FIRST, 40, True),
        ),
        (
            ModernBertForSequenceClassification,
            ModernBertConfig(**MODERN, classifier_pooling="mean"),
            (HeadRows.MEAN, 40, True),
        ),
        (MPNetForSequenceClassification, MPNET, (HeadRows.FIRST, 38, False)),
    ],
)
def test_finds_out_what_each_familys_head_reads(
    kind: Any, config: Any, found: tuple[HeadRows, int, bool], save: Any
) -> None:
    pooler = load_pooler(save(kind, config), Task.CLASSIFY)

    assert pooler.head is not None
    assert (pooler.head.rows, pooler.num_positions, pooler.is_packed) == found
    assert pooler.head.is_trained
    assert pooler.max_length == pooler.num_positions
    assert pooler.head.labels.names == ("LABEL_0", "LABEL_1")


def test_decoders_embed_their_last_token_and_encoders_the_mean(save: Any, tmp_path: Path) -> None:
    encoder = load_pooler(save(BertModel, BERT), Task.EMBED)
    decoder = load_pooler(save(LlamaModel, LLAMA), Task.EMBED)

    assert (encoder.recipe.mode, decoder.recipe.mode) == (PoolingMode.MEAN, PoolingMode.LAST)
    assert encoder.head is None
    assert (encoder.hidden_size, encoder.has_types, decoder.has_types) == (16, True, False)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 24}')
    shorter = load_pooler(str(tmp_path), Task.EMBED)
    assert (shorter.max_length, shorter.num_positions) == (24, 40)


def test_the_head_sees_rows_of_its_own_and_so_does_the_pooler(save: Any) -> None:
    folder = save(BertForSequenceClassification, BERT)

    with_head = load_pooler(folder, Task.CLASSIFY).head_paths
    body = load_pooler(folder, Task.EMBED).head_paths

    assert {"classifier", "bert.pooler.dense"} <= with_head
    assert not any(path.startswith("bert.encoder") for path in with_head)
    assert "pooler.dense" in body


@pytest.mark.parametrize(("task", "labels"), [(Task.CLASSIFY, 2), (Task.SCORE, 1)])
def test_a_head_that_the_checkpoint_lacks_is_zero_and_says_so(
    task: Task, labels: int, save: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save(BertModel, BERT)

    with caplog.at_level(logging.WARNING, logger="lora_server"):
        pooler = load_pooler(folder, task)

    assert pooler.head is not None
    assert not pooler.head.is_trained
    assert len(pooler.head.labels) == labels
    assert not any(p.any() for p in pooler.module.get_submodule("classifier").parameters())
    assert any(p.any() for p in pooler.module.get_submodule("bert.pooler.dense").parameters())
    assert "only adapters that bring a head of their own" in caplog.text


def test_a_body_that_is_not_whole_is_refused(save: Any, tmp_path: Path) -> None:
    config = BertConfig(**{**SIZES, "num_hidden_layers": 1})
    save(BertForSequenceClassification, config)
    BERT.save_pretrained(tmp_path)

    with pytest.raises(StartupError, match=r"lacks 16 tensors: bert\.encoder\.layer\.1"):
        load_pooler(str(tmp_path), Task.CLASSIFY)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json"):
        load_pooler(str(tmp_path), Task.EMBED)
    with pytest.raises(StartupError, match="no such folder"):
        choose_task(str(tmp_path / "nothing"))


def test_a_batch_that_changes_its_sequences_is_refused(save: Any) -> None:
    pooler = load_pooler(save(BertModel, BERT), Task.EMBED)
    with torch.inference_mode():
        alone = run_alone(pooler)
        check_batched(pooler, alone)
        pooler.position_offset = 1

        with pytest.raises(StartupError, match="not what they are alone"):
            check_batched(pooler, alone)


def test_labels_in_the_configuration_that_make_no_sense_are_refused(save: Any) -> None:
    config = BertConfig(**SIZES)
    config.threshold = 7
    folder = save(BertForSequenceClassification, config)

    with pytest.raises(StartupError, match=r"config\.json: threshold is 7"):
        load_pooler(folder, Task.CLASSIFY)
