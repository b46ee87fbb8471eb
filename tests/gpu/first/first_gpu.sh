#!/usr/bin/env bash
# What to ask a GPU first, in stages of at most ten minutes, the most telling first:
#
#   tests/gpu/first/first_gpu.sh STAGE [OUT [PICTURES [WHEELS]]]
#
# STAGE   look: versions, handles between processes, bandwidth, memory, exchange
#         step: whether a step is right, how fast it is, against what, and its goals
#         learn: Imagenette's pictures of 160 pixels to at most 35 % top-1 error
#         profile: kernels by time, at three sizes
#         runs: whole programs against the host, resumed, killed, as ranks
#         parallel: data-parallel functions of two ranks, against the host
#         table: Table 1 of the original by whole runs, and how much of the loading is hidden
# OUT: folder for logs and results (default runs/first_gpu). PICTURES: JPEGs by class in train/ and
# val/, for `learn`. WHEELS: packages to install where the machine has no network.
# PYTHON names another interpreter than python3, EPOCHS another number of epochs than 90, and
# STAGE_SECONDS another limit of a stage than 590: what has no time left is named.
set -uo pipefail
if [ $# = 0 ] || [ "$1" = --help ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
fi
case $1 in
look | step | learn | profile | runs | parallel | table) ;;
*)
    echo "error: no stage $1: look, step, learn, profile, runs, parallel or table" >&2
    exit 2
    ;;
esac
stage=$1 out=${2:-runs/first_gpu} pictures=${3:-} wheels=${4:-}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../../.."
mkdir -p "$out"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PYTHON=${PYTHON:-python3} PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=3
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "$wheels" ]; then
    "$PYTHON" -m pip install -q --no-index --no-deps "$wheels"/*.whl
    # Preprocessing records the version of the installed package.
    "$PYTHON" -m pip install -q --no-index --no-deps --no-build-isolation -e .
fi

# Run a command for so many seconds at most, or those that the stage has left; all of its output
# goes to the stage's log. A process that ignores the signal is killed.
within() {
    local limit=$1 left=$((${STAGE_SECONDS:-590} - SECONDS))
    shift
    if [ "$left" -lt "$limit" ]; then limit=$left; fi
    if [ "$limit" -le 0 ]; then
        echo "== no time left: $*" | tee -a "$out/$stage.log"
        return
    fi
    echo "== $(date +%T) $*"
    timeout --kill-after 5 "$limit" "$@" 2>&1 | tee -a "$out/$stage.log" | tail -n 50
    if [ "${PIPESTATUS[0]}" = 124 ]; then echo "== stopped after $limit seconds"; fi
}

gpu_tests() { within "$1" "$PYTHON" -m pytest -m gpu -q -rA -p no:benchmark "${@:2}"; }
gpu_bench() { within "$1" "$PYTHON" -m benchmarks.gpu --seconds $(($1 - 20)) "${@:2}"; }

case $stage in
look)
    within 20 nvidia-smi
    within 20 "$PYTHON" -c 'import sys, torch, triton, numpy, numba, pytensor, pycuda.driver as c
print(sys.version, torch.__version__, torch.version.cuda, torch.backends.cudnn.version())
print(triton.__version__, numpy.__version__, numba.__version__, c.get_driver_version())
from tandem.compilers import c_compiler, missing_for_triton, python_header
print(c_compiler(), python_header(), "missing:", missing_for_triton())'
    within 90 "$PYTHON" -m tests.gpu.first.probe
    gpu_tests 300 tests/gpu/test_memory.py tests/gpu/test_exchange.py
    gpu_bench 150 --parts copies exchange --rounds 12
    ;;
step)
    gpu_tests 120 tests/gpu/test_step.py
    gpu_tests 200 tests/gpu/test_compiled.py
    gpu_bench 265 --parts steps --rounds 12
    ;;
learn)
    within 90 preprocessing/generate_data.sh --train-img-dir "$pictures/train" \
        --val-img-dir "$pictures/val" --tar-root-dir "$out/data"
    for precision in bfloat16 float32; do
        within 220 "$PYTHON" train.py --data_folder "$out/data" --weights_dir "$out/$precision" \
            --precision $precision --batch_size 128 --n_epochs "${EPOCHS:-90}" \
            --lr_policy cosine --warmup_epochs 3 --learning_rate 0.02 --snapshot_freq 30 \
            --snapshot_minutes 0 --print_freq 31 --live_view false
        within 20 "$PYTHON" -m tests.gpu.first.summary "$out/$precision" --goal 0.35
    done
    ;;
profile)
    for batch in 256 128 512; do
        within 150 "$PYTHON" -m tests.gpu.first.profile_step --batch $batch --out "$out"
    done
    ;;
runs) # Those that are killed look at free memory, so they run alone.
    gpu_tests 300 -n 4 tests/gpu/test_runs.py
    gpu_tests 140 -n 4 tests/gpu/test_ranks.py
    gpu_tests 140 tests/gpu/test_killed.py
    ;;
parallel)
    gpu_tests 500 tests/gpu/test_parallel.py
    ;;
table)
    gpu_bench 580 --parts runs
    ;;
esac
