"""The search, against servers whose speed is made up: seconds a token, with noise of each load and of each block."""

import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from eyas.bench.measure import Block, Request
from eyas.bench.tune.search import SPENT, choose, confirm, judge, search
from eyas.bench.tune.space import DEFAULT, Factor, Setting
from eyas.bench.tune.trial import RUNGS, Blocks, Trial, compared
from eyas.config import TUNING_LOADS

ROUNDS = 2


def block(seconds: float, concurrency: int = 2) -> Block:
    requests = [Request(str(i), [1] * 10, 10 * seconds, seconds, [seconds] * 9, None, True) for i in range(4)]
    return Block(10 * seconds * len(requests) / concurrency, concurrency, requests)


class Played:
    """`speeds`: how many times as fast each flag makes the server; 0: it does not start."""

    def __init__(self, speeds: dict[str, float], noise: float = 0.0, seed: int = 0) -> None:
        self.speeds, self.noise, self.random = speeds, noise, random.Random(seed)
        self.loads = 0
        self.last: Setting | None = None
        self.taken: list[tuple[str, str, int]] = []

    def take(self, setting: Setting, enough: Callable[[Blocks], bool], part: str = "search") -> Trial:
        loads = int(self.last != setting)
        self.loads += loads
        speed = 1.0
        for name in setting.flags:
            speed *= self.speeds.get(f"{name} {setting.flags[name]}", self.speeds.get(name, 1.0))
        if speed == 0:
            self.last = None
            self.taken.append((part, setting.name, 0))
            return Trial(setting, {}, "no such kernel", loads, None, 1.0, {})
        self.last = setting
        blocks: dict[int, list[Block]] = {2: []}
        for rung in RUNGS:
            while len(blocks[2]) < rung * ROUNDS:
                blocks[2].append(block(self.random.lognormvariate(0, self.noise) / speed))
            if enough(blocks):
                break
        self.taken.append((part, setting.name, len(blocks[2])))
        return Trial(setting, blocks, None, loads, 1.0, 1.0, {})


def factor(name: str, *values: int, ordered: bool = False) -> Factor:
    return Factor(name, tuple(Setting({name: value}) for value in values or (1,)), ordered)


def searched(server: Played, factors: list[Factor], most: int) -> tuple[list[tuple[str, str | None]], str | None]:
    """Rows as name and reason, and the winner, if one is confirmed."""
    default = server.take(DEFAULT, lambda _: False)
    rows = search(default, factors, server, most)
    chosen = choose(rows)
    confirmed = confirm(chosen.setting, server) if chosen else None
    won = chosen.setting.name if chosen and confirmed and confirmed.why is None else None
    return [(row.setting.name, row.why) for row in rows], won


def test_one_factor_at_a_time_and_the_winners_combined() -> None:
    server = Played({"a": 1.2, "b": 0.8, "c": 1.1}, noise=0.001)
    rows, won = searched(server, [factor("a"), factor("b"), factor("c")], 12)
    assert [name for name, _ in rows] == ["a 1", "b 1", "c 1", "a 1, c 1"]
    assert won == "a 1, c 1"
    # The combination's server is up when the confirmation begins.
    assert server.loads == 1 + 3 + 1 + 2
    assert [name for part, name, _ in server.taken if part != "search"] == ["a 1, c 1", "default", "a 1, c 1"]


def test_where_the_combination_is_worse_the_best_alone_wins() -> None:
    server = Played({"a": 1.2, "c": 1.1}, noise=0.001)
    take = server.take

    def disliking(setting: Setting, enough: Callable[[Blocks], bool], part: str = "search") -> Trial:
        server.speeds["c"] = 0.9 if "a" in setting.flags else 1.1
        return take(setting, enough, part)

    server.take = disliking  # type: ignore[method-assign]
    _, won = searched(server, [factor("a"), factor("c")], 12)
    assert won == "a 1"
    assert [name for part, name, _ in server.taken if part != "search"] == ["default", "a 1", "default"]


def test_the_first_settings_of_all_factors_come_before_second_ones() -> None:
    server = Played({})
    rows, _ = searched(server, [factor("a", 1, 2), factor("b", 1, 2, 3), factor("c")], 20)
    assert [name for name, _ in rows] == ["a 1", "b 1", "c 1", "a 2", "b 2", "b 3"]


