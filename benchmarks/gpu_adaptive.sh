#!/usr/bin/env bash
# Measures adaptive evaluation, the predictor and the modules that run once on a GPU; each step writes
# one file.
#
#     AFTERDROP_DATA=DIR bash benchmarks/gpu_adaptive.sh OUT [STEP...]
#
# Steps, all by default; each takes less than ten minutes on one H200:
#
#     tests       kernels and parity on the device
#     predictor   K = 100 at batch 1, 8 and 64: MLP, CNN, transformer, BERT-base; goal: at most 1.0 of the loop
#     prefix      dropout before the last layer of a ResNet-50; goals: 2 and 1.2
#     equal       the PTB-sized batch at equal error; goals: 4 times as fast, a tenth of the memory.
#                 PYTHON should have torch-uncertainty, else a plain loop stands in
#     train       the model of `ptb` (ptb-24m, about 3 minutes)
#     ptb         num_samples="auto" against the whole grid on PTB, 40 seeds in four parts; goal: 95 % of the
#                 seeds within a fifth of the standard error, with at most 100 passes
#
# The results are in benchmarks/results/adaptive_H200_*.md and predictor_H200_*.md.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: gpu_adaptive.sh OUT [STEP...]}
shift
steps=${*:-tests predictor prefix equal train ptb}
python=${PYTHON:-python}
scratch=${SCRATCH:-scratch/adaptive}
mkdir -p "$out" "$scratch"

run() { # run NAME COMMAND...
    local name=$1
    shift
    echo "== $name: $*"
    { echo "\$ $*"; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; } > "$out/$name.txt"
    "$@" 2>&1 | tee -a "$out/$name.txt"
}

for step in $steps; do
    case $step in
    tests)
        run tests-gpu "$python" -m pytest -q tests/gpu
        run tests-kernels "$python" -m pytest -q tests/kernels
        ;;
    predictor) run predictor "$python" benchmarks/bench_predictor.py --device cuda --bert ;;
    prefix)
        run prefix "$python" benchmarks/bench_prefix.py --device cuda --size 224 --batch 64 --classes 10 1000 --each
        ;;
    equal) run equal "$python" benchmarks/bench_equal_error.py --device cuda ;;
    train)
        run train "$python" -c "
import sys
from pathlib import Path
sys.path.insert(0, 'benchmarks')
from adaptive_tasks import ptb
ptb(Path('$scratch'))"
        ;;
    ptb)
        for first in 1000 1010 1020 1030; do
            run "ptb-$first" "$python" benchmarks/bench_adaptive.py --tasks ptb --seeds 10 \
                --first-seed "$first" --folder "$scratch" --details "$out/ptb.jsonl"
        done
        ;;
    *) echo "unknown step: $step" >&2; exit 2 ;;
    esac
done
