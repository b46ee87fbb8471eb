"""Forms of ImageNet that are recognised, but not read, and what to do instead."""

from pathlib import Path

from tandem.preprocessing.ground_truth import PACKED_KIT

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
_DECOMPRESSED_BY = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd"}
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
        "a compressed archive of Hugging Face",
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
        "a compressed archive",
        "decompress or unpack it first",
    ),
    (("*.zip",), "a zip file", "name the file itself if it is Kaggle's, or unpack it first"),
)


def compressed(folder: Path, archive: str) -> str:
    """Describe the compressed form of an archive in a folder; empty where there is none."""
    for suffix, program in _DECOMPRESSED_BY.items():
        if (folder / (name := archive + suffix)).is_file():
            return (
                f"{name}, a compressed archive, expected {archive}; decompress it: {program} {name}"
            )
    return ""


def hint_for(folder: Path) -> str:
    """Describe what a folder holds and what to do instead; empty for unknown content."""
    for archive in (TRAIN_TAR, VAL_TAR):
        if hint := compressed(folder, archive):
            return hint
    for patterns, what, hint in _FORMS:
        for pattern in patterns:
            # The development kit is read as it is.
            found = sorted(path for path in folder.glob(pattern) if path.name != PACKED_KIT)
            if found:
                return f"{found[0].relative_to(folder)} ({what}), which is not read; {hint}"
    return ""
