"""Broken adapters by the thousand: `inspect_adapter` has to report each; no exception, no hang.

    python packages/lora-weights/tests/fuzz_inspect.py --count 20000 --seed 1

Case `i` of seed `s` is always the same; ``--only i`` runs it alone and shows what it found. Exits
with 1 when a case raised, hung, or was said to load and did not.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lora_weights import AdapterReport, RawAdapter, inspect_adapter, load_adapter, save_adapter
from lora_weights.tensors import write_safetensors
from lora_weights.testing import build_raw_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INDEX = "adapter_model.safetensors.index.json"
PREFIX = "base_model.model."
EXTRA_MEMORY = 2**30
"""Bytes a case may take beyond what the process has; a header's claim must not come near."""

WAIT_FACTOR = 30
"""Seconds on the clock for each second of processor time that a case may take."""

MAX_CHANGED = 2**20
"""Bytes of files that a second change can be made to."""

MODULES = {"model.layers.0.self_attn.q_proj": (8, 8), "model.layers.0.mlp.up_proj": (8, 16)}
Q, UP = MODULES


def seeds(root: Path) -> list[Path]:
    """Write one valid adapter of each format; return their folders."""
    plain = build_raw_adapter(MODULES, r=2, rank_pattern={"q_proj": 4}, alpha_pattern={"up": 3})
    raws = {
        "plain": plain,
        "bf16": build_raw_adapter(MODULES, r=2, dtype=torch.bfloat16, use_rslora=True),
        "embedding": build_raw_adapter({"lm_head": (8, 32)}, r=2, embeddings={"embed": (32, 8)}),
        "regex": build_raw_adapter(MODULES, r=2, target_modules=r".*\.(q|up)_proj"),
        "dora": _with(plain, {f"{m}.lora_magnitude_vector": (MODULES[m][1],) for m in MODULES},
                      use_dora=True),
        "bias": _with(plain, {f"{Q}.lora_B.bias": (8,), f"{UP}.lora_B.bias": (16,),
                              f"{Q}.bias": (8,)}, lora_bias=True, bias="all"),
        "full": _with(plain, {"score.weight": (3, 8)}, modules_to_save=["score"]),
        "tokens": _with(plain, {"embed_tokens.token_adapter.trainable_tokens_delta": (2, 8)},
                        trainable_token_indices={"embed_tokens": [1, 5]}),
        "experts": _with(plain, {"model.layers.0.mlp.experts.lora_A.weight": (8, 8),
                                 "model.layers.0.mlp.experts.lora_B.weight": (16, 8)},
                         target_parameters=["mlp.experts.gate_up_proj"]),
        "ia3": _only({f"{Q}.ia3_l": (8, 1)}, peft_type="IA3", feedforward_modules=[]),
        "loha": _only({f"{Q}.hada_w{i}_{ab}": (8, 2) if ab == "a" else (2, 8)
                              for i in (1, 2) for ab in "ab"}, peft_type="LOHA", alpha=4, r=2),
        "lokr": _only({f"{Q}.lokr_w1": (2, 2), f"{Q}.lokr_w2": (4, 4)},
                      peft_type="LOKR", alpha=4, r=2),
        "vera": _only({f"{Q}.vera_lambda_b": (8,), f"{Q}.vera_lambda_d": (2,),
                              "vera_A": (2, 8), "vera_B": (8, 2)}, peft_type="VERA", r=2),
    }  # fmt: skip
    folders = [save_adapter(raw, root / name) for name, raw in raws.items()]
    sharded = save_adapter(plain, root / "sharded")
    (sharded / WEIGHTS).unlink()
    keys = sorted(plain.tensors)
    for i in range(2):
        write_safetensors(sharded / f"s{i}.safetensors", {k: plain.tensors[k] for k in keys[i::2]})
    table = {key: f"s{i % 2}.safetensors" for i, key in enumerate(keys)}
    (sharded / INDEX).write_text(json.dumps({"weight_map": table}))
    pickled = save_adapter(plain, root / "pickled")
    (pickled / WEIGHTS).unlink()
    torch.save(dict(plain.tensors), pickled / "adapter_model.bin")
    return [*folders, sharded, pickled]


def _with(raw: RawAdapter, more: dict[str, tuple[int, ...]], **config: object) -> RawAdapter:
    """Return an adapter with more tensors and other fields."""
    tensors = {f"{PREFIX}{key}": torch.rand(shape) for key, shape in more.items()}
    return RawAdapter(config={**raw.config, **config}, tensors={**raw.tensors, **tensors})


def _only(tensors: dict[str, tuple[int, ...]], **config: object) -> RawAdapter:
    """Return an adapter of another method, with these tensors alone."""
    fields = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"], **config}
    return _with(RawAdapter(config=fields, tensors={}), tensors)


