#!/usr/bin/env bash
# Handwritten digits in ImageNet's layout, and their batch files.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python -m tandem demo --prepare
