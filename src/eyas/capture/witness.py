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

TOLERANCE = {torch.float32: (1e-3, 1e-2), torch.bfloat16: (0.5, 2.5)}
"""Differences of log-probabilities, in nats: of all positions but the worst 1 %, and of the worst. In bfloat16 logits
between 32 and 64 are rounded by up to 0.125 on either side, and two passes have slightly other states, which shows most
at improbable tokens; a last state of another position or from before the norm differs by whole nats."""
QUANTILE = 0.99
ROWS = 256
"""Positions whose logits are in memory at once."""


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
        places = torch.tensor([place for place in range(len(ids) - 1) if said[place + 1][0] is not None])
        if not len(places):
            raise UserError(f"{url}: the prompt's input_token_logprobs are empty: set capture.witness: false")
        theirs = torch.tensor([said[place + 1][0] for place in places.tolist()])
        errors = (torch.cat([self._said(sample, part) for part in places.split(ROWS)]) - theirs).abs()
        errors = errors.nan_to_num(torch.finfo(errors.dtype).max)
        most, largest = TOLERANCE[max(sample.last.dtype, self._head.dtype, key=lambda dtype: torch.finfo(dtype).eps)]
        worst, usual = float(errors.max()), float(errors.quantile(QUANTILE, interpolation="lower"))
        self.count["checked"] += 1
        self.count["worst"] = max(self.count["worst"] or 0.0, worst)
        if usual <= most and worst <= largest:
            return None
        self.count["failed"] += 1
        return (
            f"witness: the server's log-probabilities differ by {worst:.2g} nats at position "
            f"{int(places[errors.argmax()])}, {QUANTILE:.0%} of them by up to {usual:.2g}; {largest:g} and {most:g} "
            "are allowed"
        )

    def _said(self, sample: Sample, places: torch.Tensor) -> torch.Tensor:
        """Log-probabilities, by the captured states, of the tokens that follow `places`."""
        logits = (sample.last[places].to(self._head.device, self._head.dtype) @ self._head.T)[:, : self._vocab_size]
        return logits.float().log_softmax(-1).cpu()[torch.arange(len(places)), sample.ids[places + 1]]


def body(ids: list[int]) -> dict[str, Any]:
    """What is asked for the log-probabilities of a whole prompt."""
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "extra_key": uuid.uuid4().hex,
    }
