"""The commands as a user types them, in processes of their own and cut off from any hub."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from support.requests import NUM_TOKENS, PROMPT, complete
from support.server import BASE_NAME, command, run_to_end

if TYPE_CHECKING:
    from support.worlds import World

WITHIN_S = 300.0
"""The first run on a machine converts the embedded model, which takes half a minute."""


def test_demo_once_answers_with_every_adapter_and_exits_with_0() -> None:
    prepared = run_to_end("demo", "--prepare", within_s=WITHIN_S)
    shown = run_to_end("demo", "--once", within_s=WITHIN_S)

    assert prepared.returncode == 0, prepared.stderr
    names = json.loads(prepared.stdout)
    assert Path(names["model"], "config.json").is_file()
    assert len(names["adapters"]) == 3
    assert all(Path(path, "adapter_config.json").is_file() for path in names["adapters"].values())
    assert shown.returncode == 0, shown.stderr + shown.stdout
    assert [name for name in names["adapters"] if name not in shown.stdout] == []
    assert Path(names["model"]).name in shown.stdout


def test_help_and_mistakes_are_answered_in_words() -> None:
    help_text = run_to_end("--help")
    mistake = run_to_end("serve", "/nowhere", "--max-lorras", "4")

    assert help_text.returncode == 0
    assert all(command in help_text.stdout for command in ("serve", "demo", "bench"))
    assert mistake.returncode in {1, 2}
    assert "--max-lorras" in mistake.stderr
    assert "Traceback" not in mistake.stderr


def test_serve_says_its_address_answers_and_ends_with_0_on_ctrl_c(llama: World) -> None:
    name = ("--served-model-name", BASE_NAME)
    flags = (*name, "--port", "0", "--dtype", "float32", *llama.lora_modules("a05"))
    arguments = command("serve", str(llama.base), *flags)

    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            address = next(line for line in process.stderr if line.startswith("Serving"))
            with httpx.Client(base_url=address.split()[-1], timeout=60) as client:
                answer = complete(client, "a05")
            process.send_signal(signal.SIGINT)
            rest = process.stderr.read()
            status = process.wait(30)
        finally:
            process.kill()

    assert answer == llama.oracle.greedy("a05", PROMPT, NUM_TOKENS).token_ids
    assert status == 0, rest
    assert "Traceback" not in rest
