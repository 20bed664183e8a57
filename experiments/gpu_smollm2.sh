#!/usr/bin/env bash
# public.py on a GPU: contexts of 32,768 tokens, 1 M and 4 M tokens of fine-tuning, more arms of (b).
#
#   experiments/gpu_smollm2.sh FILE.gguf [FOLDER]    by default out/gpu-smollm2; once more goes on
#
# FOLDER/public.jsonl has the cells, and its report is next to it. Where files of 94 MB cannot be
# sent, send two parts below 60 MB (split -b 50M FILE.gguf part-) and join them (cat part-?? > FILE.gguf).

set -eu
if [ ! -f "${1:-}" ]; then
  echo "error: ${1:-no file} is no checkpoint: give FILE.gguf, which make smollm2 downloads" >&2
  exit 2
fi
file=$(realpath "$1")
cd "$(dirname "$0")/.."
folder=${2:-out/gpu-smollm2}
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
python=${PYTHON:-$python}
mkdir -p "$folder"

public() {
  "$python" experiments/public.py "$@" "--cells=$folder/public.jsonl" --lengths=2048,8192,32768 \
    --tokens=1048576,4194304 --find_length=24576 --prompts=16 \
    --finders=untouched,yarn,MrRoPE,lm-infinite,self-extend,jet-long,yarn+1048576,none+1048576
}

# what can be compared ends first: a report is written of what there is
for part in a b c; do
  public "$file" "$part"
  public report
done
