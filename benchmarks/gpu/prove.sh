#!/usr/bin/env bash
# Every stage with tiny stand-ins on the CPU, in order, interrupted and resumed: prove.sh [FOLDER]. Some minutes; ends
# with the comparison. It proves that the commands work together; its numbers are of models that nobody trains.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OUT=${1:-out/h200-tiny} PYTHON=${PYTHON:-python3} TINY=1 DEVICE=cpu OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
stage() { echo "== stage.sh $*"; bash benchmarks/gpu/stage.sh "$@"; }
records() { grep --count . "$OUT/$1/records.jsonl" 2>/dev/null || true; }
fail() { echo "prove.sh: $*" >&2; exit 1; }
rm -rf "$OUT"

stage 2 2>/dev/null && fail "stage 2 ran without predictions"
stage predict
[ -f "$OUT/predictions.json" ] || fail "no predictions"
stage 0
MAX_TIME=60s stage 1                     # its time is up; loading the libraries is in it
before=$(records h200-calibration)
timeout --signal TERM 60 bash benchmarks/gpu/stage.sh 1 || true   # the machine is taken back
[ "$(records h200-calibration)" -gt "${before:-0}" ] || fail "stage 1 was not resumed"
stage 1
stage predict
[ -f "$OUT/predictions-fitted.json" ] || fail "no predictions with the fit of stage 1"
stage 2
stage predict && fail "stage 2 was predicted after it had been run"
for number in 3 snapshots 4 5 compare; do stage "$number"; done
for sweep in h200-calibration h200-held-out h200-edges h200-speed h200-claims; do
  left=$("$PYTHON" -m vramprobe run "$OUT/tiny/$sweep.yaml" --out "$OUT/$sweep" --device cpu --dry-run --json |
    "$PYTHON" -c 'import json, sys; print(json.load(sys.stdin)["actions"].get("run", 0))')
  [ "$left" = 0 ] || fail "$sweep has $left cells left"
done
echo "every stage ran; see $OUT/comparison.md"
