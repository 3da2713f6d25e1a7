"""A witness: the server's own log-probabilities of a prompt, which come from states that no hook has touched.

Where they agree with `log_softmax(head @ last)` of the captured states, those are the states that the server computed
with, at every position and not only at the greedy choices. Costs the server a pass that computes all logits.
"""

import uuid
from typing import Any

import torch

from eyas.engines.sglang import client
from eyas.engines.target import TargetInfo
from eyas.errors import UserError
from eyas.store.shard import Sample

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Median difference of log-probabilities, in nats. In bfloat16 logits around 20 are rounded to 0.125; a last state of
another position or from before the norm differs by whole nats."""
POSITIONS = 64
"""Of a sample, evenly spread."""


class Witness:
    """Compares samples with a server. `head` [V, H]; `count`: as the proofs count, `worst` in nats.

    Raises UserError for a target whose logits are more than the head's product.
    """

    def __init__(self, head: torch.Tensor, target: TargetInfo) -> None:
        for key, neutral in (("logit_scale", 1.0), ("final_logit_softcapping", None), ("logits_scaling", 1.0)):
            if target.text_config.get(key, neutral) not in (neutral, None):
                raise UserError(f"capture.witness: {key} of this target changes the logits; set capture.witness: false")
        self._head, self._vocab_size = head, target.vocab_size
        self.count: dict[str, Any] = {"checked": 0, "failed": 0, "worst": None}

    def check(self, url: str, sample: Sample) -> str | None:
        """Why the server's log-probabilities speak against a sample; None: they do not.

        Raises UserError, ServerDied.
        """
        ids = sample.ids.tolist()
        reply = client.generate(url, body(ids))
        said = reply.get("meta_info", {}).get("input_token_logprobs")
        if not isinstance(said, list) or [row[1] for row in said] != ids:
            raise UserError(f"{url}: replies lack the prompt's input_token_logprobs: set capture.witness: false")
        if len(ids) < 2:
            return None
        places = torch.linspace(0, len(ids) - 2, min(POSITIONS, len(ids) - 1)).round().long()
        logits = (sample.last[places].to(self._head.device, self._head.dtype) @ self._head.T)[:, : self._vocab_size]
        ours = logits.float().log_softmax(-1).cpu()[torch.arange(len(places)), sample.ids[places + 1]]
        theirs = torch.tensor([said[place + 1][0] for place in places.tolist()])
        error = float((ours - theirs).abs().median())
        tolerance = TOLERANCE[max(sample.last.dtype, self._head.dtype, key=lambda dtype: torch.finfo(dtype).eps)]
        failed = not error <= tolerance
        self.count["checked"] += 1
        self.count["failed"] += failed
        self.count["worst"] = max(self.count["worst"] or 0.0, error)
        if not failed:
            return None
        return (
            f"witness: the server's log-probabilities differ by {error:.2g} nats in the median, above {tolerance:.2g}"
        )


def body(ids: list[int]) -> dict[str, Any]:
    """What is asked for the log-probabilities of a whole prompt."""
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "extra_key": uuid.uuid4().hex,
    }