def test_a_slower_setting_takes_those_behind_it_along() -> None:
    for speed, reason in ((0.8, "slower"), (0.0, "failed")):
        server = Played({"steps 4": speed}, noise=0.001)
        rows, _ = searched(server, [factor("steps", 4, 8, ordered=True), factor("other", 1, 2)], 20)
        assert reason in (dict(rows)["steps 8"] or "")
        assert dict(rows)["other 2"] is None
        assert server.loads == 1 + 3


def test_a_loss_is_seen_with_few_blocks_a_gain_is_looked_at_again_and_no_difference_takes_all() -> None:
    server = Played({"slow": 0.5, "fast": 2.0}, noise=0.01)
    searched(server, [factor("slow"), factor("fast"), factor("same")], 20)
    spent = {name: blocks for part, name, blocks in server.taken if part == "search"}
    assert spent["slow 1"] == RUNGS[0] * ROUNDS
    assert spent["fast 1"] == RUNGS[1] * ROUNDS
    assert spent["same 1"] == spent["default"] == RUNGS[2] * ROUNDS


def test_what_crashes_is_a_row_and_the_search_goes_on() -> None:
    server = Played({"bad": 0.0, "good": 1.5}, noise=0.001)
    rows, won = searched(server, [factor("bad"), factor("good")], 8)
    assert rows[0] == ("bad 1", "no such kernel")
    assert won == "good 1"


def test_with_the_fewest_loads_one_setting_is_tried_and_confirmed() -> None:
    server = Played({"a": 1.5, "b": 2.0}, noise=0.001)
    rows, won = searched(server, [factor("a"), factor("b")], TUNING_LOADS)
    assert rows == [("a 1", None), ("b 1", SPENT)]
    assert won == "a 1"
    assert server.loads == TUNING_LOADS


@given(
    st.lists(st.sampled_from([0.0, 0.8, 1.0, 1.2]), min_size=1, max_size=5),
    st.integers(TUNING_LOADS, 12),
    st.integers(0, 1000),
    st.sampled_from([0.001, 0.05]),
)
def test_loads_are_never_exceeded_and_each_setting_has_a_row(
    speeds: list[float], most: int, seed: int, noise: float
) -> None:
    factors = [factor(f"f{i}", 1, 2, ordered=i % 2 == 0) for i in range(len(speeds))]
    server = Played({f"f{i}": speed for i, speed in enumerate(speeds)}, noise, seed)
    rows, won = searched(server, factors, most)
    assert server.loads <= most
    named = [setting.name for one in factors for setting in one.settings]
    assert sorted(name for name, _ in rows if ", " not in name) == sorted(named)
    if noise < 0.01:
        assert (won is None) or max(speeds) > 1


def test_noise_alone_seldom_wins() -> None:
    wins = [searched(Played({}, 0.05, seed), [factor("a"), factor("b"), factor("c")], 12)[1] for seed in range(60)]
    assert sum(won is not None for won in wins) <= 3


def test_a_gain_within_the_drift_or_with_1_in_its_interval_is_refused() -> None:
    good = {"ratio": 1.1, "low": 1.05, "high": 1.15}
    assert judge(good, 1.01, ["default", "a", "default"]).why is None
    assert "drifted by 0.880" in str(judge(good, 0.88, ["default", "a", "default"]).why)
    assert "no certain gain" in str(judge({**good, "low": 0.99}, 1.0, ["default"]).why)
    assert "could not be measured" in str(judge({"ratio": None, "low": None, "high": None}, None, ["default"]).why)


def test_several_goals_count_alike() -> None:
    base = {1: [block(1.0, 1)] * 2, 4: [block(1.0, 4), block(1.001, 4)]}
    other = {1: [block(0.5, 1)] * 2, 4: [block(2.0, 4), block(2.002, 4)]}
    found = compared(base, other)
    assert found["ratio"] is not None
    assert abs(found["ratio"] - 1) < 1e-9
    assert found["low"] is not None
    assert found["low"] < 1 < (found["high"] or 0)
