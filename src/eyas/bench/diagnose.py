"""Why is a draft not accepted as predicted? By experiment: each hypothesis is replayed, and the one that fits is named.

With figures of a server, that is the variant whose acceptance by position agrees with them, where that of the draft as
it is does not. Without, it is the variant that is accepted much better than the draft as it is: then the draft's files
say something else than what was trained. Never more than one fault is assumed at a time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.bench import parity
from eyas.bench.evidence import Layers, Row
from eyas.bench.variants import Variant
from eyas.decode.acceptance import Tally
from eyas.decode.replay import BATCH_TOKENS, pooled, tallies
from eyas.draft.model import DraftModel
from eyas.progress import Progress
from eyas.train.packing import group

AS_IS = "as it is"
CLOSER = 0.5
"""A variant is named only if it lies at most this far from the served figures, the draft as it is being at 1."""
RIVAL, SLACK = 1.25, 0.005
"""Another cause is named beside the best one up to this multiple of the best one's distance, and a little more."""
LIKELIEST = "eagle"
"""Of causes that fit alike, where nothing at all is accepted: one flag, while head and map are in the checked files."""
LEAST_GAIN = 0.1
"""Accept length by which a variant must beat the draft as it is, to be called its fault."""


@dataclass(frozen=True)
class Trial:
    """A variant replayed: its acceptance, and its distance from the served figures.

    `by_answer`: the distance was taken answer by answer; `agrees`: the pooled figures are one within their statistics.
    """

    variant: Variant
    acceptance: dict[str, Any]
    distance: float | None = None
    by_answer: bool = False
    agrees: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As a row of the result."""
        rates = [row["accepted"] / row["reached"] if row["reached"] else None for row in self.acceptance["by_position"]]
        return {
            "cause": self.variant.cause,
            "label": self.variant.label,
            "accept_length": self.acceptance["accept_length"],
            "rates": rates,
            "distance": self.distance,
            "agrees": self.agrees,
        }


def diagnose(
    draft: DraftModel,
    layers: Layers,
    variants: Iterable[Variant],
    rows: Mapping[str, Sequence[Row]],
    served: dict[str, Any] | None,
    draft_tokens: int,
    progress: Progress,
) -> dict[str, Any]:
    """Replay the draft as it is and every variant on `rows[variant.rows]`, and name what fits.

    `served`: the *acceptance* on a server; None: none is known. Returns `cause` (None: none was found), `variant`
    (its label), `sentence`, `remedy`, `rivals` (causes that fit about as well), and the `trials`, the draft as it
    is first.
    """
    as_is = Variant("", AS_IS, "", layers)
    tried = [as_is, *variants]
    progress.total(len(tried), "variants")
    progress.milestone("replaying what may be wrong")
    trials = []
    for variant in tried:
        trials.append(_try(draft, variant, rows[variant.rows], served, draft_tokens))
        progress.advance(1)
    found = _judge(trials, served) if served else _better(trials)
    return {**found, "served": served, "trials": [trial.to_dict() for trial in trials]}


def _try(
    draft: DraftModel, variant: Variant, rows: Sequence[Row], served: dict[str, Any] | None, draft_tokens: int
) -> Trial:
    walks = replayed(draft, variant, rows, draft_tokens)
    acceptance = pooled([(row.answer, walk) for row, walk in zip(rows, walks, strict=True)], draft_tokens)
    if served is None:
        return Trial(variant, acceptance)
    agrees = not parity.compare(acceptance, served, exact=False)
    known = [row.served for row in rows if row.served is not None]
    if known and len(known) == len(rows):
        return Trial(variant, acceptance, apart(walks, known), True, agrees)
    return Trial(variant, acceptance, _apart(acceptance, served), False, agrees)


def replayed(draft: DraftModel, variant: Variant, rows: Sequence[Row], draft_tokens: int) -> list[Tally]:
    """The walk of each row under a variant."""
    changed = variant.change(draft)
    found: list[Tally] = []
    for part in group([len(row.ids) for row in rows], BATCH_TOKENS):
        found += tallies(changed, [rows[i].sample(variant.layers) for i in part], draft_tokens)
    return found


def apart(walks: Sequence[Tally], served: Sequence[Tally]) -> float:
    """How far replayed answers lie from the served ones, answer by answer: counts that differ, for each verify step.

    0 for the same draft on the same states in float32. Answers tell far more than pooled counts do: two faults that
    spoil a draft equally still spoil other answers.
    """
    differ = sum(
        abs(one.rounds - other.rounds) + sum(abs(a - b) for a, b in zip(one.accepted, other.accepted, strict=True))
        for one, other in zip(walks, served, strict=True)
    )
    return differ / max(1, sum(one.rounds for one in served))


def _apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The same from pooled counts: the difference of the joint rates by position, or of the accept lengths."""
    rows = parity.by_position(one, other)
    if not parity.positions(other):
        return abs((parity.accept_length(one) or 1.0) - (parity.accept_length(other) or 1.0))
    rounds, others = max(1, parity.count(one, "rounds")), max(1, parity.count(other, "rounds"))
    return sum(abs(row["accepted_predicted"] / rounds - row["accepted_served"] / others) for row in rows)


