#!/usr/bin/env bash
# Ten minutes of a GPU: the benchmarks of bench.py in order of their worth.
#
#   experiments/gpu_minutes.sh --seconds=570 --nanogpt=PATH    on a GPU; once more goes on from there
#   experiments/gpu_minutes.sh --try                           the steps on a CPU, at toy sizes
#
#   --seconds=N    the deadline; what is running then is ended, and begun again by the next call
#   --nanogpt=PATH a checkout of nanoGPT; without it our programs stand alone
#   --out=FOLDER   by default out/gpu-minutes, or out/gpu-minutes-try: minutes.md and minutes.json
#                  with all tables, log.txt, and steps/ by which the next call knows what is done
#   --patience=N   wait N times as long for each step, on a slow machine
#   --copy=FOLDER  copy the first three there after each step
#
# It needs torch from 2.11 on with its triton, and what requirements.txt lists besides, but no
# network. PYTHON=... in front of it is the interpreter; by default .venv's, or python3.
# Exit status: 0 if all steps are done, 1 if one failed, 3 if some are left for the next call.

set -u
cd "$(dirname "$0")/.." || exit 2

seconds=570 nanogpt="" out="" copy="" is_try="" patience=1
for word in "$@"; do
  case $word in
    --seconds=*) seconds=${word#*=} ;;
    --nanogpt=*) nanogpt=${word#*=} ;;
    --out=*) out=${word#*=} ;;
    --patience=*) patience=${word#*=} ;;
    --copy=*) copy=${word#*=} ;;
    --try) is_try=1 ;;
    --help|-h) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: there is no option $word: see the first lines of $0" >&2; exit 2 ;;
  esac
done
for number in "seconds=$seconds" "patience=$patience"; do
  case ${number#*=} in
    ''|*[!0-9]*) echo "error: --$number is no whole number: give one such as 570" >&2; exit 2 ;;
  esac
done
if [ -n "$nanogpt" ] && [ ! -f "$nanogpt/model.py" ]; then
  echo "error: $nanogpt/model.py is missing: give --nanogpt=PATH of a checkout of nanoGPT" >&2
  exit 2
fi
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
python=${PYTHON:-$python}
out=${out:-out/gpu-minutes${is_try:+-try}}
mkdir -p "$out/steps" ${copy:+"$copy"}
# Inductor and Triton compile a program once for all steps.
export TORCHINDUCTOR_CACHE_DIR=$PWD/out/gpu-cache/inductor
export TRITON_CACHE_DIR=$PWD/out/gpu-cache/triton
export PYTHONUNBUFFERED=1
deadline=$(($(date +%s) + seconds))
left=0 failed=0 child=""

gather() {  # all tables in one file of each kind
  "$python" - "$out" <<'END'
import json, pathlib, sys
out = pathlib.Path(sys.argv[1])
text, steps = [], []
for folder in sorted((out / "steps").iterdir()):
    status = (folder / "status").read_text().strip()
    tables = sorted(folder.glob("*.md"))
    text += [f"## {folder.name}: {status}", "", *(t.read_text().strip() + "\n" for t in tables)]
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    steps.append({"step": folder.name, "status": status, "tables": found})
(out / "minutes.md").write_text("\n".join(text) + "\n")
(out / "minutes.json").write_text(json.dumps(steps, indent=1) + "\n")
logs = [f"==== {file.parent.name}\n{file.read_text()}" for file in sorted(out.glob("steps/*/log"))]
(out / "log.txt").write_text("".join(logs))
END
  [ -z "$copy" ] || cp "$out"/minutes.md "$out"/minutes.json "$out"/log.txt "$copy"/
}

say() {  # keep what became of a step, and print it
  echo "$2" > "$out/steps/$1/status"
  echo "$1: $2"
}

stop() {
  [ -z "$child" ] || kill "$child" 2> /dev/null
  gather
  exit 143
}
trap stop TERM INT

step() {  # step NAME SECONDS COMMAND...: SECONDS is what it should take; twice that ends it
  local name=$1 expected=$(($2 * patience)) folder=$out/steps/$1
  shift 2
  mkdir -p "$folder"
  if [ -e "$folder/done" ]; then
    echo "$name: $(cat "$folder/status") (an earlier call)"
    grep -q "^failed" "$folder/status" && failed=1
    return
  fi
  local remaining=$((deadline - $(date +%s)))
  if [ "$remaining" -lt $((expected / 3 + 1)) ]; then
    say "$name" "left for the next call"
    left=1
    return
  fi
  local limit=$((2 * expected)) start=$SECONDS status
  [ "$limit" -le "$remaining" ] || limit=$remaining
  echo "begun, and not ended" > "$folder/status"
  timeout --kill-after=5 "$limit" "$@" > "$folder/log" 2>&1 &
  child=$!
  wait "$child"
  status=$?
  child=""
  local took=$((SECONDS - start))
  if [ "$status" = 0 ]; then
    say "$name" "done in $took s"
    touch "$folder/done"
  elif [ "$took" -ge "$limit" ] && [ "$limit" = "$remaining" ]; then
    say "$name" "ended after $took s by the deadline: the next call begins it again"
    left=1
  else
    say "$name" "failed with status $status after $took s: $(tail -n 1 "$folder/log" | cut -c1-200)"
    touch "$folder/done"
    failed=1
  fi
  gather
}

bench() {  # bench NAME SECONDS ARGUMENTS...: a step of bench.py
  local name=$1 expected=$2
  shift 2
  step "$name" "$expected" "$python" experiments/bench.py "$@" "--out_dir=$out/steps/$name" \
    ${is_try:+--toy --device=cpu --rounds=1 --steps=2}
}

interpret=${is_try:+TRITON_INTERPRET=1}
theirs=${nanogpt:+--nanogpt=$nanogpt}
gpt2="--shapes=GPT-2"

if [ -n "$is_try" ]; then
  lengths="" long="" longer="--shapes=rope" keys="" sampled="" schemes="fox" short=""
  echo "00-check: needs a GPU"
else
  lengths="--lengths=1024,4096" long="--lengths=32768" longer="--lengths=16384"
  keys="--lengths=1024,16384" sampled="--shapes=124 M" schemes="rope,alibi,t5,kerple,fox"
  short="--lengths=1024"
  facts=name,driver_version,clocks.sm,power.limit
  command -v nvidia-smi > /dev/null && nvidia-smi --query-gpu=$facts --format=csv,noheader
  step 00-check 30 "$python" tests/gpu_check.py --only=check --seconds=30 "--out_dir=$out/check"
fi
bench 01-profile 130 profile $gpt2 --compiled=true $theirs
bench 02-train 60 train $gpt2 --compiled=true --steps=40 $theirs
step 03-kernels 70 env $interpret "$python" experiments/bench.py kernels $lengths \
  "--out_dir=$out/steps/03-kernels" ${is_try:+--toy --device=cpu --rounds=1}
bench 04-length 100 length $long --rounds=3
bench 05-eager 60 train $gpt2 --compiled=false --steps=16 --plain_loss=true $theirs
# a program that is compiled for the first time takes most of a minute
bench 06-programs 150 programs $gpt2 --compiled=true --steps=60 --rounds=1 $theirs
bench 07-schemes 200 schemes "--shapes=$schemes" $short --steps=10
bench 08-length-16384 100 length $longer --rounds=3
bench 09-sample 60 sample ${sampled:+"$sampled"} $keys --rounds=3
gather
echo "wrote $out/minutes.md and minutes.json"
[ "$failed" = 0 ] || exit 1
[ "$left" = 0 ] || exit 3
