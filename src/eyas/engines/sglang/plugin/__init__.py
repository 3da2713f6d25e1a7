"""Plugin for SGLang's plugin framework: gives out auxiliary hidden states during prefill. No file of SGLang is touched.

Runs inside the server, in the user's own interpreter: standard library and torch only, Python 3.10 or later.
`protocol` is what it agrees on with clients; `stitch` joins the chunks of a request; `layout` is the file that comes of
them; `staging` takes rows off the device and into that file; `hooks` is where SGLang calls it.
"""

import os

from eyas.engines.sglang.plugin.protocol import VARIABLE


def register() -> None:
    """Entry point in the group `sglang.srt.plugins`: register the hooks, if EYAS_CAPTURE asks for it."""
    if not os.environ.get(VARIABLE):
        return
    from eyas.engines.sglang.plugin import hooks

    hooks.register()
