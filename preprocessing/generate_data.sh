#!/usr/bin/env bash
# All of preprocessing, as configured in paths.yaml; options of the three programs may follow:
#   preprocessing/generate_data.sh --source /data/imagenet --tar-root-dir /big/disk/imagenet
# ImageNet is read in any layout of docs/data-sources.md.
# Started again after an interruption, it continues. PYTHON names another interpreter.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python}

# The three programs have the same options: one help is enough.
case " $* " in *" --help "* | *" -h "*) exec "$python" "$here/make_hkl.py" --help ;; esac

"$python" "$here/make_hkl.py" "$@"
"$python" "$here/make_train_val_txt.py" "$@"
"$python" "$here/make_labels.py" "$@"
