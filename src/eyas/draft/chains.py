"""Which slots of packed samples work, and what each attends to: index lists, made on the CPU once a batch.

Slot t at step k reads its state and the embedding of x[t+1+k], and predicts x[t+2+k]. With answer[i] = "x[i] belongs to
an answer" it counts at step k where answer[t+1] … answer[t+2+k] all hold. So the slots of one run of answer tokens
stand side by side, the first ones count at more steps, and the state, token and label of step k at the run's row r are
those of row r+k. A slot that counts at no step serves the others through its step-0 key and value alone; slots behind a
document's last counting one serve nobody and are left out.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Chains:
    """Everything about a packed batch that does not depend on its states.

    *Rows* are the n slots that count at step 0, in order; `seen` are the s slots whose step-0 keys somebody looks at.
    """

    slots: torch.Tensor
    """int64 [n]: the slot of each row."""
    depth: torch.Tensor
    """int64 [n]: how many steps count there, at least 1; they are the first ones."""
    place: torch.Tensor
    """int64 [n]: its position within its document."""
    next_ids: torch.Tensor
    """int64 [n]: x[t+1]; the token of step k at row r is next_ids[r+k]."""
    seen: torch.Tensor
    """int64 [s]: slots, document by document."""
    seen_place: torch.Tensor
    seen_next_ids: torch.Tensor
    state_row: torch.Tensor | None
    """int64 [n]: where each row's slot is in `seen`; None where the rows are all that is seen."""
    keys: torch.Tensor | None
    """int64 [m]: what each run looks at, as rows of `seen`, run by run; None where that is `seen` itself."""
    run_starts: torch.Tensor
    """int32 [R+1]: first row of each run, and n."""
    key_starts: torch.Tensor
    """int32 [R+1]: where its keys begin in `keys`, and m. The last row sees all of them, the one before one less."""
    spans: tuple[tuple[int, int, int, int], ...]
    """The same on the host: first and last row, first and last key of each run, ends excluded."""
    counts: torch.Tensor
    """float64 [steps]: how many rows count at each step."""
    steps: int
    """At how many steps any row counts."""
    judged_row: torch.Tensor
    """int64 [N]: the rows that count, once for each step at which they do, in order of their labels."""
    judged_step: torch.Tensor
    label: torch.Tensor
    """int64 [N]: the row whose slot t has its label at t+1: row + step."""
    judged_before: tuple[int, ...]
    """How many of the N have a label before each row, and N; on the host."""

    def to(self, device: torch.device) -> "Chains":
        """On `device`, without waiting for it."""
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {
            field.name: value.pin_memory().to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)

    def __len__(self) -> int:
        return len(self.slots)


def chain_lengths(answer: torch.Tensor, starts: torch.Tensor, steps: int) -> torch.Tensor:
    """How many steps count at each slot: int64 [T], 0..steps. `answer` bool [T]; `starts` int64 [B+1], T at the end."""
    total = len(answer)
    place = torch.arange(total + 1)
    ends = starts[1:].repeat_interleave(starts.diff())
    stop = torch.cat([torch.where(answer, total, place[:-1]), place[-1:]])
    stop = stop.flip(0).cummin(0).values.flip(0)[:-1]  # the next slot that is no answer
    run = torch.minimum(stop, ends) - place[:-1]  # answer tokens from here on, in this document
    ahead = torch.cat([run[1:], run.new_zeros(1)])
    ahead[starts[1:] - 1] = 0
    return (ahead - 1).clamp(0, steps)


def chains(ids: torch.Tensor, answer: torch.Tensor, starts: torch.Tensor, steps: int) -> Chains:
    """The chains of samples packed one after another, for `steps` steps.

    `ids` int64 [T]; `answer` bool [T]; `starts` int64 [B+1], the first slot of each document, and T. All on the CPU.
    """
    lengths = chain_lengths(answer, starts, steps)
    document = torch.arange(len(starts) - 1).repeat_interleave(starts.diff())
    place = torch.arange(len(ids)) - starts[document]
    slots = lengths.nonzero().flatten()
    last = torch.full((len(starts) - 1,), -1).scatter_reduce_(0, document[slots], place[slots], "amax")
    seen = (place <= last[document]).nonzero().flatten()
    row_of = torch.full((len(ids),), -1)
    row_of[seen] = torch.arange(len(seen))
    # Within a document a run ends where the next row's slot is not the next slot.
    fresh = torch.ones(len(slots), dtype=torch.bool)
    fresh[1:] = (slots.diff() != 1) | (document[slots].diff() != 0)
    first = fresh.nonzero().flatten()
    run_starts = torch.cat([first, torch.tensor([len(slots)])])
    width = place[slots[run_starts[1:] - 1]] + 1 if len(slots) else place[:0]
    key_starts = torch.cat([torch.zeros(1, dtype=torch.int64), width.cumsum(0)])
    origin = row_of[starts[document[slots[first]]]]
    offset = torch.arange(int(key_starts[-1])) - key_starts[:-1].repeat_interleave(width)
    keys = origin.repeat_interleave(width) + offset
    rows, cols = run_starts.tolist(), key_starts.tolist()
    step = torch.arange(steps)
    row = torch.arange(len(slots))[:, None] - step
    counting = (row >= 0) & (lengths[slots][row.clamp_min(0)] > step)
    label, judged_step = counting.nonzero(as_tuple=True)
    return Chains(
        slots=slots,
        depth=lengths[slots],
        place=place[slots],
        next_ids=ids[slots + 1],
        seen=seen,
        seen_place=place[seen],
        seen_next_ids=ids[seen + 1],
        state_row=None if len(slots) == len(seen) else row_of[slots],
        keys=None if torch.equal(keys, torch.arange(len(seen))) else keys,
        run_starts=run_starts.to(torch.int32),
        key_starts=key_starts.to(torch.int32),
        spans=tuple(zip(rows, rows[1:], cols, cols[1:], strict=False)),
        counts=(lengths[:, None] > step).sum(0).double(),
        steps=int(lengths.max()),
        judged_row=label - judged_step,
        judged_step=judged_step,
        label=label,
        judged_before=(0, *counting.sum(1).cumsum(0).tolist()),
    )
