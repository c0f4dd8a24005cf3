#!/usr/bin/env bash
# One stage of the H200 campaign: stage.sh N. Ends inside MAX_TIME; run again to go on. See README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-results/h200}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
mkdir -p "$out"

# Run one sweep of configs/sweeps; its logs become one file, so that few have to be carried home.
sweep() {
  local status=0
  "$python" -m vramprobe run "configs/sweeps/$1.yaml" --out "$out/$1" --device "$device" \
    --max-time "${MAX_TIME:-9m}" --replicate 5% || status=$?
  if [ -d "$out/$1/logs" ]; then
    tar -czf "$out/$1.logs.tgz" -C "$out/$1" logs
    rm -rf "$out/$1/logs" "$out/$1/.lock"
  fi
  return "$status"
}

case "${1:-}" in
  0) ready=0
     "$python" -m vramprobe doctor --device "$device" --json > "$out/doctor.json" || ready=$?
     "$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["verdict"])' "$out/doctor.json" || true
     "$python" -m pytest -m gpu -W default -p no:cacheprovider 2>&1 | tee "$out/stage0.log"
     exit "$ready" ;;
  1) sweep h200-calibration ;;
  2) sweep h200-held-out ;;
  *) echo "usage: bash benchmarks/h200/stage.sh 0|1|2" >&2; exit 2 ;;
esac
