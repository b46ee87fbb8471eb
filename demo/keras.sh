#!/usr/bin/env bash
# Keras's small convnet on all of Fashion-MNIST, by two processes: accuracy and confusion matrix.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=data/demo-keras
unpacked=$folder/usr/share/datasets/fashion-mnist
package=dataset-fashion-mnist

found=$(python -c 'from tandem.datasets import published; print(published.locate("fashion_mnist") or "")')
if [ -z "$found" ] && [ ! -d $unpacked ] && command -v apt-get > /dev/null; then
    echo "demo-keras: getting Debian's package $package, 31 MB, to unpack it in $folder"
    mkdir -p $folder
    # Without it, or without Debian, the same files are downloaded by the program.
    if (cd $folder && apt-get download --quiet=2 $package) 2> $folder/apt.log; then
        # A folder that exists is whole, also after an interruption.
        rm -rf $folder/partial
        dpkg-deb --extract $folder/${package}_*.deb $folder/partial
        mv $folder/partial/usr $folder/usr
    fi
fi
if [ -z "$found" ] && [ -d $unpacked ]; then
    set -- --source $unpacked "$@"
fi
# Continues an earlier run, or reprints the result of a finished one; `make clean` removes it.
exec python -m examples.fashion_mnist "$@"
