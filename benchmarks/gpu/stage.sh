#!/usr/bin/env bash
# Measure on a GPU: stage.sh all runs every stage, stage.sh N one of them. A stage ends within MAX_TIME, and by UNTIL
# (seconds since 1970) if that is set; run again to continue. If killed, OUT has what was measured. See README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=benchmarks/gpu
out=${OUT:-results/h200}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
if [ "$device" = cpu ]; then export TRITON_INTERPRET=1; fi  # the fused loss's kernels have nothing else to run on

# Seconds until UNTIL; a stage's own usual limit where nobody set that.
seconds_left() { echo $((${UNTIL:-$(($(date +%s) + 540))} - $(date +%s))); }

# Run what may not go on for longer than that; told to end, a Python program ends its children too.
in_time() {
  local seconds
  seconds=$(seconds_left)
  if [ "$seconds" -lt 20 ]; then echo "stage.sh: no time left for $*" >&2; return 124; fi
  timeout --signal INT --kill-after 10 "$seconds" "$@"
}

# The sweep's file; with TINY=1 one of tiny stand-ins on the same axes.
file_of() {
  if [ -n "${TINY:-}" ]; then
    mkdir -p "$out/tiny"
    "$python" "$here/tiny.py" "configs/sweeps/$1.yaml" "$out/tiny"
  else
    echo "configs/sweeps/$1.yaml"
  fi
}

# Run one sweep. Its logs lie elsewhere meanwhile and become one file: few can be carried home from a lent machine, and
# one that is cut off must not leave fifty logs in the place of its records.
sweep() {
  local status=0 file limit=${MAX_TIME:-9m} logs
  if [ -n "${UNTIL:-}" ]; then
    limit=$(seconds_left)s
    if [ "${limit%s}" -lt 20 ]; then echo "stage.sh: no time left for $1" >&2; return 124; fi
  fi
  file=$(file_of "$1")
  logs=$(mktemp -d)
  mkdir -p "$out/$1" "$logs/logs"
  rm -rf "$out/$1/logs"
  ln -s "$logs/logs" "$out/$1/logs"
  "$python" -m vramprobe run "$file" --out "$out/$1" --device "$device" \
    --max-time "$limit" --timeout "${CELL_SECONDS:-240}" --no-skip --replicate 5% || status=$?
  rm -f "$out/$1/.lock" "$out/$1/logs"
  tar -czf "$out/$1.logs.tgz" -C "$logs" logs
  rm -rf "$logs"
  return "$status"
}

# A prediction that is made when its answer is known is none.
require_predictions() {
  local folders=("$out")
  if [ -z "${TINY:-}" ]; then folders+=(results/h200); fi  # those are of the models themselves
  for folder in "${folders[@]}"; do
    if compgen -G "$folder/predictions*.json" > /dev/null; then return; fi
  done
  echo "stage.sh: no predictions of this stage; make them first (stage.sh predict) and commit them" >&2
  exit 1
}

trust() {
  local ready=0
  in_time "$python" -m vramprobe doctor --device "$device" --json > "$out/doctor.json" || ready=$?
  "$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["verdict"])' "$out/doctor.json" || true
  in_time "$python" "$here/facts.py" "$out/facts.json" "$device" || ready=$?
  return "$ready"
}

# The tests that need a GPU, all of them in one file; on a machine without one there is none.
gpu_tests() {
  if [ "$device" = cuda ]; then
    in_time "$python" -m pytest -v --tb=short -m gpu -W default -p no:cacheprovider tests/measure/test_cuda.py 2>&1 |
      tee "$out/tests.log"
  fi
}

predict() {
  local files=()
  for name in h200-held-out h200-claims; do files+=("$(file_of "$name")"); done
  if [ -f "$out/h200-calibration/records.jsonl" ]; then
    "$python" -m vramprobe fit "$out/h200-calibration" -o "$out/fit.new.json"
    "$python" "$here/predictions.py" "$out" "${files[@]}" --device "$device" --jobs "${JOBS:-2}" \
      --fit "$out/fit.new.json" || {
      rm "$out/fit.new.json"
      return 1  # the fit that predicted stays
    }
    mv "$out/fit.new.json" "$out/fit.json"
  else
    "$python" "$here/predictions.py" "$out" "${files[@]}" --device "$device" --jobs "${JOBS:-2}"
  fi
}

# What can be said of what is there; a step that lacks its stage says so, and the others go on.
compare() {
  local status=0 fit=()
  if [ -f "$out/fit.json" ]; then fit=(--fit "$out/fit.json"); fi
  "$python" -m vramprobe check "$out" || status=$?
  "$python" "$here/compare.py" "$out" || status=$?
  if [ -f "$out/h200-held-out/records.jsonl" ]; then
    if [ -f "$out/fit.json" ]; then
      "$python" -m vramprobe evaluate "$out/h200-held-out" "${fit[@]}" --out "$out/evaluation" || status=$?
    fi
    "$python" -m vramprobe calibrate "$out/h200-held-out" "${fit[@]}" > "$out/peers.txt" || status=$?
  fi
  "$python" -m vramprobe claims --results "$out" --out "$out/claims" > "$out/claims.txt" || status=$?
  return "$status"
}

# Every stage in order; one that fails does not stop the next.
every_stage() {
  local status=0
  for stage in 0 tests 1 predict 2 3 snapshots 4 5 compare; do
    if [ "$stage" = predict ] && [ -f "$out/predictions-fitted.json" ]; then continue; fi  # made by an earlier run
    echo "== stage $stage"
    bash "$here/stage.sh" "$stage" || status=$?
  done
  return "$status"
}

case "${1:-}" in
  all) every_stage ;;
  0) trust ;;
  tests) gpu_tests ;;
  1) sweep h200-calibration ;;
  2) require_predictions; sweep h200-held-out ;;
  3) sweep h200-edges ;;
  snapshots) in_time "$python" "$here/snapshots.py" "$out/snapshots.json" "$device" ;;
  4) sweep h200-speed ;;
  5) require_predictions; sweep h200-claims ;;
  predict) predict ;;
  compare) compare ;;
  *) echo "usage: bash benchmarks/gpu/stage.sh all|0|tests|1|predict|2|3|snapshots|4|5|compare" >&2; exit 2 ;;
esac
