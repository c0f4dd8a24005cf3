#!/usr/bin/env bash
# One call on a lent machine: lent.sh STAGE …, in order, each in what is left of CALL_SECONDS. Installs the wheels in .whl,
# takes what is measured already from RESULTS to OUT, runs, and leaves in OUT a few files to carry home. See README.md.
set -euo pipefail
export UNTIL=$(($(date +%s) + ${CALL_SECONDS:-570}))
cd "$(dirname "$0")/../.."
out=${OUT:?where the results go} results=${RESULTS:-results/h200} site=${SITE:-/tmp/site}
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # no thread that a fork would lose
if [ ! -f "$site/.done" ]; then
  "${PYTHON:-python3}" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl
  touch "$site/.done"
fi
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
[ -n "${VRAMPROBE_COMMIT:-}" ] || echo "lent.sh: VRAMPROBE_COMMIT is not set, so no record will say of which commit it is" >&2

status=0
for stage in "$@"; do
  case $stage in
    1) sweep=h200-calibration ;;
    2) sweep=h200-held-out ;;
    3) sweep=h200-edges ;;
    4) sweep=h200-speed ;;
    5) sweep=h200-claims ;;
    *) sweep= ;;
  esac
  if [ -n "$sweep" ] && [ ! -d "$out/$sweep" ] && [ -f "$results/$sweep/records.jsonl" ]; then
    mkdir -p "$out/$sweep"
    cp "$results/$sweep/records.jsonl" "$out/$sweep/"
  fi
  echo "== stage $stage, $((UNTIL - $(date +%s))) s left"
  bash benchmarks/gpu/stage.sh "$stage" || status=$?
done
rm -rf "$out/tiny"
echo "== $((UNTIL - $(date +%s))) s left; in $out: $(cd "$out" && find . -type f | tr '\n' ' ')"
exit "$status"
