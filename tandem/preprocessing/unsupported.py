"""Forms of ImageNet that are recognised, but not read, and what to do instead."""

from pathlib import Path

# Patterns of names, what they are, and a hint.
_FORMS = (
    (
        ("*.tfrecord*", "dataset_info.json", "*/*.tfrecord*", "*/dataset_info.json"),
        "records of TensorFlow Datasets",
        "it was made from ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, which it keeps in"
        " downloads/manual: name that folder",
    ),
    (
        ("*.beton",),
        "FFCV's .beton files",
        "name the folders or archives that they were made from",
    ),
    (
        ("*.mds", "*.mds.*", "*/*.mds", "*/*.mds.*"),
        "shards of MosaicML's streaming (MDS)",
        "name the folders or archives that they were made from",
    ),
    (
        ("data_batch_1", "cifar-10-batches-py", "cifar-100-python"),
        "pickled CIFAR, and unpickling a file runs what it holds",
        "write its pictures into train/<class>/ and val/<class>/ first",
    ),
    (
        ("*.arrow", "*/*.arrow"),
        "Arrow files of Hugging Face's datasets",
        "download the parquet files instead, or write them by to_parquet",
    ),
    (
        ("train_images_*.tar.gz", "val_images.tar.gz", "data/train_images_*.tar.gz"),
        "compressed archives of Hugging Face",
        "unpack them: mkdir train val; for f in train_images_*.tar.gz; do tar -C train -xzf $f;"
        " done; tar -C val -xzf val_images.tar.gz",
    ),
    (
        ("train/*.tar", "val/*.tar", "validation/*.tar"),
        "archives in the folder of a split",
        "put the archives of both splits into one folder, or unpack the archive of each class into"
        " its own folder, train/n01440764/, and move the archives away",
    ),
    (
        ("snapshots/*",),
        "a folder of Hugging Face's cache, by versions",
        "name the folder of one version, which is in snapshots",
    ),
    (
        ("*.tar.gz", "*.tgz", "*.tar.bz2", "*.tar.xz", "*.tar.zst"),
        "compressed archives",
        "decompress or unpack them first",
    ),
    (("*.zip",), "a zip file", "unpack it first"),
)


def hint_for(folder: Path) -> str:
    """Describe what a folder holds and what to do instead; empty for unknown content."""
    for patterns, what, hint in _FORMS:
        for pattern in patterns:
            if found := next(iter(sorted(folder.glob(pattern))), None):
                return f"{found.relative_to(folder)}: {what}, which are not read; {hint}"
    return ""
