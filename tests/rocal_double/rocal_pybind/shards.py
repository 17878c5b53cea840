"""How rocAL's native readers read a directory: (image, label, components) of each sample.

Every entry counts, and paths are concatenated without a slash. Names are looked up in an index of version v1.0 only.
"""

import os
import struct

_NAMES_IN = "v1.0"


def tar_samples(path, index_path, ext):
    """Images by name: the first image of a name stands for all; a member whose suffix is not in `ext` is stored as the
    first one."""
    slots = {name: i for i, name in enumerate(sorted(name for name in ext[0] if name not in ("jpg", "jpeg", "jpe")))}
    tars, indexes = sorted(os.listdir(path)), sorted(os.listdir(index_path))
    by_name, order = {}, []
    for tar, index in zip(tars, indexes, strict=True):
        with open(path + tar, "rb") as shard, open(index_path + index) as lines:
            version, count = next(lines).split()
            for number in range(1, int(count) + 1):
                name, image, texts = _sample(shard, next(lines).split(), version == _NAMES_IN, number, slots)
                by_name.setdefault(name, (image, 0, texts))
                order.append(name)
    return [_look_up(by_name, name) for name in order]


def _look_up(by_name, name):
    """Names are looked up without their directories, but stored with them."""
    number = by_name.get(name.rpartition("/")[2])
    if number is None:
        raise RuntimeError(f"ERROR: Given name not present in the map{name}")
    return number


def _sample(shard, words, named, number, slots):
    width = 4 if named else 3
    if len(words) % width:
        raise RuntimeError("Could not find all necessary component parameters")
    texts, image, name = [None] * len(slots), b"", str(number)
    for at in range(0, len(words), width):
        extension, offset, size, *names = words[at : at + width]
        if int(offset) % 512:
            raise RuntimeError("tar offset is not a multiple of tar block size")
        shard.seek(int(offset))
        data = shard.read(int(size))
        name = names[0].rpartition(".")[0] if named else name
        if extension in ("jpg", "jpeg", "jpe"):
            image = data
        else:
            texts[slots.get(extension, 0)] = data
    if None in texts:
        raise RuntimeError("ERROR: Missing components in the sample")
    return name, image, texts


def tfrecord_samples(path, image_key, label_key, name_key):
    """Only regular files are read, no links; images and labels are matched by file name."""
    from tfrecord import example_pb2

    images, labels = [], {}
    for name in sorted(os.listdir(path)):
        place = f"{path}/{name}"
        with open(place, "rb") as shard:
            while head := shard.read(12):
                example = example_pb2.Example()
                example.ParseFromString(shard.read(struct.unpack("<Q", head[:8])[0]))
                shard.read(4)
                feature = example.features.feature
                file = feature[name_key].bytes_list.value[0].decode()
                images.append((file, feature[image_key].bytes_list.value[0]))
                if not os.path.islink(place):
                    labels.setdefault(file, feature[label_key].int64_list.value[0])
    return [(image, _look_up(labels, file), [b""]) for file, image in images]
