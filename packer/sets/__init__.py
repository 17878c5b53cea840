"""Sets as values: append, merge, split, subset, relabel, drop, deduplicate, repack, add a field.

    table       the samples of a set; new tables are derived from it, and nothing is written until `save`; all changes
                also as functions of paths
    pieces      the index of a table: rows of the indexes of other sets, their labels, their shards
    change      changing a directory: lock, new files under free names, dataset.json last, old files retired
    packing     changes that write shards: append a source, reshard, add a field
    duplicates  identical or similar images
    deal        dividing samples into splits
    erase       removing samples for good

The index alone records the samples of a set, their names and their places, so changes of these write an
index, and no byte of a shard. A set in another directory gets hard links to the shards, so that it does not need the
sets that it was made from.
"""
