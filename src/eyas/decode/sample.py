"""Which of the draft's guesses the target accepts: the judges of speculative decoding.

Greedily, those that equal the target's own choices. At a temperature, a guess x is accepted with the probability p(x)
that the target gives it; the first one that is not is replaced by a token drawn from the rest of p. Guesses are certain
(the draft's best token), so this is the rule of Leviathan et al. (arXiv 2211.17192, 2.3) with q(x) = 1, and the answers
have the target's own distribution, whatever the draft.
"""

from typing import Protocol

import torch

from eyas.engines.inprocess.target import InProcessTarget


class Judge(Protocol):
    """Chooses tokens from the target's states."""

    def first(self, states: torch.Tensor) -> torch.Tensor:
        """The token after each state [B, H]: int64 [B]."""
        ...

    def __call__(self, states: torch.Tensor, guesses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """After states [B, k + 1, H], with guesses int64 [B, k] for all but the last place.

        Returns how many guesses are accepted, int64 [B], and tokens int64 [B, k + 1]: those accepted, and behind them
        the one that comes for free; what follows means nothing.
        """
        ...


class Greedy:
    """The target's most probable tokens."""

    def __init__(self, target: InProcessTarget) -> None:
        self._target = target

    def first(self, states: torch.Tensor) -> torch.Tensor:
        """See Judge."""
        return self._target.greedy(states)

    def __call__(self, states: torch.Tensor, guesses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Judge."""
        choices = self._target.greedy(states)
        return (choices[:, :-1] == guesses).to(torch.int64).cumprod(1).sum(1), choices


class Sampled:
    """Tokens drawn at a temperature above 0, from all of the vocabulary; `generator` on the target's device."""

    def __init__(self, target: InProcessTarget, temperature: float, generator: torch.Generator) -> None:
        assert temperature > 0
        self._target, self._temperature, self._generator = target, temperature, generator

    def _probabilities(self, states: torch.Tensor) -> torch.Tensor:
        """Float32 [..., V]."""
        return torch.softmax((states @ self._target.head.T).float() / self._temperature, -1)

    def _draw(self, weights: torch.Tensor) -> torch.Tensor:
        """A token of each row of weights [B, V], which need not add up to 1: int64 [B]."""
        return torch.multinomial(weights, 1, generator=self._generator)[:, 0]

    @torch.inference_mode()
    def first(self, states: torch.Tensor) -> torch.Tensor:
        """See Judge."""
        return self._draw(self._probabilities(states))

    @torch.inference_mode()
    def __call__(self, states: torch.Tensor, guesses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Judge."""
        p = self._probabilities(states)
        chances = p[:, :-1].gather(2, guesses[..., None])[..., 0]
        luck = torch.rand(chances.shape, generator=self._generator, device=chances.device)
        accepted = (luck < chances).to(torch.int64).cumprod(1).sum(1)
        row = torch.arange(len(p), device=p.device)
        rest = p[row, accepted]
        turned_down = accepted < guesses.shape[1]
        rest[row[turned_down], guesses[row[turned_down], accepted[turned_down]]] = 0
        tokens = torch.cat([guesses, guesses[:, :1]], 1)
        tokens[row, accepted] = self._draw(rest)
        return accepted, tokens
