"""A public checkpoint, SmolLM2-135M-Instruct, compared with transformers: losses and bytes.

Slow, and only where its file is at hand: make smollm2 fetches it, and NANOLONG_SMOLLM2 names it.
The text is part of a module of the standard library, or the file that NANOLONG_TEXT names.
"""

import _pydecimal
import json
import math
import os
import subprocess
from pathlib import Path

import pytest
from conftest import DEVICE, OFFLINE, assert_success, command_of, run_python
from test_gguf_tokenizer import HARD_TEXT

from data import tokenizer_from_json
from nanolong.chat import encode_chat
from nanolong.run import find_checkpoint, read_meta

pytest.importorskip("gguf", reason="these need the gguf package: pip install gguf")
pytest.importorskip("accelerate", reason="transformers reads GGUF with it: pip install accelerate")

REAL_FILE = os.environ.get("NANOLONG_SMOLLM2", "")
LENGTHS = (2048, 8192)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not REAL_FILE, reason="it needs SmolLM2's file: make smollm2, and set NANOLONG_SMOLLM2"
    ),
]

# transformers reads the file itself, and the tokenizers package the exported tokenizer.json; the
# bytes are those of all tokens but the first, which nothing predicts.
SCRIPT = """
import json, sys
import tokenizers
import torch
import torch.nn.functional as F
from pathlib import Path
from transformers import AutoModelForCausalLM

file, tokenizer, text, lengths, output = sys.argv[1:]
file = Path(file)
text = Path(text).read_bytes().decode()
encoding = tokenizers.Tokenizer.from_file(tokenizer).encode(text, add_special_tokens=False)
model = AutoModelForCausalLM.from_pretrained(
    file.parent, gguf_file=file.name, dtype=torch.float32
).eval()
span = len(encoding.ids) - 1
ids = torch.tensor(encoding.ids)
answers = {"bytes": len(text[encoding.offsets[1][0] :].encode())}
for length in json.loads(lengths):
    ends = [*range(length, span, length), span]
    total, scored = 0.0, 0
    for end in ends:
        x = ids[end - length : end + 1]
        new = end - scored
        with torch.no_grad():
            hidden = model.model(x[None, :-1])[0][0, -new:]
            for part, targets in zip(hidden.split(1024), x[-new:].split(1024)):
                logits = model.lm_head(part).double()
                total += F.cross_entropy(logits, targets, reduction="sum").item()
        scored = end
    assert scored == span
    answers[str(length)] = total / scored
Path(output).write_text(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def real_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    run_script("hf.py", "import", REAL_FILE, folder / "run")
    run_script("hf.py", "export", folder / "run", folder / "exported", "--verify=false")
    return folder


def run_script(script, *words):
    command = command_of(script, *words)
    return assert_success(subprocess.run(command, capture_output=True, text=True)).stdout


def test_it_continues_a_sentence_as_text(real_run):
    words = ["--start=The capital of France is", "--max_new_tokens=8", "--temperature=0"]
    text = run_script("sample.py", real_run / "run", *words)
    assert "The capital of France is Paris." in text
    assert "Ġ" not in text and "Ċ" not in text


CHAT_SCRIPT = """
import json, sys
from pathlib import Path
from transformers import AutoTokenizer

file = Path(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
words = {"add_generation_prompt": True, "return_dict": False}
conversations = json.loads(sys.argv[2])
print(json.dumps([tokenizer.apply_chat_template(turns, **words) for turns in conversations]))
"""


def test_a_conversation_is_encoded_as_transformers_does(real_run, tmp_path):
    """By the template and the tokenizer that it reads from the file itself."""
    pairs = [("What is the capital of France?", ""), (" x<|im_end|>\n  é <b>&", "Be brief.\n")]
    pairs += [(HARD_TEXT, "")]
    conversations = []
    for message, system in pairs:
        turns = [{"role": "system", "content": system}] if system else []
        conversations.append([*turns, {"role": "user", "content": message}])
    words = [REAL_FILE, json.dumps(conversations)]
    done = assert_success(run_python(CHAT_SCRIPT, *words, cwd=tmp_path, env=OFFLINE))
    meta = read_meta(find_checkpoint(real_run / "run"))
    tokenizer = tokenizer_from_json(meta["tokenizer"])
    encoded = [encode_chat(tokenizer, message, system) for message, system in pairs]
    assert [ids for ids, _ in encoded] == json.loads(done.stdout)
    assert all(stop == {2} for _, stop in encoded)


def test_it_answers_a_question_and_stops(real_run):
    words = ["--chat", "--start=What is the capital of France?", "--temperature=0"]
    words += ["--max_new_tokens=30", "--dtype=float32"]  # bfloat16 says something else on some CPUs
    assert run_script("sample.py", real_run / "run", *words) == "The capital of France is Paris.\n"


def test_loss_and_bits_per_byte_are_those_of_transformers(real_run, tmp_path):
    text = Path(os.environ.get("NANOLONG_TEXT", tmp_path / "text.txt"))
    if "NANOLONG_TEXT" not in os.environ:
        text.write_bytes(Path(_pydecimal.__file__).read_bytes()[:64000])
    # of a text that is longer, evaluate.py would choose parts all over it
    words = [f"--text={text}", "--protocol=chunked", "--max_tokens=100000000"]
    words += [f"--lengths={','.join(map(str, LENGTHS))}", "--dtype=float32", f"--device={DEVICE}"]
    run_script("evaluate.py", real_run / "run", *words, f"--json={tmp_path}/records.json")
    records = json.loads((tmp_path / "records.json").read_text())

    words = [REAL_FILE, real_run / "exported" / "tokenizer.json", text]
    words += [json.dumps(LENGTHS), "answers.json"]
    assert_success(run_python(SCRIPT, *words, cwd=tmp_path, env=OFFLINE))
    answers = json.loads((tmp_path / "answers.json").read_text())
    for record in records:
        theirs = answers[str(record["length"])]
        nats = record["loss"] * record["tokens"]
        bits = nats / record["bytes"] / math.log(2)
        expected = theirs * record["tokens"] / answers["bytes"] / math.log(2)
        print(
            f"{record['tokens']} tokens at {record['length']}: perplexity "
            f"{math.exp(record['loss']):.6f}, transformers {math.exp(theirs):.6f}; bits per byte "
            f"{bits:.6f}, transformers {expected:.6f}"
        )
        assert record["bytes"] == answers["bytes"]
        assert bits == pytest.approx(expected, abs=1e-4)
        assert math.exp(record["loss"]) == pytest.approx(math.exp(theirs), rel=1e-4)
    assert [record["length"] for record in records] == list(LENGTHS)


def test_the_exported_tokenizer_files_are_there(real_run):
    names = {file.name for file in Path(real_run / "exported").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "model.safetensors"} <= names
    settings = json.loads((real_run / "exported" / "tokenizer_config.json").read_text())
    assert "<|im_start|>" in settings["chat_template"]
