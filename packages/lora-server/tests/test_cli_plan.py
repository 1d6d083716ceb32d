"""The command plans from configuration and headers alone, and refuses what means nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig

from lora_server.cli.main import main
from lora_server.cli.plan.text import size_text
from lora_weights.testing import llama_modules, write_adapter

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, HIDDEN, INTER, KV, VOCAB = 2, 32, 48, 16, 64
MODULES = llama_modules(num_layers=LAYERS, hidden=HIDDEN, inter=INTER, kv=KV)
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=INTER,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    architectures=["LlamaForCausalLM"],
    dtype="float32",
)
PARAMETERS = (
    VOCAB * HIDDEN
    + HIDDEN
    + LAYERS * (2 * HIDDEN + 2 * HIDDEN**2 + 2 * HIDDEN * KV + 3 * HIDDEN * INTER)
)


@pytest.fixture
def base(tmp_path: Path) -> str:
    """Write a configuration, and nothing else: there are no weights to be read."""
    CONFIG.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the JSON."""
    status = main(["plan", *arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, found


def test_a_model_without_weight_files_is_planned_to_the_byte(
    base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = plan(
        capsys, base, "--max-loras", "3", "--max-lora-rank", "4", "--kv-cache-memory", "1MiB"
    )

    assert status == 0
    buffers = 2 * 4 * (HIDDEN // 4 // 2)  # two copies of the frequencies of rotary embeddings
    assert found["weights"]["size_bytes"] == 4 * PARAMETERS + buffers
    assert found["weights"]["tied_bytes"] == 4 * VOCAB * HIDDEN
    assert found["weights"]["prepacked_bytes"] == 0
    kv = found["kv_cache"]
    assert kv["block_bytes"] == 4 * 2 * KV * LAYERS * 16
    assert kv["num_blocks"] == 2**20 // kv["block_bytes"]
    each = 4 * 3 * 4  # bytes of a number, in every slot and rank
    kinds = {kind: part["size_bytes"] for kind, part in found["slots"]["by_kind"].items()}
    attention = LAYERS * (2 * HIDDEN + HIDDEN + KV + HIDDEN + KV + 2 * HIDDEN)
    mlp = LAYERS * 3 * (HIDDEN + INTER)
    tables = 400
    assert each * attention <= kinds["attention"] <= each * attention + tables
    assert each * mlp <= kinds["mlp"] <= each * mlp + tables
    assert each * (VOCAB + HIDDEN) <= kinds["embeddings"] <= each * (VOCAB + HIDDEN) + tables
    assert kinds["embeddings"] == kinds["lm_head"]


def test_adapters_fill_slots_to_their_true_ranks_and_the_rest_is_padding(
    tmp_path: Path, base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_adapter(tmp_path / "small", MODULES, r=2)
    write_adapter(tmp_path / "large", MODULES, r=6)
    numbers = sum(sum(sizes) for sizes in MODULES.values())

    _, found = plan(
        capsys,
        *(base, "--max-loras", "3", "--max-lora-rank", "8", "--max-cpu-loras", "5"),
        *("--lora-modules", f"s={tmp_path / 'small'}", f"l={tmp_path / 'large'}"),
    )

    sizes = {a["name"]: (a["rank"], a["size_bytes"]) for a in found["adapters"]}
    assert sizes == {"s": (2, 4 * 2 * numbers), "l": (6, 4 * 6 * numbers)}
    total = found["slots"]["total"]
    assert total["used_bytes"] == 4 * 8 * numbers
    # two of three slots hold one; what does not divide by three stays with the empty slot
    occupied = total["used_bytes"] + total["padding_bytes"]
    assert occupied == pytest.approx(total["size_bytes"] * 2 / 3, abs=total["num_modules"])
    assert sum(total[f"{k}_bytes"] for k in ("used", "padding", "empty")) == total["size_bytes"]
    host = found["host_tier"]
    assert (host["num_adapters"], host["capacity"]) == (2, 5)
    assert host["size_bytes"] == 4 * 8 * numbers
    assert host["limit_bytes"] == 5 * 4 * 6 * numbers


def test_without_adapters_named_the_host_tier_is_for_the_highest_rank(
    base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = plan(capsys, base, "--max-lora-rank", "4")

    widths = sum(sum(sizes) for sizes in MODULES.values()) + 2 * (VOCAB + HIDDEN)
    assert found["host_tier"]["adapter_bytes"] == 4 * 4 * widths
    assert found["host_tier"]["limit_bytes"] == 32 * 4 * 4 * widths


def test_expert_slots_have_the_true_number_of_experts_and_the_chosen_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experts, hidden, inner, rank, slots = 5, 32, 24, 3, 2
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_local_experts=experts,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["full_attention"],
        architectures=["GptOssForCausalLM"],
        dtype="float32",
    )
    config.save_pretrained(tmp_path / "base")
    flags = [str(tmp_path / "base"), "--max-loras", str(slots), "--max-lora-rank", str(rank)]

    _, found = plan(capsys, *flags)
    _, shared = plan(capsys, *flags, "--enable-moe-shared-loras")

    per_rank = experts * (2 * hidden + 2 * inner + inner + hidden)
    size = found["slots"]["by_kind"]["experts"]["size_bytes"]
    assert 4 * slots * rank * per_rank <= size <= 4 * slots * rank * per_rank + 100
    per_rank_shared = 2 * hidden + experts * 2 * inner + experts * inner + hidden
    size = shared["slots"]["by_kind"]["experts"]["size_bytes"]
    assert 4 * slots * rank * per_rank_shared <= size <= 4 * slots * rank * per_rank_shared + 100


def test_bfloat16_on_a_cpu_is_planned_with_the_copies_that_serving_makes(
    base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = plan(capsys, base, "--dtype", "bfloat16", "--device", "cpu")

    has_copies = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    products = PARAMETERS - HIDDEN - LAYERS * 2 * HIDDEN  # norms are none; the head is tied
    assert found["weights"]["prepacked_bytes"] == (2 * products if has_copies else 0)
    assert found["lora_dtype"] == "bfloat16"


def test_the_stored_type_counts_where_the_configuration_names_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LlamaConfig.from_dict({**CONFIG.to_dict(), "dtype": None, "torch_dtype": None})
    config.save_pretrained(tmp_path / "base")
    save_file({"x": torch.zeros(1, dtype=torch.float16)}, tmp_path / "base" / "model.safetensors")

    _, found = plan(capsys, str(tmp_path / "base"), "--device", "cpu")

    assert found["dtype"] == "float16"


def test_layer_widths_agree_with_a_model_that_has_numbers(
    base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = plan(capsys, base)

    create: Any = AutoModelForCausalLM.from_config
    model = create(CONFIG)
    numbers = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert found["weights"]["size_bytes"] == numbers


def test_without_lora_there_are_no_slots(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = plan(capsys, base, "--no-enable-lora")

    assert status == 0
    assert found["slots"] is None
    assert found["host_tier"] is None
    assert found["lora_dtype"] is None


def test_more_than_the_machine_has_is_status_1(
    base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = plan(capsys, base, "--kv-cache-memory", "100000GiB")

    assert status == 1
    assert found["verdict"] == "does not fit"


def test_adapters_that_would_be_refused_are_problems(
    tmp_path: Path, base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_adapter(tmp_path / "a", MODULES, r=16)

    status, found = plan(
        capsys, base, "--max-lora-rank", "8", "--lora-modules", f"a={tmp_path / 'a'}"
    )

    assert status == 1
    assert len(found["problems"]) == 1
    assert "'a'" in found["problems"][0]
    assert "16" in found["problems"][0]


def test_a_trace_is_told_in_slots_and_bytes(
    tmp_path: Path, base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({"adapter": f"a{i % 3}"}) for i in range(300)))

    _, found = plan(
        capsys,
        *(base, "--trace", str(trace), "--target-hit-rate", "0.9"),
        *("--max-loras", "2", "--max-cpu-loras", "2"),
    )

    traffic = found["traffic"]
    assert (traffic["num_requests"], traffic["num_adapters"]) == (300, 3)
    # three in turn always miss in two, and hit in three but for their first uses
    assert traffic["slots"]["configured"]["hit_rate"] == 0
    assert traffic["slots"]["smallest"]["count"] == 3
    assert traffic["slots"]["smallest"]["hit_rate"] == pytest.approx(297 / 300)
    assert traffic["slots"]["smallest"]["size_bytes"] == 3 * found["slots"]["slot_bytes"]
    assert traffic["host"]["smallest"]["size_bytes"] == 3 * found["host_tier"]["adapter_bytes"]


def test_a_popularity_over_more_adapters_than_are_named(
    base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = plan(capsys, base, "--zipf", "1.2", "--num-adapters", "12")

    traffic = found["traffic"]
    rates = [rate["hit_rate"] for rate in traffic["slots"]["rates"]]
    assert rates == sorted(rates)
    assert rates[-1] == 1.0
    assert 1 < traffic["slots"]["smallest"]["count"] <= 12


def test_the_page_for_people_has_every_part(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", base, "--zipf", "1", "--num-adapters", "4"]) == 0

    page = capsys.readouterr().out
    for part in ("base weights", "KV cache", "LoRA slots", "padding", "host tier", "workspace"):
        assert part in page
    assert "fits" in page
    assert "are enough" in page


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--target-hit-rate", "0"], "--target-hit-rate"),
        (["--target-hit-rate", "1.1"], "--target-hit-rate"),
        (["--zipf", "-1"], "--zipf"),
        (["--zipf", "nan", "--num-adapters", "3"], "--zipf"),
        (["--zipf", "1"], "--num-adapters"),
        (["--num-adapters", "3"], "--zipf"),
        (["--zipf", "1", "--num-adapters", "0"], "--num-adapters"),
        (["--zipf", "1", "--num-adapters", "2", "--no-enable-lora"], "--no-enable-lora"),
        (["--max-loras", "0"], "--max-loras"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_flags_that_mean_nothing_are_refused(
    base: str, capsys: pytest.CaptureFixture[str], flags: list[str], part: str
) -> None:
    assert main(["plan", base, *flags]) == 1

    assert part in capsys.readouterr().err


def test_sizes_are_written_with_their_unit() -> None:
    assert [size_text(n) for n in (0, 1023, 1024, 1536 * 1024, 5 * 1024**4)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "5.0 TiB",
    ]
