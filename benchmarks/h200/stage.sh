#!/usr/bin/env bash
# One stage of the H200 campaign: stage.sh N. Ends inside MAX_TIME; run again to go on. See README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=benchmarks/h200
out=${OUT:-results/h200}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"

# The sweep's file; with TINY=1 one of tiny stand-ins on the same axes.
file_of() {
  if [ -n "${TINY:-}" ]; then
    mkdir -p "$out/tiny"
    "$python" "$here/tiny.py" "configs/sweeps/$1.yaml" "$out/tiny"
  else
    echo "configs/sweeps/$1.yaml"
  fi
}

# Run one sweep; its logs become one file, so that few have to be carried home.
sweep() {
  local status=0 file
  file=$(file_of "$1")
  "$python" -m vramprobe run "$file" --out "$out/$1" --device "$device" \
    --max-time "${MAX_TIME:-9m}" --replicate 5% || status=$?
  rm -f "$out/$1/.lock"
  if [ -d "$out/$1/logs" ]; then
    tar -czf "$out/$1.logs.tgz" -C "$out/$1" logs
    rm -rf "$out/$1/logs"
  fi
  return "$status"
}

# A prediction that is made when its answer is known is none.
require_predictions() {
  for folder in "$out" results/h200; do
    if compgen -G "$folder/predictions*.json" > /dev/null; then return; fi
  done
  echo "stage.sh: no predictions of this stage; make them first (stage.sh predict) and commit them" >&2
  exit 1
}

trust() {
  local ready=0
  "$python" -m vramprobe doctor --device "$device" --json > "$out/doctor.json" || ready=$?
  "$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["verdict"])' "$out/doctor.json" || true
  "$python" "$here/facts.py" "$out/facts.json" "$device" || ready=$?
  if [ "$device" = cuda ]; then
    "$python" -m pytest -m gpu -W default -p no:cacheprovider 2>&1 | tee "$out/stage0.log"
  fi
  return "$ready"
}

predict() {
  local files=()
  for name in h200-held-out h200-claims; do files+=("$(file_of "$name")"); done
  if [ -f "$out/h200-calibration/records.jsonl" ]; then
    "$python" -m vramprobe fit "$out/h200-calibration" -o "$out/fit.new.json"
    "$python" "$here/predictions.py" "$out" "${files[@]}" --device "$device" --fit "$out/fit.new.json" || {
      rm "$out/fit.new.json"
      return 1  # the fit that predicted stays
    }
    mv "$out/fit.new.json" "$out/fit.json"
  else
    "$python" "$here/predictions.py" "$out" "${files[@]}" --device "$device"
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

case "${1:-}" in
  0) trust ;;
  1) sweep h200-calibration ;;
  2) require_predictions; sweep h200-held-out ;;
  3) sweep h200-edges; "$python" "$here/snapshots.py" "$out/snapshots.json" "$device" ;;
  4) sweep h200-speed ;;
  5) require_predictions; sweep h200-claims ;;
  predict) predict ;;
  compare) compare ;;
  *) echo "usage: bash benchmarks/h200/stage.sh 0|1|2|3|4|5|predict|compare" >&2; exit 2 ;;
esac
