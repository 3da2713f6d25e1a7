"""What a run consists of: the graph of steps and the digests that say which of them are finished already."""
