"""The EAGLE-3 draft model: shape, layer, unroll, loss, vocabulary, checkpoint."""
