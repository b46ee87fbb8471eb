#!/usr/bin/env bash
# What to ask a GPU first, in stages of at most ten minutes, the most telling first:
#
#   tests/gpu/first/first_gpu.sh look|step|runs|learn|profile [OUT [PICTURES [WHEELS]]]
#
# OUT: folder for logs and results (default runs/first_gpu). PICTURES: JPEGs by class in train/ and
# val/, for `learn`. WHEELS: packages to install where the machine has no network.
# PYTHON names another interpreter than python3, EPOCHS another number of epochs than 90.
set -uo pipefail
if [ $# = 0 ] || [ "$1" = --help ]; then
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 0
fi
case $1 in
look | step | runs | learn | profile) ;;
*)
    echo "error: no stage $1: look, step, runs, learn or profile" >&2
    exit 2
    ;;
esac
stage=$1 out=${2:-runs/first_gpu} pictures=${3:-} wheels=${4:-}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../../.."
mkdir -p "$out"
export PYTHON=${PYTHON:-python3} PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=3
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "$wheels" ]; then
    "$PYTHON" -m pip install -q --no-index --no-deps "$wheels"/*.whl
    # Preprocessing records the version of the installed package.
    "$PYTHON" -m pip install -q --no-index --no-deps --no-build-isolation -e .
fi

# Run a command for so many seconds at most; all of its output goes to the stage's log.
within() {
    echo "== $(date +%T) $*"
    timeout "$@" 2>&1 | tee -a "$out/$stage.log" | tail -n 40
}

gpu_tests() { within "$1" "$PYTHON" -m pytest -m gpu -q -rA "${@:2}"; }

case $stage in
look) # 3 minutes: versions, handles between processes, bandwidth, memory, exchange
    within 20 nvidia-smi
    within 20 "$PYTHON" -c 'import sys, torch, triton, numpy, numba, pytensor, pycuda.driver as c
print(sys.version, torch.__version__, torch.version.cuda, torch.backends.cudnn.version())
print(triton.__version__, numpy.__version__, numba.__version__, c.get_driver_version())'
    within 90 "$PYTHON" -m tests.gpu.first.probe
    gpu_tests 300 --timeout 120 tests/gpu/test_memory.py tests/gpu/test_exchange.py
    ;;
step) # 8 minutes: whether a step is right, how fast it is, and against what
    gpu_tests 260 --timeout 200 tests/gpu/test_step.py
    within 280 "$PYTHON" -m benchmarks.gpu --quick --batch 256 --rounds 12
    ;;
runs) # 9 minutes: whole programs; those that are killed look at free memory, so they run alone
    gpu_tests 330 -n 4 --timeout 300 tests/gpu/test_runs.py tests/gpu/test_ranks.py -k "not killed"
    gpu_tests 200 --timeout 100 tests/gpu/test_runs.py -k killed
    ;;
learn) # 8 minutes: real pictures, to an error
    within 90 preprocessing/generate_data.sh --train-img-dir "$pictures/train" \
        --val-img-dir "$pictures/val" --tar-root-dir "$out/data"
    for precision in bfloat16 float32; do
        within 220 "$PYTHON" train.py --data_folder "$out/data" --weights_dir "$out/$precision" \
            --precision $precision --batch_size 128 --n_epochs "${EPOCHS:-90}" \
            --lr_policy cosine --warmup_epochs 3 --learning_rate 0.02 --snapshot_freq 30 \
            --snapshot_minutes 0 --print_freq 31 --live_view false
        within 60 "$PYTHON" -m tests.gpu.first.summary "$out/$precision"
    done
    ;;
profile) # 5 minutes: kernels by time, at three sizes
    for batch in 128 256 512; do
        within 100 "$PYTHON" -m tests.gpu.first.profile_step --batch $batch --out "$out"
    done
    ;;
esac
