#!/usr/bin/env bash
# One stage of the H200 campaign: stage.sh N. Ends inside MAX_TIME; run again to go on. See README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-results/h200}
python=${PYTHON:-python3}
mkdir -p "$out"
case "${1:-}" in
  0) ready=0
     "$python" -m vramprobe doctor --device cuda --json > "$out/doctor.json" || ready=$?
     "$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["verdict"])' "$out/doctor.json" || true
     "$python" -m pytest -m gpu -W default -p no:cacheprovider 2>&1 | tee "$out/stage0.log"
     exit "$ready" ;;
  1) "$python" -m vramprobe run configs/sweeps/h200-calibration.yaml --out "$out/h200-calibration" \
       --device cuda --max-time "${MAX_TIME:-9m}" ;;
  2) "$python" -m vramprobe run configs/sweeps/h200-held-out.yaml --out "$out/h200-held-out" \
       --device cuda --max-time "${MAX_TIME:-9m}" ;;
  *) echo "usage: bash benchmarks/h200/stage.sh 0|1|2" >&2; exit 2 ;;
esac
