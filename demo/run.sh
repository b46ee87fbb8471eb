#!/usr/bin/env bash
# From handwritten digits to a trained AlexNet: `tandem demo` in the checkout.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python -m tandem demo "$@"
