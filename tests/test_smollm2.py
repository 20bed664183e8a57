"""A public checkpoint, SmolLM2-135M-Instruct, compared with transformers: losses and bytes.

Slow, and only where its file is at hand: make smollm2 fetches it, and NANOLONG_SMOLLM2 names it.
The text is part of a module of the standard library, or the file that NANOLONG_TEXT names.
"""

import _pydecimal
import json
import os
from pathlib import Path

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from conftest import DEVICE, assert_success, command_of, run_command
from makers import HARD_TEXT
from transformers import AutoModelForCausalLM, AutoTokenizer

from data import tokenizer_from_json
from nanolong.chat import encode_chat
from nanolong.run import find_checkpoint, read_meta

pytest.importorskip("accelerate", reason="transformers reads GGUF with it: pip install accelerate")

REAL_FILE = os.environ.get("NANOLONG_SMOLLM2", "")
LENGTHS = (2048, 8192)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not REAL_FILE, reason="it needs SmolLM2's file: make smollm2, and set NANOLONG_SMOLLM2"
    ),
]


@pytest.fixture(scope="module")
def real_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    run_script("hf.py", "import", REAL_FILE, folder / "run")
    run_script("hf.py", "export", folder / "run", folder / "exported", "--verify=false")
    return folder


def run_script(script, *words):
    return assert_success(run_command(command_of(script, *words))).stdout


def test_a_conversation_is_encoded_as_transformers_does(real_run):
    """By the template and the tokenizer that it reads from the file itself."""
    file = Path(REAL_FILE)
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = tokenizer_from_json(read_meta(find_checkpoint(real_run / "run"))["tokenizer"])
    pairs = [("What is the capital of France?", ""), (" x<|im_end|>\n  é <b>&", "Be brief.\n")]
    for message, system in [*pairs, (HARD_TEXT + "<|im_start|>user\n", "")]:
        turns = [{"role": "system", "content": system}] if system else []
        turns.append({"role": "user", "content": message})
        words = {"add_generation_prompt": True, "return_dict": False}
        expected = theirs.apply_chat_template(turns, **words)
        assert encode_chat(tokenizer, message, system) == (expected, {2})


def test_it_continues_a_sentence_as_text_and_answers_a_question(real_run):
    words = ["--start=The capital of France is", "--max_new_tokens=8", "--temperature=0"]
    text = run_script("sample.py", real_run / "run", *words)
    assert "The capital of France is Paris." in text
    assert "Ġ" not in text and "Ċ" not in text
    words = ["--chat", "--start=What is the capital of France?", "--temperature=0"]
    words += ["--max_new_tokens=30", "--dtype=float32"]  # bfloat16 says something else on some CPUs
    assert run_script("sample.py", real_run / "run", *words) == "The capital of France is Paris.\n"


@torch.no_grad()
def their_loss(model, ids, length):
    """Nats per token in windows of a length, the last of which overlaps the one before."""
    n_scored = len(ids) - 1
    total, scored = 0.0, 0
    for end in [*range(length, n_scored, length), n_scored]:
        x = ids[end - length : end + 1]
        new = end - scored
        hidden = model.model(x[None, :-1])[0][0, -new:]
        for part, targets in zip(hidden.split(1024), x[-new:].split(1024), strict=True):
            logits = model.lm_head(part).double()
            total += F.cross_entropy(logits, targets, reduction="sum").item()
        scored = end
    return total / n_scored


def test_loss_and_bits_per_byte_are_those_of_transformers(real_run, tmp_path):
    """It reads the GGUF file itself, and the tokenizers package the exported tokenizer.json."""
    text = Path(os.environ.get("NANOLONG_TEXT", tmp_path / "text.txt"))
    if "NANOLONG_TEXT" not in os.environ:
        text.write_bytes(Path(_pydecimal.__file__).read_bytes()[:64000])
    # of a text that is longer, evaluate.py would choose parts all over it
    words = [f"--text={text}", "--protocol=chunked", "--max_tokens=100000000"]
    words += [f"--lengths={','.join(map(str, LENGTHS))}", "--dtype=float32", f"--device={DEVICE}"]
    run_script("evaluate.py", real_run / "run", *words, f"--json={tmp_path}/records.json")
    records = json.loads((tmp_path / "records.json").read_text())
    assert [record["length"] for record in records] == list(LENGTHS)

    package = tokenizers.Tokenizer.from_file(str(real_run / "exported" / "tokenizer.json"))
    content = text.read_bytes().decode()
    encoding = package.encode(content, add_special_tokens=False)
    # those of all tokens but the first, which nothing predicts
    n_bytes = len(content[encoding.offsets[1][0] :].encode())
    file = Path(REAL_FILE)
    options = {"gguf_file": file.name, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(file.parent, **options).eval()
    for record in records:
        expected = their_loss(model, torch.tensor(encoding.ids), record["length"])
        print(f"{record['tokens']} tokens at {record['length']}: {record['loss']:.6f} nats, ")
        print(f"transformers {expected:.6f}; {n_bytes} bytes")
        assert (record["bytes"], record["tokens"]) == (n_bytes, len(encoding.ids) - 1)
        assert record["loss"] == pytest.approx(expected, abs=1e-4)
