"""Acceptance counts of one served request, as replay counts them.

SGLang counts every draft that a verify step accepted, those behind the answer's end too, and says how many steps
accepted how many (`spec_correct_drafts_histogram`). Replay stops at the end: drafts behind it were never reached. The
two differ in an answer's last step alone. How far that overshot follows from the totals; how many drafts it had
accepted, from the stream, whose last event brings the tokens of the last step.
"""

from collections.abc import Sequence
from typing import Any

from eyas.decode.acceptance import Tally
from eyas.errors import UserError

HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")


def tally_of(url: str, events: Sequence[dict[str, Any]], answer_length: int, draft_tokens: int) -> tuple[Tally, bool]:
    """The tally of an answer of `answer_length` tokens from the events of its reply, and whether it is exact.

    It is not where several steps came in one event and the last one could have been either of two kinds: the totals are
    right then, the split by position may be off by one step. Raises UserError: no counts, or such as contradict.
    """
    meta = events[-1].get("meta_info", {})
    tally, rounds = Tally(draft_tokens, rows=1), int(meta.get("spec_verify_ct") or 0)
    if not rounds:
        if answer_length > 1:
            raise UserError(f"{url}: replies lack spec_verify_ct: does it serve with the draft?")
        return tally, True
    steps = next((list(meta[name]) for name in HISTOGRAMS if meta.get(name)), None)
    if steps is None:
        raise UserError(f"{url}: replies lack {HISTOGRAMS[0]}: update SGLang")
    overshot = 1 + sum(accepted * count for accepted, count in enumerate(steps)) + rounds - answer_length
    if sum(steps) != rounds or len(steps) > draft_tokens + 1 or not 0 <= overshot <= draft_tokens:
        raise UserError(
            f"{url}: {rounds} verify steps that accepted {steps} drafts make no answer of {answer_length} tokens "
            f"with {draft_tokens} draft tokens: another draft length, or counts of another definition"
        )
    exact = True
    if overshot:
        last, exact = _last_step(steps, overshot, rounds, events)
        steps[last] -= 1
        tally.add_round(last + 1 - overshot, last + 1 - overshot)
    for accepted, count in enumerate(steps):
        for _ in range(count):
            tally.add_round(min(accepted + 1, draft_tokens), accepted)
    return tally, exact


def _last_step(steps: list[int], overshot: int, rounds: int, events: Sequence[dict[str, Any]]) -> tuple[int, bool]:
    """How many drafts the last step accepted, and whether that is sure."""
    able = [accepted for accepted in range(overshot, len(steps)) if steps[accepted]]
    if len(able) == 1:
        return able[0], True
    counts = sorted({int(event["meta_info"]["completion_tokens"]) for event in events if event.get("meta_info")})
    told = counts[-1] - counts[-2] - 1 + overshot if len(counts) > 1 else -1
    if told in able:
        return told, len(counts) == rounds + 1
    return max(able, key=lambda accepted: steps[accepted]), False