EVIL: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, 2**64, 10**400, 1.5, -0.0, 1e308, float("nan"),
    float("inf"), "", " ", "x" * 10_000, "\x00", "\x1b[2J", "\ud800", "\u202e", "(a+)+$", "(" * 500,
    "[", "*", ".*", r"(?P<a>x)(?P=a)", "../../x", "/etc/passwd", [], {}, [[]], [None], {"": None},
    {"a": {"b": []}}, "LORA", "IA3", "F32", "BF16", "F4", "BOOL", "all-linear", "q_proj",
    [1, 2, 3], ["q_proj", "q_proj"], {"q_proj": -1}, {"(a+)+$": 4}, list(range(300)),
]  # fmt: skip
NAMES = ["", "\n", "\ud800", "lora_A", "x" * 5000, f"{PREFIX}{Q}.lora_A.weight", ".", "..", "a.b.",
         "score.weight", f"{Q}.lora_B.bias", "lm_head.weight", "\u0000", "lora_E"]  # fmt: skip


def _nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every place in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield value, key
        if isinstance(item, (dict, list)):
            yield from _nodes(item)


def edit(value: Any, rng: random.Random) -> Any:
    """Change a JSON value in one to three places."""
    for _ in range(rng.randint(1, 3)):
        places = list(_nodes(value))
        if not places:
            return rng.choice(EVIL)
        container, key = rng.choice(places)
        match rng.randrange(6):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[rng.choice(NAMES)] = container.pop(key)
            case 2:
                other, other_key = rng.choice(places)
                container[key] = json.loads(json.dumps(other[other_key]))
            case 3 if isinstance(container[key], int):
                container[key] += rng.choice([-1, 1, 2**31, -(2**40), 2**60])
            case _:
                container[key] = rng.choice(EVIL)
        if rng.random() < 0.02:
            return rng.choice(EVIL)
    return value


def text_of(value: Any, rng: random.Random) -> bytes:
    """Write a JSON value, sometimes in a way that no writer would."""
    text = json.dumps(value)
    roll = rng.random()
    if roll < 0.05 and text.startswith("{"):
        text = "{" + text[1:-1] + ("," if len(text) > 2 else "") + text[1:]
    elif roll < 0.08:
        text = text.replace("null", "[" * 50_000 + "]" * 50_000, 1)
    elif roll < 0.1:
        text = text.replace("2", "2" * 6000, 1)
    elif roll < 0.12:
        text = "\ufeff" + text
    return text.encode(errors="surrogatepass")


def split(content: bytes) -> tuple[Any, bytes]:
    """Return header and data of a safetensors file."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def mutate_json(path: Path, rng: random.Random) -> None:
    """Edit a configuration or an index."""
    path.write_bytes(text_of(edit(json.loads(path.read_bytes()), rng), rng))


def mutate_header(path: Path, rng: random.Random) -> None:
    """Edit a header and keep the data."""
    header, data = split(path.read_bytes())
    text = text_of(edit(header, rng), rng)
    lies = [0, 1, 2**60, 2**64 - 1, len(text) + 1]
    length = len(text) if rng.random() < 0.9 else rng.choice(lies)
    path.write_bytes(struct.pack("<Q", length) + text + data)


def mutate_tensors(path: Path, rng: random.Random) -> None:
    """Rename, drop, swap, reshape or retype tensors, so that the file stays well-formed."""
    header, data = split(path.read_bytes())
    keys = [key for key in header if key != "__metadata__"]
    for _ in range(rng.randint(1, 3)):
        key = rng.choice(keys)
        entry = header.get(key)
        if entry is None:
            continue
        match rng.randrange(5):
            case 0:
                header[rng.choice(NAMES) + rng.choice(["", key])] = header.pop(key)
            case 1:
                other = rng.choice(keys)
                if other in header:
                    header[key], header[other] = header[other], header[key]
            case 2:
                shape = entry["shape"]
                doubled = [shape[0] * 2, *shape[1:]]
                entry["shape"] = rng.choice([shape[::-1], [*shape, 1], doubled])
            case 3:
                size = entry["data_offsets"][1] - entry["data_offsets"][0]
                entry["dtype"], width = rng.choice(
                    [("F16", 2), ("BF16", 2), ("I32", 4), ("U8", 1), ("F64", 8), ("F8_E4M3", 1)]
                )
                entry["shape"] = [size // width]
            case _:
                start, end = entry["data_offsets"]
                pattern = rng.choice([b"\x00" * 4, b"\xff" * 4, b"\x00\x00\x80\x7f"])
                count = min(end - start, len(data)) // 4
                data = data[:start] + pattern * count + data[end:]
    text = json.dumps(header).encode(errors="surrogatepass")
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def mutate_bytes(path: Path, rng: random.Random) -> None:
    """Flip, cut, repeat or add bytes."""
    content = bytearray(path.read_bytes())
    match rng.randrange(4):
        case 0:
            for _ in range(rng.randint(1, 30)):
                content[rng.randrange(len(content))] = rng.randrange(256)
        case 1:
            content = content[: rng.randrange(len(content) + 1)]
        case 2:
            content += rng.randbytes(rng.randint(1, 64))
        case _:
            start = rng.randrange(len(content))
            content[start : start + rng.randint(1, 16)] = rng.randbytes(rng.randint(0, 16))
    path.write_bytes(content)


def mutate_file(path: Path, rng: random.Random) -> None:
    """Remove a file, or put something else in its place."""
    path.unlink()
    match rng.randrange(6):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to(path.name)
        case 2:
            path.write_bytes(b"")
        case 3:
            path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
        case 4:
            with path.open("wb") as stream:
                stream.truncate(rng.choice([2**20, 2**34]))
        case _:
            pass


def mutate(folder: Path, rng: random.Random) -> str:
    """Break one adapter folder; return how."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    files = [path for path in files if path.stat().st_size < MAX_CHANGED]
    if not files:
        return "nothing left to change"
    path = rng.choice(files)
    kinds: list[Callable[[Path, random.Random], None]] = [mutate_bytes]
    if path.suffix == ".json":
        kinds += [mutate_json] * 6
    elif path.suffix == ".safetensors":
        kinds += [mutate_header, mutate_tensors] * 3
    kind = mutate_file if rng.random() < 0.05 else rng.choice(kinds)
    # A file that the first of two changes broke may be no JSON, or empty; then the second has none.
    with suppress(ValueError, TypeError, LookupError, AttributeError, struct.error, RecursionError):
        kind(path, rng)
    return f"{folder.name}/{path.name} {kind.__name__}"


