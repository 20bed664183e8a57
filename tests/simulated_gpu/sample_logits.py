"""Run sample.py, and keep the logits that each token was sampled from, as JSON.

sample_logits.py FILE ARGUMENTS_OF_SAMPLE
"""

import json
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from nanolong import inference  # noqa: E402


def main():
    file = Path(sys.argv.pop(1))
    rows = []
    sample_token = inference.sample_token

    def keep(logits, *settings):
        rows.append(logits[0].tolist())
        return sample_token(logits, *settings)

    inference.sample_token = keep
    try:
        runpy.run_path(str(ROOT / "sample.py"), run_name="__main__")
    finally:
        file.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