def _judge(trials: list[Trial], served: dict[str, Any]) -> dict[str, Any]:
    """What agrees with the served figures."""
    as_is, *others = trials
    reached = f"accept length {parity.accept_length(served):.2f}"
    fitting = sorted((t for t in others if t.agrees), key=lambda t: (_distance(t), t.variant.cause != LIKELIEST))
    closest = _distance(fitting[0]) if fitting else math.inf
    if as_is.agrees and not (as_is.by_answer and closest <= CLOSER * _distance(as_is)):
        return _nothing(f"The draft as it is predicts what was served ({reached}): nothing is wrong with it.")
    if closest > CLOSER * _distance(as_is):
        return _nothing(
            f"No single fault that was tried explains what was served ({reached}, "
            f"{as_is.acceptance['accept_length']:.2f} predicted): see the table of what was."
        )
    best = fitting[0]
    noise = RIVAL * closest + SLACK if best.by_answer else closest + _standard_error(best.acceptance, served)
    sentence = (
        f"What was served ({reached}) is what replay gives with this fault: {best.variant.label} "
        f"({best.acceptance['accept_length']:.2f}; as it is {as_is.acceptance['accept_length']:.2f})."
    )
    return _named(best, sentence, [t for t in fitting if _distance(t) <= noise])


def _distance(trial: Trial) -> float:
    assert trial.distance is not None
    return trial.distance


def _standard_error(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Of the difference of two accept lengths."""
    share = sum(1 / max(1, parity.count(part, "rounds")) for part in (one, other))
    return math.sqrt(parity.variance(one, other) * share)


def _better(trials: list[Trial]) -> dict[str, Any]:
    """What is accepted much better than the draft as it is."""
    as_is, *others = trials
    before = as_is.acceptance["accept_length"]

    def gain(trial: Trial) -> float:
        return float(trial.acceptance["accept_length"] - before)

    best = max(others, key=gain)
    error = _standard_error(as_is.acceptance, best.acceptance)
    if gain(best) <= max(LEAST_GAIN, parity.STANDARD_ERRORS * error):
        return _nothing(f"Nothing that was tried is accepted better than the draft as it is ({before:.2f}).")
    close = [t for t in others if gain(t) >= gain(best) - error]
    sentence = (
        f"The draft is accepted better with one change: {best.variant.label} "
        f"({best.acceptance['accept_length']:.2f}; as it is {before:.2f})."
    )
    return _named(best, sentence, close)


def _named(best: Trial, sentence: str, close: list[Trial]) -> dict[str, Any]:
    """The best variant as the cause, with the remedies of all causes that fit about as well."""
    remedies = {trial.variant.cause: trial.variant.remedy for trial in (*reversed(close), best)}
    cause, label = best.variant.cause, best.variant.label
    rivals = sorted(remedies.keys() - {cause})
    more = f" Equally possible: {', '.join(rivals)}." if rivals else ""
    remedy = "; or ".join([remedies[cause], *(remedies[rival] for rival in rivals)])
    return {"cause": cause, "variant": label, "sentence": sentence + more, "remedy": remedy, "rivals": rivals}


def _nothing(sentence: str) -> dict[str, Any]:
    return {"cause": None, "variant": None, "sentence": sentence, "remedy": "", "rivals": []}