def check(folder: Path, rng: random.Random) -> str:
    """Inspect a folder and use the report as a doctor does; return the outcome."""
    read_tensors = rng.random() < 0.8
    report = inspect_adapter(
        folder,
        read_tensors=read_tensors,
        allow_pickle=True,
        max_rank=rng.choice([None, 2, 64]),
        max_bytes=2**28,
    )
    _print(report)
    if not report.is_loadable:
        return str(report.problems[0].code) if report.problems else "no problem in the headers"
    assert not report.problems, report.problems
    assert load_adapter(folder, allow_pickle=True, max_bytes=2**28).digest == report.digest
    return "loads"


def _print(report: AdapterReport) -> None:
    """Write everything a report says as text that a terminal or a log can take."""
    texts = [*map(str, report.problems), *report.warnings, *map(str, report.modules)]
    "\n".join([*texts, str(report.base_model), str(report.digest)]).encode()
    assert report.rank >= 0


class HangError(BaseException):
    """A case took too long. No ordinary exception, so that nothing takes it for one of its own."""


def _on_alarm(*_: object) -> NoReturn:
    raise HangError


def run_case(index: int, seed: int, folders: list[Path], limit_s: float, *, show: bool) -> str:
    """Break and inspect one adapter; return the outcome, "exception" and "hang" among them."""
    rng = random.Random(f"{seed}/{index}")
    with tempfile.TemporaryDirectory() as root:
        source = rng.choice(folders)
        folder = Path(shutil.copytree(source, Path(root) / source.name))
        how = " and ".join(mutate(folder, rng) for _ in range(rng.choice([1, 1, 1, 2])))
        # Processor time, so that a busy machine makes no hang.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        # A case that waits uses none, and native code sees no alarm: then this ends the process,
        # and shows where it was.
        faulthandler.dump_traceback_later(WAIT_FACTOR * limit_s, exit=True)
        details = ""
        try:
            outcome = check(folder, rng)
        except HangError:
            outcome, details = "hang", traceback.format_exc()
        except Exception:  # noqa: BLE001 - any exception is what this looks for
            outcome, details = "exception", traceback.format_exc()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            faulthandler.cancel_dump_traceback_later()
        if show or details:
            sys.stdout.write(f"case {index}: {outcome}: {how}\n{details}")
            sys.stdout.flush()
        return outcome


def main() -> int:
    """Run the cases and print how often each outcome came."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=20_000, help="cases to run")
    parser.add_argument("--seed", type=int, default=1, help="of all randomness")
    parser.add_argument("--limit-s", type=float, default=5.0, help="processor seconds of one case")
    parser.add_argument("--only", type=int, help="run this case alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    signal.signal(signal.SIGPROF, _on_alarm)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        folders = seeds(Path(root))
        broken = {f.name: inspect_adapter(f, allow_pickle=True).problems for f in folders}
        broken = {name: problems for name, problems in broken.items() if problems}
        if broken:
            sys.stdout.write(f"not valid to begin with: {broken}\n")
            return 1
        status = Path("/proc/self/status").read_text()
        used = int(status.partition("VmSize:")[2].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_MEMORY, resource.RLIM_INFINITY))
        only = arguments.only
        cases = range(arguments.count) if only is None else range(only, only + 1)
        outcomes = Counter(
            run_case(i, arguments.seed, folders, arguments.limit_s, show=only is not None)
            for i in cases
        )
    for outcome, count in outcomes.most_common():
        sys.stdout.write(f"{count:8d}  {outcome}\n")
    seconds = time.perf_counter() - start
    sys.stdout.write(f"{sum(outcomes.values())} cases, seed {arguments.seed}, {seconds:.0f} s\n")
    return 1 if outcomes["exception"] or outcomes["hang"] else 0


if __name__ == "__main__":
    sys.exit(main())
