"""Sets as values: append, merge, split, subset, relabel, drop, deduplicate, pack again, add a field.

    table       what is known of all samples of a set; new tables follow from it, and nothing is written until `save`
    pieces      the index of a table: rows of the indexes of other sets, their labels, their shards
    change      a directory that is changed: lock, new files under free names, dataset.json last, old files retired
    shards      new shards and the indexes with them
    packing     append a source, reshard; fields: add a field
    duplicates  which images are the same, or nearly so
    operations  all of it as functions of paths

What says of samples only which they are, what they are called and where they are, is in the index: such a change writes
an index, and no byte of a shard. A set in another directory gets hard links to the shards, so that it is whole without
the sets that it was made of.
"""
