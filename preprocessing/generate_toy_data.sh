#!/usr/bin/env bash
# The first 2,560 training and validation pictures after the shuffle, into data/toy: minutes.
# Options of the three programs may follow and override these:
#   preprocessing/generate_toy_data.sh --tar-root-dir /tmp/toy --image-size 128
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

exec "$here/generate_data.sh" --subset 2560 --tar-root-dir "$here/../data/toy" "$@"
