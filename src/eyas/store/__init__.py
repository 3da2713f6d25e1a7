"""Features on disk: shards of packed samples, and the store that makes one data set of them."""
