"""A double of the iterators."""
