#!/usr/bin/env bash
# All that a real GPU is asked, in the order of worth, within SECONDS_IN_ALL: lent.sh [PART …]. Needs no network; libraries
# that the machine lacks lie in .lent/site. A part that fails or hangs keeps no other from its turn; a machine on which
# the first cell does not run is given back at once. Leaves in OUT a few files. SLOWER=10 makes each part's limit ten
# times as long, for an emulated GPU. .lent/NAME.words are further words of a sweep, such as --skip and the cells that an
# earlier call measured. See README.md.
set -uo pipefail
cd "$(dirname "$0")/../.."
until=$(($(date +%s) + ${SECONDS_IN_ALL:-430}))
out=${OUT:?where the results go} work=${WORK:-/tmp/lent}
device=${DEVICE:-cuda}
mkdir -p "$out" "$work"
if [ -d .lent/site ] && [ ! -d "$work/site" ]; then cp -r .lent/site "$work/site"; fi
export PYTHONPATH="$PWD:$work/site${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTORCH_NVML_BASED_CUDA_CHECK=1

left() { echo $((until - $(date +%s))); }

# within SECONDS COMMAND …: as long as it may, and never beyond the end.
within() {
  local seconds=$(($1 * ${SLOWER:-1}))
  shift
  if [ "$(left)" -lt "$seconds" ]; then seconds=$(left); fi
  if [ "$seconds" -lt 10 ]; then echo "no time left for $*" >&2; return 124; fi
  timeout --signal INT --kill-after 10 "$seconds" "$@"
}

sweep() { # sweep NAME SECONDS WORDS …: its records come home, its logs as one file
  local name=$1 seconds=$(($2 * ${SLOWER:-1}))
  shift 2
  if [ "$(left)" -lt $((seconds + 5)) ]; then seconds=$(($(left) - 5)); fi
  if [ -f "${BEFORE:-}/$name.jsonl" ] && [ ! -d "$work/$name" ]; then # what an earlier call measured is kept
    mkdir -p "$work/$name"
    cp "$BEFORE/$name.jsonl" "$work/$name/records.jsonl"
  fi
  [ "$seconds" -ge 15 ] || { echo "no time left for $name"; return 124; }
  within $((seconds / ${SLOWER:-1} + 20)) python3 -m vramprobe run "benchmarks/gpu/$name.yaml" --device "$device" --out "$work/$name" \
    --no-skip --timeout $((120 * ${SLOWER:-1})) --max-time "${seconds}s" $(cat ".lent/$name.words" 2> /dev/null) "$@" > "$work/$name.log" 2>&1
  local status=$?
  cp "$work/$name/records.jsonl" "$out/$name.jsonl"
  tail -n 3 "$work/$name.log"
  return $status
}

smoke() {
  within 100 python3 -m vramprobe measure --model smollm2-135m --num-layers 2 --method lora --batch-size 1 --seq-len 128 \
    --device "$device" --save "$out/smoke.jsonl"
}
doctor() { within 60 python3 -m vramprobe doctor --device "$device" --json > "$work/doctor.json"; }
tests() {
  within 150 python3 -m pytest -v --tb=short -m gpu -W default -p no:cacheprovider tests/measure/test_cuda.py \
    > "$work/tests.log" 2>&1
  local status=$?
  grep -E "PASSED|FAILED|ERROR" "$work/tests.log" | tail -n 40
  return $status
}
context() { within 100 python3 benchmarks/gpu/context.py "$out/context.jsonl" > "$work/context.log" 2>&1; }
addresses() { within 30 python3 benchmarks/gpu/context.py "$out/addresses.jsonl" addresses > "$work/addresses.log" 2>&1; }
workspaces() { within 60 python3 benchmarks/gpu/workspaces.py "$out/workspaces.jsonl" > "$work/workspaces.log" 2>&1; }
cells() { sweep cells 260; }
whole() { sweep cells 130 --skip @3layers; }
boundary() { sweep boundary 60 --limit-vram 16GiB; }
programs() {
  within 120 python3 benchmarks/gpu/programs.py "$work/programs" "${JOBS:-4}"
  local status=$?
  tar -czf "$out/programs.tgz" -C "$work" programs
  return $status
}
status=0
for part in "${@:-smoke}"; do
  began=$(date +%s)
  "$part"
  status=$?
  echo "== $part: status $status, $(($(date +%s) - began)) s, $(left) s left"
  if [ "$part" = smoke ] && [ "$status" != 0 ]; then exit 1; fi
done
tar -czf "$out/logs.tgz" -C "$work" --exclude site --exclude programs --exclude '*.jsonl' . 2> /dev/null
echo "in $out: $(cd "$out" && find . -type f -printf '%f %s B  ')"
