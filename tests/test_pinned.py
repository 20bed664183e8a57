"""The losses of ten training steps of each scheme are pinned, in pinned_losses.json.

So a change of initial weights, order of batches, schedule or arithmetic shows. A change that
is meant is a line of CHANGELOG.md, and new numbers: python tests/test_pinned.py NAME ...
writes the rows of these schemes, and without a name of all.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import BUILT_IN, write_dataset

import train
from model import GPT, GPTConfig
from nanolong.run import read_log

FILE = Path(__file__).with_name("pinned_losses.json")
SETTINGS = {"batch_size": 2, "gradient_accumulation_steps": 2, "max_iters": 10, "warmup_iters": 3}
SETTINGS |= {"eval_interval": 5, "eval_iters": 4, "log_interval": 1, "device": "cpu"}
SETTINGS |= {"dtype": "float32", "compile": False, "min_lr": 1e-4}


def losses_of(pos, folder):
    """The training losses of ten steps, and the validation losses, of a tiny model in float64.

    In float32 the random numbers of the initial weights depend on the processor.
    """
    meta = {"tokenizer": None, "vocab_size": 41, "bos": None, "bos_default": False}
    tokens = [(i * i // 3 + 7 * i) % 41 for i in range(1200)]
    dataset = write_dataset(folder / f"{pos}-data", tokens, tokens[::-1][:300], **meta)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(1)
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 24, "vocab_size": 41}
        model = GPT(GPTConfig(pos=pos, **sizes))
        out_dir = str(folder / pos)
        cfg = train.TrainConfig(dataset=str(dataset), out_dir=out_dir, bos=False, **SETTINGS)
        train.train(model, cfg)
    finally:
        torch.set_default_dtype(default)
    return [row.get("loss", row.get("val_loss")) for row in read_log(out_dir)]


@pytest.mark.parametrize("pos", BUILT_IN)
def test_ten_steps_have_the_pinned_losses(pos, tmp_path):
    pinned = json.loads(FILE.read_text()).get(pos, [])
    assert pinned, f"run python tests/test_pinned.py {pos}"
    assert len(set(pinned)) == len(pinned) > 10
    assert losses_of(pos, tmp_path) == pytest.approx(pinned, rel=1e-9)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        found = {pos: losses_of(pos, Path(name)) for pos in sys.argv[1:] or BUILT_IN}
    found = json.loads(FILE.read_text()) | found
    rows = ",\n".join(f' "{pos}": {json.dumps(losses)}' for pos, losses in found.items())
    FILE.write_text(f"{{\n{rows}\n}}\n")
